"""Several agents meet at a real etcd: they train together, lose each other, come back, and leave a proof behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_server import BINARIES, NO_SERVER, Cluster, run_cluster
from waiting import wait_until

TRAIN = Path(__file__).with_name("support_train.py")
SAMPLES = 101
TTL_S = 2

pytestmark = pytest.mark.skipif(not BINARIES, reason=NO_SERVER)


@pytest.fixture
def etcd() -> Iterator[Cluster]:
    with run_cluster() as cluster:
        yield cluster


class Site:
    """A run of one or more nodes on this machine, in one run directory."""

    def __init__(self, etcd: Cluster, folder: Path, *, epochs: int, nnodes: str = "1:3", pause_s: float = 0.05) -> None:
        self.etcd, self.folder, self.nnodes = etcd, folder, nnodes
        self.run_dir, self.records = folder / "run", folder / "records"
        self.records.mkdir()
        self.script = [str(TRAIN), "--out", str(self.records), "--epochs", str(epochs), "--pause-s", str(pause_s)]
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, *options: str, nnodes: str | None = None, environ: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        words = ["-m", "elastictrain", "run", "--nnodes", nnodes or self.nnodes, "--nproc-per-node", "1"]
        words += ["--rdzv-backend", "etcd3", "--rdzv-endpoint", self.etcd.members[0].endpoint.address]
        words += ["--rdzv-id", "job", "--rdzv-conf", f"ttl={TTL_S},last_call_timeout=1,join_timeout=40"]
        words += ["--run-dir", str(self.run_dir), *options, *self.script]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.nodes[name] = subprocess.Popen(
                [sys.executable, *words], stdout=log, stderr=log, env={**os.environ, **(environ or {})}
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

    def wait_steps(self, number: int) -> None:
        def newest() -> int:
            return max((one["step"] for one in self.ledger("commit")), default=0)

        goal = newest() + number
        wait_until(lambda: newest() >= goal, 40, self.logs)

    def ends(self, name: str) -> int:
        try:
            return self.nodes[name].wait(60)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} did not end:\n{self.logs()}") from None

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


@pytest.fixture
def site(etcd: Cluster, tmp_path: Path) -> Iterator[Site]:
    made = Site(etcd, tmp_path, epochs=14)
    yield made
    made.close()


def ranges(site: Site) -> Counter[tuple[Any, ...]]:
    """How often each range of samples was committed, over all nodes' ledgers, each commit of a generation once."""
    commits = {
        (one["generation"], one["step"], one["epoch"], one["start"], one["stop"]) for one in site.ledger("commit")
    }
    return Counter((epoch, start, stop) for _, _, epoch, start, stop in commits)


def test_survivors_keep_their_processes_when_the_first_node_is_killed_and_another_comes(site: Site) -> None:
    for name in ("a", "b"):
        site.start(name)
    first = site.wait_round(2)
    site.wait_steps(8)
    agents = {one["node"]: one["pid"] for one in site.ledger("node_started")}
    # The node of rank 0, which also serves the store of the process group.
    victim = next(one["seats"][0][2] for one in site.ledger("round") if one["generation"] == first)
    (survivor,) = set(agents) - {victim}
    pids = {one["pid"] for one in site.ledger("worker_started") if one["node"] == survivor}
    os.kill(agents[victim], signal.SIGKILL)
    alone = site.wait_round(1, after=first)
    site.wait_steps(4)
    site.start("c")
    site.wait_round(2, after=alone)
    codes = {name: site.ends(name) for name, node in site.nodes.items() if node.pid != agents[victim]}
    assert set(codes.values()) == {0}, site.logs()
    started = {one["pid"] for one in site.ledger("worker_started") if one["node"] == survivor}
    assert started == pids, "the survivor's worker is still the same process"
    assert len(list(site.records.glob("end-*"))) == 2
    assert all(times == 1 for times in ranges(site).values())
    site.prove(14)
    assert list(site.etcd.values("/elastictrain/")) == ["/elastictrain/job/closed"]


def test_node_leaves_without_a_failed_step_when_it_gets_sigterm(site: Site) -> None:
    for name in ("a", "b"):
        site.start(name)
    first = site.wait_round(2)
    site.wait_steps(5)
    site.nodes["b"].send_signal(signal.SIGTERM)
    assert site.ends("b") == 75, site.logs()
    site.wait_round(1, after=first)
    assert site.ends("a") == 0, site.logs()
    assert not [one for one in site.ledger("broken") if one["cause"] not in ("leave", "planned")], "nobody was aborted"
    site.prove(14)


def test_late_node_says_so_and_ends_well_when_the_run_is_over(etcd: Cluster, tmp_path: Path) -> None:
    site = Site(etcd, tmp_path, epochs=1, nnodes="1:2", pause_s=0.0)
    try:
        site.start("a")
        assert site.ends("a") == 0, site.logs()
        site.start("late")
        assert site.ends("late") == 0, site.logs()
        assert "the run is finished" in site.log("late")
        site.prove(1)
    finally:
        site.close()


def test_node_is_refused_with_both_values_when_its_options_differ(site: Site) -> None:
    site.start("a")
    site.wait_round(1)
    site.start("b", nnodes="1:2")
    assert site.ends("b") == 2
    assert "max_nodes=2" in site.log("b")
    assert "max_nodes=3" in site.log("b")
    assert "Traceback" not in site.log("b")


def test_password_reaches_etcd_and_nothing_else_when_it_asks_for_one(tmp_path: Path) -> None:
    with run_cluster() as etcd:
        etcd.enable_auth("trainer", "s3cret-word", prefix="/elastictrain/")
        site = Site(etcd, tmp_path, epochs=1, nnodes="1:1", pause_s=0.0)
        environ = {"ELASTICTRAIN_ETCD_PASSWORD": "s3cret-word"}
        try:
            site.start("a", "--rdzv-conf", f"ttl={TTL_S},user=trainer", environ=environ)
            assert site.ends("a") == 0, site.logs()
            site.start("b", "--rdzv-conf", "user=trainer", environ={"ELASTICTRAIN_ETCD_PASSWORD": "wrong"})
            assert site.ends("b") == 2, site.logs()
        finally:
            site.close()
    assert "Traceback" not in site.log("b")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"s3cret-word" not in path.read_bytes(), path
