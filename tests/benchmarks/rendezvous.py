"""How the rendezvous scales: simulated nodes on one real etcd, beside torch's own rendezvous with as many nodes.

    python tests/benchmarks/rendezvous.py [--sizes 4 16 64 256 1000] [--rounds 1] [--only ours|torch] [--json FILE]

Nodes are simulated (`programs/simulated_nodes.py`): protocol core, Driver and etcd client are real, workers are played
and answer at once. The processes in which they live, etcd, and torch's store share the cores of this machine: all their
work counts. For each size:

start   all nodes join a new run. From the command, before any connection is made, until the last has entered the Round.
join    one more node joins. From its start until the last has entered the Round that holds it.
leave   one node says that it leaves. From its word until the last survivor has entered the next Round.
death   a node in the middle is gone, and its lease runs out: from the moment at which etcd deletes its key (a watch of
        the benchmark's own) until the last survivor has entered the next Round.
first   the same with the node that joined first.

Requests and bytes are etcd's own count (`/metrics`), lease renewals apart: with `--ttl 10`, a run's default, those of
1,000 nodes are 300 requests a second, more than half of what two cores can do. torch's nodes, one thread each in as
many processes, use a TCPStore; its time is that from the command until the last `next_rendezvous` has returned. Let
the machine be idle.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from etcd_server import Cluster, run_cluster  # noqa: E402

from elastictrain.rendezvous.etcd.messages import load_rpc  # noqa: E402
from elastictrain.rendezvous.records import Keys  # noqa: E402

SIZES = (4, 16, 64, 256, 1000)
LIMIT_S = 120.0
READY_S = 60.0
PHASES = ("start", "death", "join", "leave", "join", "first")
TARGET_START_S, TARGET_DEATH_S, TARGET_RATIO = 5.0, 1.0, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One phase at one size. `seconds` as the module says; the rest covers the phase from its command on."""

    phase: str
    seconds: float
    rounds: int
    requests: int
    renewals: int
    to_etcd: int
    from_etcd: int
    etcd_cpu_s: float
    nodes_cpu_s: float


class TooSlowError(Exception):
    """A phase took longer than LIMIT_S."""


