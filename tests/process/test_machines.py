"""Four machines, as network namespaces, train MNIST over a real etcd: some vanish, are cut off, and come back."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from etcd_server import BINARIES, NO_SERVER, run_cluster
from network import Host, Network, run_network, run_tool, why_not
from support_nodes import Site, ranges
from waiting import wait_until

MNIST = Path(__file__).parent / "scripts" / "train_mnist.py"

pytestmark = [
    pytest.mark.skipif(not BINARIES, reason=NO_SERVER),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.slow,
]


@pytest.fixture
def network() -> Iterator[Network]:
    with run_network() as made:
        yield made


class Machines:
    """A run whose nodes live on hosts of their own."""

    def __init__(self, network: Network, site: Site) -> None:
        self.network, self.site = network, site

    def start(self, name: str, *options: str, **rest: object) -> Host:
        host = self.network.hosts.get(name) or self.network.add(name)
        self.site.start(name, *options, wrapper=host.prefix, **rest)  # type: ignore[arg-type]
        return host

    def nodes(self) -> dict[str, str]:
        """Node id by host name: the agents' pids lead from one to the other."""
        by_pid = {one["pid"]: one["node"] for one in self.site.ledger("node_started")}
        return {name: by_pid[process.pid] for name, process in self.site.nodes.items() if process.pid in by_pid}

    def workers(self, name: str) -> set[int]:
        """Pids of all workers that the node on this host has ever started."""
        node = self.nodes()[name]
        return {one["pid"] for one in self.site.ledger("worker_started") if one["node"] == node}

    def host_of_rank_0(self, generation: int) -> str:
        node = next(one["seats"][0][2] for one in self.site.ledger("round") if one["generation"] == generation)
        return next(name for name, known in self.nodes().items() if known == node)

    def commits(self, name: str) -> list[dict[str, int]]:
        node = self.nodes()[name]
        return [one for one in self.site.ledger("commit") if one["node"] == node]


@pytest.fixture
def machines(network: Network, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Machines]:
    with run_cluster(host=network.gateway) as etcd:
        site = Site(etcd, tmp_path, epochs=getattr(request, "param", 12), nnodes="2:4", pause_s=0.06, script=[MNIST])
        try:
            yield Machines(network, site)
        finally:
            for host in network.hosts.values():
                host.kill_all()
            site.close()


def assert_whole(machines: Machines, *names: str, epochs: int) -> None:
    """These nodes have ended well, with one state, and every sample was used once."""
    site = machines.site
    assert {name: site.ends(name) for name in names} == dict.fromkeys(names, 0), site.logs()
    ends = [json.loads(path.read_text()) for path in site.records.glob("end-*")]
    assert sorted(end["rank"] for end in ends) == list(range(len(names)))
    assert len({end["step"] for end in ends}) == 1
    assert all(times == 1 for times in ranges(site).values())
    assert torch.load(site.records / "final.pt", weights_only=True)
    site.prove(epochs)


def test_machines_vanish_are_cut_off_and_come_back_while_the_rest_train_on(machines: Machines) -> None:
    site = machines.site
    for name in "abcd":
        machines.start(name)
    whole = site.wait_round(4)
    site.wait_steps(5)
    before = {name: machines.workers(name) for name in "abcd"}

    first = machines.host_of_rank_0(whole)  # it also serves the store of the process group
    machines.network.vanish(machines.network.hosts[first])
    three = site.wait_round(3, after=whole)
    site.wait_steps(5)

    lost = next(name for name in "abcd" if name != first)
    machines.network.cut(machines.network.hosts[lost])
    two = site.wait_round(2, after=three)
    site.wait_steps(5)
    # It could not finish a step without the others, nor hear of anything.
    old = [one for one in machines.commits(lost) if one["generation"] > three]
    assert old == []
    newest = max(one["step"] for one in machines.commits(lost))
    begun = min(one["step"] for one in site.ledger("commit") if one["generation"] == two)
    assert newest <= begun, "at most the step that was in flight"

    machines.network.heal()
    machines.network.cut(machines.network.hosts[first])
    site.wait_round(3, after=two)
    rest = [name for name in "abcd" if name != first]
    assert_whole(machines, *rest, epochs=12)
    for name in rest:
        assert machines.workers(name) == before[name], f"the worker of {name} is the same process"
    assert list(site.etcd.values("/elastictrain/")) == ["/elastictrain/job/closed"]


