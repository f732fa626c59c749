"""A run on this machine under elastictrain, torchrun or torchft, whose nodes can be started, killed and told to leave.

A node is a set of processes with a mark in their environment, on this machine or in a network namespace of its own.
A site's workers write their commits into its folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from commit_times import Commit, CommitTimes

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests' own etcd server

import etcd_server
from network import Network, run_network
from waiting import wait_until

PROGRAMS = Path(__file__).parent / "programs"
LOOPBACK = "127.0.0.1"
END_S = 40.0
SERVICE_START_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is trained, by how many. `ttl_s` and `hang_timeout_s` are for elastictrain alone.

    `is_apart`: each node has a network namespace and can be cut off; etcd, stores and lighthouses are outside.
    """

    num_nodes: int
    per_node: int
    model: str
    step_s: float
    ttl_s: float = 10.0
    hang_timeout_s: float | None = None
    is_apart: bool = False

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.per_node


class Site:
    """One run. `close` it: that ends every process of it."""

    program: ClassVar[str]

    def __init__(self, layout: Layout, bin_folder: Path) -> None:
        self.layout, self.bin_folder = layout, bin_folder
        self.folder = Path(tempfile.mkdtemp(prefix="elastictrain-recovery-"))
        self.out = self.folder / "out"
        self.out.mkdir()
        self.times = CommitTimes(self.out)
        self.nodes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._rest = contextlib.ExitStack()
        self._count = 0
        self._network: Network | None = self._rest.enter_context(run_network()) if layout.is_apart else None
        self.service_address = self._network.gateway if self._network is not None else LOOPBACK

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for pid in self._pids():
            _kill(pid)
        for processes in self.nodes.values():
            for process in processes:
                process.wait(END_S)
        self._rest.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start_node(self) -> str:
        """Start a fresh node and return its name."""
        self._count += 1
        name = f"node{self._count}"
        self.nodes[name] = self._start(name)
        return name

    def _start(self, node: str) -> list[subprocess.Popen[bytes]]:
        raise NotImplementedError

    def kill_node(self, node: str) -> None:
        """SIGKILL all processes of a node at once, as a power cut would."""
        pids = [*(process.pid for process in self.nodes[node]), *self._pids(node)]  # all of them before the first dies
        for pid in pids:
            _kill(pid)

    def forget(self, node: str) -> None:
        """Wait for the end of a node that was killed or told to leave; what hangs is killed."""
        for process in self.nodes.pop(node):
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self._pids(node):
            _kill(pid)

    def tell_to_leave(self, node: str) -> None:
        for process in self.nodes[node]:
            process.send_signal(signal.SIGTERM)

    def cut_off(self, node: str) -> None:
        """Drop all that a node sends or is sent, without a word to anybody, until `heal`."""
        assert self._network is not None
        self._network.cut(self._network.hosts[node])

    def heal(self) -> None:
        assert self._network is not None
        self._network.heal()

    def worker(self, seat: int) -> Commit:
        """The newest commit of the worker that holds a seat of the only node."""
        return max((one for one in self.times.commits if one.seat == seat), key=lambda one: one.at_s)

    def stages_after(self, at_s: float) -> dict[str, float]:
        """Seconds of each stage of the first recovery after a moment; empty where a side does not tell."""
        return {}

    def known_after(self, at_s: float) -> float | None:
        """When the death of a node was known, in monotonic seconds; None where a side does not tell."""
        return None

    def said(self) -> str:
        """The last words of every process, for a failure."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def _spawn(self, node: str, words: list[str], **environ: str) -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
        own = {"OMP_NUM_THREADS": "1", "BENCH_SITE": str(self.folder), "BENCH_NODE": node, **environ}
        own["BENCH_ADDRESS"] = self._address(node)
        with (self.folder / f"{node}-{len(list(self.folder.glob('*.log')))}.log").open("wb") as log:
            return subprocess.Popen(
                [*self._wrapper(node), *words],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env={**kept, **own},
            )

    def _address(self, node: str) -> str:
        """Where a node's processes listen; a service listens where all reach it."""
        if self._network is None or not node.startswith("node"):
            return self.service_address
        return (self._network.hosts.get(node) or self._network.add(node)).address

    def _wrapper(self, node: str) -> list[str]:
        """What brings a command to a node's own network; the pid stays."""
        host = self._network.hosts.get(node) if self._network is not None else None
        return host.prefix if host is not None else []

    def _script(self) -> list[str]:
        layout = self.layout
        words = [str(PROGRAMS / self.program), "--model", layout.model, "--step-s", str(layout.step_s)]
        return [*words, "--out", str(self.out)]

    def _pids(self, node: str | None = None) -> Iterator[int]:
        """The living processes of this run, or of one node of it."""
        marks = [f"BENCH_SITE={self.folder}".encode()] + ([f"BENCH_NODE={node}".encode()] if node else [])
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    environ = (entry / "environ").read_bytes().split(b"\0")
                    if all(mark in environ for mark in marks):
                        yield int(entry.name)