class Process:
    """A program that hosts nodes, and the lines it has said."""

    def __init__(self, program: str, options: dict[str, Any]) -> None:
        command = [sys.executable, str(HERE / "programs" / program), json.dumps(options)]
        pipe = subprocess.PIPE
        self.popen = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | {"OMP_NUM_THREADS": "1"})
        self._pending = b""

    def say(self, **what: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(what).encode() + b"\n")
        self.popen.stdin.flush()

    def hear(self, name: str, until_s: float) -> dict[str, Any]:
        """Give the next line that has `name`. Raises TooSlowError, and RuntimeError when the program has ended."""
        assert self.popen.stdout is not None
        while True:
            line, is_whole, rest = self._pending.partition(b"\n")
            if is_whole:
                self._pending = rest
                told: dict[str, Any] = json.loads(line)
                if name in told:
                    return told
                continue
            if not select.select([self.popen.stdout], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise TooSlowError
            # The pipe itself: a buffer of the file object would hide lines from select.
            read = os.read(self.popen.stdout.fileno(), 1 << 16)
            if not read:
                raise RuntimeError(f"a program of nodes has ended with {self.popen.wait()}")
            self._pending += read

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def processes(program: str, options: Sequence[dict[str, Any]]) -> Iterator[list[Process]]:
    """Programs that have imported what they need, and wait for a word."""
    started: list[Process] = []
    try:
        started.extend(Process(program, one) for one in options)
        for process in started:
            process.hear("ready", time.monotonic() + READY_S)
        yield started
    finally:
        for process in started:
            process.end()


# ---------------------------------------------------------------- etcd's own count


def read_metrics(etcd: Cluster) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{etcd.members[0].endpoint.address}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = {"requests": 0.0, "renewals": 0.0}
    for line in lines:
        name, _, value = line.rpartition(" ")
        if name.startswith("grpc_server_started_total"):
            found["renewals" if "LeaseKeepAlive" in name else "requests"] += float(value)
        elif name == "etcd_network_client_grpc_received_bytes_total":
            found["to_etcd"] = float(value)
        elif name == "etcd_network_client_grpc_sent_bytes_total":
            found["from_etcd"] = float(value)
        elif name == "process_cpu_seconds_total":
            found["etcd_cpu_s"] = float(value)
    return found


class DeleteWatch:
    """When etcd deletes a key, by a watch of the benchmark's own."""

    def __init__(self, etcd: Cluster, key: str) -> None:
        self._told: queue.Queue[float] = queue.Queue()
        self._created = threading.Event()
        thread = threading.Thread(target=self._watch, args=(etcd.members[0].endpoint.address, key), daemon=True)
        thread.start()
        if not self._created.wait(READY_S):
            raise TooSlowError

    def wait_s(self, until_s: float) -> float:
        """Block until the key is gone; gives the monotonic time of it."""
        try:
            return self._told.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            raise TooSlowError from None

    def _watch(self, address: str, key: str) -> None:
        rpc = load_rpc()
        request = rpc.WatchRequest(create_request=rpc.WatchCreateRequest(key=key.encode(), filters=[0]))  # no puts
        is_over = threading.Event()

        def requests() -> Iterator[Any]:
            yield request
            is_over.wait()

        with grpc.insecure_channel(address) as channel:
            for answer in rpc.WatchStub(channel).Watch(requests()):
                self._created.set()
                if answer.events:
                    self._told.put(time.monotonic())
                    is_over.set()
                    return


# ---------------------------------------------------------------- ours


class Run:
    """One run of simulated nodes on a fresh etcd, phase by phase."""

    def __init__(self, etcd: Cluster, hosts: list[Process], num_nodes: int, run_id: str) -> None:
        self.etcd = etcd
        self.hosts = hosts
        self.num_nodes = num_nodes
        self.keys = Keys(run_id)
        self.generation = 0
        self.next_index = num_nodes
        self.members = list(range(num_nodes))

    def host_of(self, index: int) -> Process:
        return self.hosts[index % len(self.hosts)]

    def measure(self, phase: str) -> Figure:
        """Play one phase. Raises TooSlowError."""
        before, cpu_s = read_metrics(self.etcd), sum(host.cpu_s() for host in self.hosts)
        until_s = time.monotonic() + LIMIT_S
        began_s = {"start": self.start, "join": self.join, "leave": self.leave}.get(
            phase, lambda by: self.die(phase, by)
        )(until_s)
        generation, entered_s = self.wait_entered(until_s)
        after = read_metrics(self.etcd)
        counts = {name: int(after[name] - before[name]) for name in ("requests", "renewals", "to_etcd", "from_etcd")}
        rounds, self.generation = generation - self.generation, generation
        return Figure(
            phase=phase,
            seconds=entered_s - began_s,
            rounds=rounds,
            etcd_cpu_s=after["etcd_cpu_s"] - before["etcd_cpu_s"],
            nodes_cpu_s=sum(host.cpu_s() for host in self.hosts) - cpu_s,
            **counts,
        )

    def start(self, until_s: float) -> float:
        for number, host in enumerate(self.hosts):
            host.say(do="join", nodes=self.members[number :: len(self.hosts)])
        return min(float(host.hear("began_s", until_s)["began_s"]) for host in self.hosts)

    def join(self, until_s: float) -> float:
        index, self.next_index = self.next_index, self.next_index + 1
        self.members.append(index)
        self.host_of(index).say(do="join", nodes=[index])
        return float(self.host_of(index).hear("began_s", until_s)["began_s"])

    def leave(self, until_s: float) -> float:
        index = self.members.pop(len(self.members) // 2)
        self.host_of(index).say(do="leave", node=index)
        return float(self.host_of(index).hear("began_s", until_s)["began_s"])

    def die(self, phase: str, until_s: float) -> float:
        index = self.members.pop(0 if phase == "first" else len(self.members) // 2)
        watch = DeleteWatch(self.etcd, self.keys.member(f"node-{index:05}"))
        self.host_of(index).say(do="kill", node=index)
        return watch.wait_s(until_s)

    def wait_entered(self, until_s: float) -> tuple[int, float]:
        """Block until all nodes have entered the same new Round."""
        told = dict.fromkeys(self.hosts, (0, 0.0))
        busy = {self.host_of(index) for index in self.members}
        while True:
            newest = max(generation for generation, _ in told.values())
            late = [host for host in self.hosts if host in busy and told[host][0] < max(newest, self.generation + 1)]
            if not late:
                return newest, max(at_s for _, at_s in told.values())
            line = late[0].hear("generation", until_s)
            told[late[0]] = (int(line["generation"]), float(line["at_s"]))


def measure_ours(num_nodes: int, *, rounds: int, num_processes: int, ttl_s: float) -> list[Figure]:
    """All phases at one size; the phases after the start are repeated. Ends early at one that is too slow."""
    figures: list[Figure] = []
    with run_cluster() as etcd:
        options = {
            "endpoint": etcd.members[0].endpoint.address,
            "run_id": f"bench-{num_nodes}",
            "num_nodes": num_nodes,
            "ttl_s": ttl_s,
        }
        with processes("simulated_nodes.py", [options] * min(num_processes, num_nodes)) as hosts:
            run = Run(etcd, hosts, num_nodes, str(options["run_id"]))
            for phase in (PHASES[0], *((*PHASES[1:], "join") * rounds)[:-1]):
                try:
                    figures.append(run.measure(phase))
                except TooSlowError:
                    print(f"{num_nodes:5} {phase}: not within {LIMIT_S:g} s", flush=True)
                    break
                print_figure(num_nodes, figures[-1])
    return figures


# ---------------------------------------------------------------- torch


def measure_torch(num_nodes: int, *, num_processes: int) -> float | None:
    """Seconds until the last of torch's nodes has its rendezvous, None where it takes longer than LIMIT_S."""
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    count = min(num_processes, num_nodes)
    options = [
        {
            "endpoint": f"127.0.0.1:{server.port}",
            "run_id": "bench",
            "num_nodes": num_nodes,
            "count": len(range(number, num_nodes, count)),
        }
        for number in range(count)
    ]
    with processes("torch_nodes.py", options) as hosts:
        for host in hosts:
            host.say(do="join")
        until_s = time.monotonic() + LIMIT_S
        try:
            told = [host.hear("at_s", until_s) for host in hosts]
        except TooSlowError:
            return None
    failures = [text for one in told for text in one["failures"]]
    if failures:
        print(f"{num_nodes:5} torch: {failures[0]}", flush=True)
        return None
    return max(float(one["at_s"]) for one in told) - min(float(one["began_s"]) for one in told)


# ---------------------------------------------------------------- the table

HEAD = (
    f"{'nodes':>5} {'phase':6} {'seconds':>8} {'rounds':>6} {'requests':>8} {'a node':>6} {'renewals':>8} "
    f"{'kB to etcd':>10} {'kB from':>9} {'CPU s etcd':>10} {'CPU s nodes':>11}"
)


def print_figure(num_nodes: int, one: Figure) -> None:
    print(
        f"{num_nodes:5} {one.phase:6} {one.seconds:8.3f} {one.rounds:6} {one.requests:8} "
        f"{one.requests / num_nodes:6.1f} {one.renewals:8} {one.to_etcd / 1e3:10.0f} {one.from_etcd / 1e3:9.0f} "
        f"{one.etcd_cpu_s:10.2f} {one.nodes_cpu_s:11.2f}",
        flush=True,
    )


def typical(figures: Sequence[Figure], phase: str) -> float | None:
    seconds = [one.seconds for one in figures if one.phase == phase]
    return median(seconds) if seconds else None


def print_summary(ours: dict[int, list[Figure]], torch_s: dict[int, float | None]) -> None:
    print(f"\n{'nodes':>5} {'start':>8} {'torch':>8} {'ratio':>7} {'death':>7} {'first':>7} {'leave':>7} {'join':>7}")
    text: Callable[[float | None], str] = lambda value: "-" if value is None else f"{value:.3f}"  # noqa: E731
    for size in sorted(ours.keys() | torch_s.keys()):
        figures, other = ours.get(size, []), torch_s.get(size)
        start = typical(figures, "start")
        ratio = start / other if start is not None and other is not None else None
        print(f"{size:5} {text(start):>8} {text(other):>8} {text(ratio):>7}", end="")
        print("".join(f" {text(typical(figures, phase)):>7}" for phase in ("death", "first", "leave", "join")))
    print(
        f"targets: 1000 nodes start within {TARGET_START_S:g} s and at most {TARGET_RATIO:g} of torch's time at the "
        f"largest size that both manage; death within {TARGET_DEATH_S:g} s of the end of the lease"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of nodes")
    parser.add_argument("--rounds", type=int, default=1, help="how often the phases after the start are repeated")
    parser.add_argument("--processes", type=int, default=2, help="processes that the nodes are spread over")
    parser.add_argument("--ttl", type=float, default=30.0, help="seconds that a lease lasts")
    parser.add_argument("--only", choices=("ours", "torch"), help="leave out the other side")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args()
    if min(options.sizes) < 3:
        parser.error(f"--sizes {min(options.sizes)}: expected 3 or more; the phases take two nodes away")
    ours: dict[int, list[Figure]] = {}
    torch_s: dict[int, float | None] = {}
    if options.only != "torch":
        print(HEAD)
        for size in sorted(options.sizes):
            ours[size] = measure_ours(size, rounds=options.rounds, num_processes=options.processes, ttl_s=options.ttl)
    if options.only != "ours":
        for size in sorted(options.sizes):
            torch_s[size] = measure_torch(size, num_processes=options.processes)
            print(f"{size:5} torch  {'not within the limit' if torch_s[size] is None else f'{torch_s[size]:8.3f}'}")
            if torch_s[size] is None:
                break
    print_summary(ours, torch_s)
    results = {"ours": {size: [asdict(one) for one in each] for size, each in ours.items()}, "torch": torch_s}
    if options.json is not None:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
