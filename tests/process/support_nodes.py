"""Runs of several nodes on this machine, each an agent of its own, that meet at a real etcd or at one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etcd_server import Cluster
from store_server import free_port
from waiting import wait_until

TRAIN = Path(__file__).with_name("support_train.py")
TTL_S = 2
TIMES = f"ttl={TTL_S},last_call_timeout=1,join_timeout=40"


class Site:
    """A run of one or more nodes on this machine, in one run directory. Without etcd one of them serves the store."""

    def __init__(
        self,
        etcd: Cluster | None,
        folder: Path,
        *,
        epochs: int,
        nnodes: str = "1:3",
        pause_s: float = 0.05,
        conf: Mapping[str, str] | None = None,
        script: Sequence[str | Path] | None = None,
    ) -> None:
        self.etcd, self.folder, self.nnodes = etcd, folder, nnodes
        if etcd is None:
            self.backend, self.endpoint = "c10d", f"localhost:{free_port()}"
        else:
            self.backend, self.endpoint = "etcd3", ",".join(one.endpoint.address for one in etcd.members)
        self.conf = "".join(f",{name}={value}" for name, value in (conf or {}).items())
        self.run_dir, self.records = folder / "run", folder / "records"
        self.records.mkdir()
        options = ["--out", str(self.records), "--epochs", str(epochs), "--pause-s", str(pause_s)]
        self.script = [*map(str, script or [TRAIN]), *options]
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        name: str,
        *options: str,
        nnodes: str | None = None,
        environ: dict[str, str] | None = None,
        conf: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        words = ["-m", "elastictrain", "run", "--nnodes", nnodes or self.nnodes, "--nproc-per-node", "1"]
        words += ["--rdzv-backend", self.backend, "--rdzv-endpoint", self.endpoint]
        more = "".join(f",{name}={value}" for name, value in (conf or {}).items())
        words += ["--rdzv-id", "job", "--rdzv-conf", f"{TIMES}{self.conf}{more}"]
        words += ["--run-dir", str(self.run_dir), *options, *self.script]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.nodes[name] = subprocess.Popen(
                [*wrapper, sys.executable, *words], stdout=log, stderr=log, env={**os.environ, **(environ or {})}
            )
        return self.nodes[name]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)}" for name in self.nodes)

    def ledger(self, event: str) -> list[dict[str, Any]]:
        found = []
        for path in (self.run_dir / "ledger").glob("*.jsonl"):
            lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
            found += [{**line, "node": path.stem} for line in lines if line["event"] == event]
        return found

    def wait_round(self, world_size: int, *, after: int = 0) -> int:
        """Wait for a round of this size after a generation; returns its own."""

        def find() -> int | None:
            made = [one["generation"] for one in self.ledger("round") if one["world_size"] == world_size]
            return max((number for number in made if number > after), default=None)

        return int(wait_until(find, 40, self.logs))

    def newest_step(self) -> int:
        return max((one["step"] for one in self.ledger("commit")), default=0)

    def wait_steps(self, number: int) -> None:
        goal = self.newest_step() + number
        wait_until(lambda: self.newest_step() >= goal, 40, self.logs)

    def ends(self, name: str) -> int:
        try:
            return self.nodes[name].wait(60)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end:\n{self.logs()}") from None

    def kill(self, name: str) -> None:
        """SIGKILL an agent, and with it its workers."""
        node = self.nodes.pop(name)
        node.kill()
        node.wait()

    def prove(self, epochs: int) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "elastictrain", "verify", str(self.run_dir)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + self.logs()
        assert f"every sample of {epochs} epochs committed exactly once" in done.stdout

    def close(self) -> None:
        for node in self.nodes.values():
            if node.poll() is None:
                node.kill()
                node.wait()


def ranges(site: Site) -> Counter[tuple[Any, ...]]:
    """How often each range of samples was committed, over all nodes' ledgers, each commit of a generation once."""
    commits = {
        (one["generation"], one["step"], one["epoch"], one["start"], one["stop"]) for one in site.ledger("commit")
    }
    return Counter((epoch, start, stop) for _, _, epoch, start, stop in commits)