class ElasticSite(Site):
    """elastictrain: one node by itself, or several that meet at an etcd of their own."""

    program = "elastic_paced.py"

    def __init__(self, layout: Layout, bin_folder: Path) -> None:
        super().__init__(layout, bin_folder)
        self.run_dir = self.folder / "run"
        self._meeting: list[str] = []
        self._leases: LeaseWatch | None = None
        if layout.num_nodes > 1:
            etcd = self._rest.enter_context(etcd_server.run_cluster(host=self.service_address))
            self._meeting = ["--nnodes", f"1:{layout.num_nodes}", "--rdzv-backend", "etcd3", "--rdzv-id", "bench"]
            self._meeting += ["--rdzv-endpoint", etcd.members[0].endpoint.address]
            self._meeting += ["--rdzv-conf", f"ttl={layout.ttl_s:g},last_call_timeout=1"]
            self._leases = self._rest.enter_context(LeaseWatch(etcd, "/elastictrain/bench/members/"))

    def _start(self, node: str) -> list[subprocess.Popen[bytes]]:
        words = [sys.executable, "-m", "elastictrain", "run", "--nproc-per-node", str(self.layout.per_node)]
        words += ["--run-dir", str(self.run_dir), *self._meeting]
        if self.layout.hang_timeout_s is not None:
            words += ["--hang-timeout", str(self.layout.hang_timeout_s)]
        return [self._spawn(node, [*words, *self._script()])]

    def stages_after(self, at_s: float) -> dict[str, float]:
        seconds: dict[str, float] = {}
        recovered = [entry for entry in self._ledger() if entry["event"] == "recovered" and entry["mono"] > at_s]
        first = min((entry["generation"] for entry in recovered), default=None)
        for entry in recovered:
            if entry["generation"] == first:  # every node tells of its own workers
                for stage, value in entry["seconds_by_stage"].items():
                    seconds[stage] = max(seconds.get(stage, 0.0), value)
        return seconds

    def known_after(self, at_s: float) -> float | None:
        return self._leases.gone_after(at_s) if self._leases is not None else None

    def _ledger(self) -> Iterator[Mapping[str, Any]]:
        for path in (self.run_dir / "ledger").glob("*.jsonl"):
            for line in path.read_bytes().split(b"\n")[:-1]:
                yield json.loads(line)


class TorchrunSite(Site):
    """torchrun, with a checkpoint in each step. Its store is hosted outside the nodes."""

    program = "torchrun_paced.py"
    conf: ClassVar[str] = ""
    environ: ClassVar[Mapping[str, str]] = {}

    def __init__(self, layout: Layout, bin_folder: Path) -> None:
        super().__init__(layout, bin_folder)
        self._meeting = ["--standalone"]
        if layout.num_nodes > 1:
            port = find_quiet_port()
            host = [str(bin_folder / "python"), str(PROGRAMS / "store_host.py"), self.service_address, str(port)]
            self.nodes["store"] = [self._spawn("store", host, PYTHONPATH="")]
            wait_until(lambda: is_listening(self.service_address, port), SERVICE_START_S, self.said)
            self._meeting = ["--nnodes", f"1:{layout.num_nodes}", "--rdzv-backend", "c10d", "--rdzv-id", "bench"]
            self._meeting += ["--rdzv-endpoint", f"{self.service_address}:{port}"]
            if self.conf:
                self._meeting += ["--rdzv-conf", self.conf]

    def _start(self, node: str) -> list[subprocess.Popen[bytes]]:
        words = [str(self.bin_folder / "torchrun"), "--nproc-per-node", str(self.layout.per_node), *self._meeting]
        words += ["--local-addr", self._address(node), "--max-restarts", "1000000", *self._script()]
        words += ["--checkpoint", str(self.folder / "state.pt")]
        return [self._spawn(node, words, PYTHONPATH="", **self.environ)]


