"""etcd loses its data again and again while four nodes write: none may seem gone, and all go on counting alike."""

from __future__ import annotations

import random
from typing import Any

import pytest
from etcd_server import BINARIES, NEWEST, NO_SERVER, run_cluster
from waiting import wait_until

from elastictrain.clock import SystemClock
from elastictrain.rendezvous.etcd.opening import open_etcd_store
from elastictrain.rendezvous.store import Inbox, KeyEvent, Snapshot

CLOCK = SystemClock()
NUM_NODES = 4


class Node:
    """A member that renews its lease, writes its key and keeps what its watch tells."""

    def __init__(self, settings: Any, number: int) -> None:
        self.store = open_etcd_store(settings, CLOCK, on_trouble=lambda line: None)
        self.key = f"/run/members/{number}"
        self.lease = self.store.lease(6.0)
        self.inbox = Inbox()
        self.view: dict[str, KeyEvent] = {}
        self.newest = 0
        self.last = 0
        self.write()

    def write(self) -> None:
        self.last += 1
        self.store.put(self.key, {"n": self.last}, lease=self.lease)

    def take(self) -> None:
        for item in self.inbox.drain():
            assert isinstance(item, Snapshot | KeyEvent)
            assert item.revision >= self.newest
            self.newest = item.revision
            if isinstance(item, Snapshot):
                told = {entry.key: entry for entry in item.entries}
                assert self.view.keys() <= told.keys()
                self.view = told
            else:
                assert item.value is not None
                self.view[item.key] = item

    def numbers(self) -> dict[str, tuple[int, int]]:
        return {key: (event.created_revision, event.revision) for key, event in self.view.items()}

    def close(self) -> None:
        self.store.close()
        self.inbox.close()


@pytest.mark.slow
@pytest.mark.skipif(not BINARIES, reason=NO_SERVER)
@pytest.mark.parametrize("seed", [1, 2])
def test_nodes_agree_on_everything_when_etcd_is_emptied_repeatedly(seed: int) -> None:
    chance = random.Random(seed)
    with run_cluster(NEWEST) as cluster:
        nodes = [Node(cluster.settings(), number) for number in range(NUM_NODES)]
        try:
            wait_until(lambda: len(cluster.values("/run/")) == NUM_NODES)
            nodes[0].store.create("/run/round/1", {"x": 1}).result(5)
            for node in nodes:
                node.store.watch("/run/", node.inbox)
            for seconds in (0.8, 0.1, 2.5):
                live(nodes, 0.8, chance)
                cluster.restart(is_empty=True)
                live(nodes, seconds, chance)
            live(nodes, 2.5, chance)
            for node in nodes:
                node.write()

            def take_all() -> None:
                for node in nodes:
                    node.take()

            def is_settled() -> bool:
                take_all()
                wanted = [{"n": node.last} for node in nodes]
                return all([one.view[node.key].value for node in nodes] == wanted for one in nodes)

            wait_until(is_settled)
            late = Node(cluster.settings(), NUM_NODES)
            late.store.watch("/run/", late.inbox)
            nodes.append(late)

            def is_late_one_seen() -> bool:
                take_all()
                return all(late.key in node.view for node in nodes)

            wait_until(is_late_one_seen)
            for node in nodes:
                assert node.numbers() == nodes[0].numbers()
                order = sorted(node.view, key=lambda key: node.view[key].created_revision)
                assert order[NUM_NODES:] == ["/run/round/1", late.key]
        finally:
            for node in nodes:
                node.close()


def live(nodes: list[Node], seconds: float, chance: random.Random) -> None:
    """Let the nodes work for a while."""
    until_s = CLOCK.now_s() + seconds

    def work() -> bool:
        for node in nodes:
            node.take()
            if chance.random() < 0.03:
                node.write()
            if chance.random() < 0.02:
                node.lease.keep_alive()
        return CLOCK.now_s() > until_s

    wait_until(work, seconds + 5.0)
