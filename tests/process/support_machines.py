"""Runs whose nodes live on machines of their own, which are network namespaces, and meet at a real etcd."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etcd_server import run_cluster
from network import Host, Network, run_network
from support_nodes import Site

MNIST = Path(__file__).parent / "scripts" / "train_mnist.py"
MEMBERS = "/elastictrain/job/members/"
# Nothing on the way back waits for longer than milliseconds; gloo and torch's store would wait for five seconds at
# least, half an hour at most.
SOON_S = 4.0


class Machines:
    """A run whose nodes live on hosts of their own. They find etcd by the name `outside`."""

    def __init__(self, network: Network, site: Site, epochs: int) -> None:
        self.network, self.site, self.epochs = network, site, epochs
        self.site.endpoint = self.site.endpoint.replace(network.gateway, "outside")

    def start(self, name: str, *options: str, **rest: Any) -> Host:
        """Start a node on the machine of this name, which is made where there is none."""
        host = self.network.hosts.get(name) or self.network.add(name)
        self.site.start(name, *options, wrapper=host.prefix, **rest)
        return host

    def host(self, name: str) -> Host:
        return self.network.hosts[name]

    def node(self, name: str) -> str:
        """Id of the node whose agent was started last on a machine: its pid leads from one to the other."""
        pid = self.site.nodes[name].pid
        return next(one["node"] for one in self.site.ledger("node_started") if one["pid"] == pid)

    def nodes(self) -> dict[str, str]:
        return {name: self.node(name) for name in self.site.nodes}

    def workers(self, name: str) -> set[int]:
        """Pids of all workers that the node on this machine has ever started."""
        node = self.node(name)
        return {one["pid"] for one in self.site.ledger("worker_started") if one["node"] == node}

    def seats(self, generation: int) -> list[str]:
        """Machines of a round's ranks, rank 0 first."""
        names = {node: name for name, node in self.nodes().items()}
        made = next(one for one in self.site.ledger("round") if one["generation"] == generation)
        assert [rank for rank, _, _ in made["seats"]] == list(range(made["world_size"])), "ranks are complete"
        return [names[node] for _, _, node in made["seats"]]

    def story(self, name: str) -> list[dict[str, Any]]:
        """What the node on this machine has recorded, in its order."""
        path = self.site.run_dir / "ledger" / f"{self.node(name)}.jsonl"
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]

    def wait_lease_end(self, name: str) -> float:
        """Wait until etcd drops the node of a machine; gives the monotonic time (s), the same on all machines here."""
        assert self.site.etcd is not None
        return self.site.etcd.wait_gone(MEMBERS + self.node(name), 30.0)

    def seconds_to_commit(self, since_s: float, generation: int) -> float:
        """How long after a moment the first step of a generation was committed anywhere; also printed."""
        self.site.wait_steps(1)
        committed_s = min(one["mono"] for one in self.site.ledger("commit") if one["generation"] == generation)
        print(f"generation {generation}: first commit {committed_s - since_s:.3f} s after the lease's end")
        return float(committed_s - since_s)


@contextlib.contextmanager
def run_machines(folder: Path, *, epochs: int, nnodes: str = "2:4", pause_s: float = 0.06) -> Iterator[Machines]:
    """A network, an etcd outside of it all, and a run of MNIST that has no node yet; everything ends with the block."""
    with run_network() as network, run_cluster(host=network.gateway) as etcd:
        site = Site(etcd, folder, epochs=epochs, nnodes=nnodes, pause_s=pause_s, script=[MNIST])
        try:
            yield Machines(network, site, epochs)
        finally:
            for host in network.hosts.values():
                host.kill_all()
            site.close()


def assert_whole(machines: Machines, *names: str, num_workers: int | None = None) -> None:
    """These nodes have ended well, with one state, and every sample of every epoch was used once."""
    site = machines.site
    assert {name: site.ends(name) for name in names} == dict.fromkeys(names, 0), site.logs()
    ends = [json.loads(path.read_text()) for path in site.records.glob("end-*")]
    assert sorted(end["rank"] for end in ends) == list(range(num_workers or len(names)))
    assert len({(end["step"], end["digest"]) for end in ends}) == 1, "all ranks end with the same bits"
    assert_exactly_once(site, machines.epochs)
    site.prove(machines.epochs)
    assert site.etcd is not None
    assert list(site.etcd.values("/elastictrain/")) == ["/elastictrain/job/closed"]


def assert_exactly_once(site: Site, epochs: int) -> None:
    """The ledgers' commits, by their own words: steps without a hole, and each sample of each epoch in one of them."""
    commits = site.ledger("commit")
    by_node = Counter((one["node"], one["step"]) for one in commits)
    assert max(by_node.values()) == 1, "no node commits a step twice"
    seats = {one["generation"]: {node for _, _, node in one["seats"]} for one in site.ledger("round")}
    standing = {one["step"]: one for one in sorted(commits, key=lambda one: one["generation"])}
    for one in commits:
        last = standing[one["step"]]
        assert all(one[name] == last[name] for name in ("loop", "epoch", "start", "stop")), f"{one} but {last}"
        # A step is done again only by those who know of no commit: whoever had committed it is not among them.
        assert one["generation"] == last["generation"] or one["node"] not in seats[last["generation"]], (one, last)
    assert sorted(standing) == list(range(1, len(standing) + 1))
    (length,) = {one["epoch_length"] for one in commits}
    used = Counter((one["epoch"], sample) for one in standing.values() for sample in range(one["start"], one["stop"]))
    assert used == Counter((epoch, sample) for epoch in range(epochs) for sample in range(length))


def assert_silent_after_fence(machines: Machines, name: str, generation: int) -> None:
    """The node was fenced in this generation, and has committed nothing from then until it had seats again."""
    story = machines.story(name)
    fence = next(
        place for place, one in enumerate(story) if one["event"] == "broken" and one["generation"] == generation
    )
    begun = generation
    for one in story[fence:]:
        if one["event"] == "round" and machines.node(name) in {node for _, _, node in one["seats"]}:
            begun = one["generation"]
        assert one["event"] != "commit" or one["generation"] == begun > generation, one