class TunedTorchrunSite(TorchrunSite):
    """torchrun with the shortest waits that it takes, and a store of its own for each restart."""

    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    environ: ClassVar[Mapping[str, str]] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class TorchftSite(Site):
    """torchft: each worker is a replica group of its own, kept by a torchrun of its own; one lighthouse beside them."""

    program = "torchft_paced.py"
    lighthouse: ClassVar[list[str]] = []
    script_options: ClassVar[list[str]] = []

    def __init__(self, layout: Layout, bin_folder: Path) -> None:
        super().__init__(layout, bin_folder)
        port = find_quiet_port()
        words = [str(bin_folder / "torchft_lighthouse"), "--min_replicas", "1", "--bind"]
        words += [f"{self.service_address}:{port}"]
        self.nodes["lighthouse"] = [self._spawn("lighthouse", [*words, *self.lighthouse], PYTHONPATH="")]
        wait_until(lambda: is_listening(self.service_address, port), SERVICE_START_S, self.said)
        self._lighthouse_url = f"http://{self.service_address}:{port}"
        self._places: dict[str, int] = {}

    def _start(self, node: str) -> list[subprocess.Popen[bytes]]:
        taken = {place for name, place in self._places.items() if name in self.nodes}
        self._places[node] = min(set(range(self.layout.num_nodes + 1)) - taken)
        words = [str(self.bin_folder / "torchrun"), "--standalone", "--local-addr", self._address(node)]
        words += ["--nproc-per-node", "1", "--max-restarts", "1000000", *self._script(), *self.script_options]
        return [
            self._spawn(
                node,
                words,
                PYTHONPATH="",
                TORCHFT_LIGHTHOUSE=self._lighthouse_url,
                BENCH_SEAT=str(seat),
                REPLICA_GROUP_ID=str(self._places[node] * self.layout.per_node + seat),
                NUM_REPLICA_GROUPS=str(self.layout.world_size),
            )
            for seat in range(self.layout.per_node)
        ]


class TightTorchftSite(TorchftSite):
    """torchft with a heartbeat time-out of three heartbeats and the shortest waits that it works with."""

    lighthouse: ClassVar[list[str]] = [
        "--heartbeat_timeout_ms", "300", "--quorum_tick_ms", "10", "--join_timeout_ms", "100"
    ]  # fmt: skip
    script_options: ClassVar[list[str]] = ["--timeout-s", "3"]


SITES: dict[str, type[Site]] = {
    "elastictrain": ElasticSite,
    "torchrun": TorchrunSite,
    "torchrun-tuned": TunedTorchrunSite,
    "torchft": TorchftSite,
    "torchft-tight": TightTorchftSite,
}


class LeaseWatch:
    """Notes when keys under a prefix vanish from etcd: that is when a node's death is known."""

    def __init__(self, etcd: etcd_server.Cluster, prefix: str) -> None:
        self._etcd, self._prefix = etcd, prefix.encode()
        self._gone_s: list[float] = []
        self._ended = threading.Event()

    def __enter__(self) -> LeaseWatch:
        rpc = etcd_server.load_rpc()
        self._channel = etcd_server.grpc.insecure_channel(self._etcd.members[0].endpoint.address)
        create = rpc.WatchCreateRequest(key=self._prefix, range_end=etcd_server.range_end(self._prefix))

        def requests() -> Iterator[Any]:
            yield rpc.WatchRequest(create_request=create)
            self._ended.wait()  # the end of the requests would end the watch

        answers = rpc.WatchStub(self._channel).Watch(requests())
        threading.Thread(target=self._listen, args=(answers,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._channel.close()

    def _listen(self, answers: Any) -> None:
        with contextlib.suppress(etcd_server.grpc.RpcError, ValueError):  # the channel was closed
            for answer in answers:
                at_s = time.monotonic()
                self._gone_s += [at_s for event in answer.events if event.type == event.DELETE]

    def gone_after(self, at_s: float) -> float | None:
        return min((gone_s for gone_s in self._gone_s if gone_s > at_s), default=None)


def find_quiet_port() -> int:
    """A free port that the system gives to nobody else before a service, which takes seconds to start, has it."""
    while True:
        port = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port


def is_listening(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0):
        return True
    return False


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