def test_machine_that_loses_only_etcd_is_left_out_and_comes_back(machines: Machines) -> None:
    site = machines.site
    for name in "abc":
        machines.start(name)
    whole = site.wait_round(3)
    site.wait_steps(5)
    before = {name: machines.workers(name) for name in "abc"}
    lost = machines.host_of_rank_0(whole)
    machines.network.cut(machines.network.hosts[lost], machines.network.gateway)
    two = site.wait_round(2, after=whole)
    site.wait_steps(5)
    machines.network.heal()
    site.wait_round(3, after=two)
    assert_whole(machines, *"abc", epochs=12)
    assert {name: machines.workers(name) for name in "abc"} == before


def test_all_machines_that_train_lose_etcd_and_train_on(machines: Machines) -> None:
    site = machines.site
    hosts = [machines.start(name) for name in "ab"]
    whole = site.wait_round(2)
    site.wait_steps(5)
    keys = {f"/elastictrain/job/members/{node}" for node in machines.nodes().values()}
    assert keys <= site.etcd.values("/elastictrain/job/members/").keys()
    machines.start("c")
    for host in hosts:
        machines.network.cut(host, machines.network.gateway)
    wait_until(lambda: not keys & site.etcd.values("/elastictrain/job/members/").keys(), 20, site.logs)
    wait_until(lambda: "may be cut off from it and train on" in site.log("c"), 20, site.logs)
    site.wait_steps(30)
    assert {one["generation"] for one in site.ledger("round")} == {whole}, "nobody has taken their place"
    machines.network.heal()
    site.wait_round(3, after=whole)
    assert_whole(machines, *"abc", epochs=12)
    assert len(machines.workers("a")) == len(machines.workers("b")) == 1


@pytest.mark.parametrize("machines", [6], indirect=True)
@pytest.mark.parametrize("shift", ["+300s", "-300s"])
def test_nothing_changes_when_the_clock_of_one_machine_is_wrong(machines: Machines, shift: str) -> None:
    library = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
    if library is None:
        pytest.skip("no libfaketime here: apt-get install faketime")
    site = machines.site
    wrong = {"LD_PRELOAD": str(library), "FAKETIME": shift, "DONT_FAKE_MONOTONIC": "1"}
    for name in "abc":
        machines.start(name, environ=wrong if name == "b" else None)
    whole = site.wait_round(3)
    site.wait_steps(10)
    walls = {one["node"]: one["wall"] for one in site.ledger("node_started")}
    assert max(walls.values()) - min(walls.values()) > 250, "the clock is wrong indeed"
    machines.network.vanish(machines.network.hosts["c"])
    two = site.wait_round(2, after=whole)
    site.wait_steps(10)
    assert max(one["generation"] for one in site.ledger("round")) == two
    assert_whole(machines, *"ab", epochs=6)
    for name in (f"faketime_shm_{site.nodes['b'].pid}", f"sem.faketime_sem_{site.nodes['b'].pid}"):
        (Path("/dev/shm") / name).unlink(missing_ok=True)  # the library's own


@pytest.mark.parametrize("machines", [4], indirect=True)
def test_machines_may_have_different_numbers_of_workers(machines: Machines) -> None:
    site = machines.site
    for name, number in (("a", "1"), ("b", "2"), ("c", "1")):
        machines.start(name, "--nproc-per-node", number)
    whole = site.wait_round(4)
    seats = next(one["seats"] for one in site.ledger("round") if one["generation"] == whole)
    assert sorted(Counter(seat[2] for seat in seats).values()) == [1, 1, 2]
    assert {site.ends(name) for name in "abc"} == {0}, site.logs()
    ends = [json.loads(path.read_text()) for path in site.records.glob("end-*")]
    assert sorted(end["rank"] for end in ends) == [0, 1, 2, 3]
    assert all(times == 1 for times in ranges(site).values())
    site.prove(4)


def test_network_cuts_silently_heals_and_leaves_nothing_behind() -> None:
    before = run_tool("ip", "netns", "list")
    connect = (
        "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3]))"
    )
    with run_network() as network, socket.create_server((network.gateway, 0)) as listener:
        host = network.add("x")
        sleeper = subprocess.Popen([*host.prefix, "sleep", "1000"])
        wait_until(lambda: sleeper.pid in host.pids())

        def reach(timeout_s: float) -> str:
            words = [network.gateway, str(listener.getsockname()[1]), str(timeout_s)]
            done = subprocess.run(
                [*host.prefix, sys.executable, "-c", connect, *words], capture_output=True, text=True, check=False
            )
            return done.stderr.strip().rpartition("\n")[2]

        assert reach(10.0) == ""
        network.cut(host, network.gateway)
        assert "timed out" in reach(0.5), "nothing comes back, no refusal either"
        network.heal()
        assert reach(10.0) == ""
    assert sleeper.wait(10) == -9
    assert run_tool("ip", "netns", "list") == before
