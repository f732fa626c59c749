"""The rendezvous as torch's elastic agents call it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore, Store
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousInfo, RendezvousTimeoutError

from elastictrain.clock import SystemClock
from elastictrain.errors import ConfigError
from elastictrain.rendezvous import events as ev
from elastictrain.rendezvous.driver import Driver
from elastictrain.rendezvous.embedded import EmbeddedStore
from elastictrain.rendezvous.handler import ElasticRendezvousHandler
from elastictrain.rendezvous.records import Settings
from elastictrain.topology import Candidate


class Machines:
    """Handlers of several nodes over one store, by the real clock."""

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.store = EmbeddedStore(self.clock)
        self.group_store = HashStore()
        self.addresses: list[tuple[str, int]] = []
        self.handlers: list[ElasticRendezvousHandler] = []

    def make_store(self, host: str, port: int) -> Store:
        self.addresses.append((host, port))
        return self.group_store

    def make(self, node_id: str, *, is_whole_node: bool = True, **values: Any) -> ElasticRendezvousHandler:
        settings = Settings(run_id="run", **{"max_nodes": 2, "last_call_timeout_s": 0.0, **values})
        driver = Driver(self.store, settings, clock=self.clock, node_id=node_id, host=f"{node_id}.local", store_port=7)
        self.driver = driver
        handler = ElasticRendezvousHandler(
            driver,
            clock=self.clock,
            backend="embedded",
            store_factory=self.make_store,
            is_whole_node=is_whole_node,
        )
        self.handlers.append(handler)
        return handler


@pytest.fixture
def machines() -> Iterator[Machines]:
    machines = Machines()
    yield machines
    for handler in machines.handlers:
        handler.shutdown()


def all_rendezvous(*handlers: ElasticRendezvousHandler) -> list[RendezvousInfo]:
    """Let every agent ask at the same time, each in its own thread."""
    found: dict[int, RendezvousInfo] = {}
    threads = [
        threading.Thread(target=lambda at=at, one=one: found.setdefault(at, one.next_rendezvous()), daemon=True)
        for at, one in enumerate(handlers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert len(found) == len(handlers), "an agent still waits"
    return [found[at] for at in range(len(handlers))]


def test_handler_returns_the_round_when_one_node_starts(machines: Machines) -> None:
    handler = machines.make("a", max_nodes=1)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    bootstrap = info.bootstrap_store_info
    assert bootstrap is not None
    assert (bootstrap.master_addr, bootstrap.master_port) == ("a.local", 7)
    assert machines.addresses == [("a.local", 7)]
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("embedded", "run", True)
    assert handler.num_nodes_waiting() == 0


def test_store_of_a_generation_shows_no_key_of_an_older_one(machines: Machines) -> None:
    handler = machines.make("a", max_nodes=1)
    handler.next_rendezvous().store.set("address", "old")
    again = handler.next_rendezvous()
    assert not again.store.check(["address"])


def test_agents_restart_together_when_a_node_joins_and_when_one_leaves(machines: Machines) -> None:
    first = machines.make("a")
    assert all_rendezvous(first)[0].world_size == 1
    second = machines.make("b")
    waiting = threading.Thread(target=second.next_rendezvous, daemon=True)
    waiting.start()
    # What a plain agent does, without its pause: ask until somebody waits.
    while first.num_nodes_waiting() == 0:
        pass
    info = first.next_rendezvous()
    waiting.join(10.0)
    assert (info.rank, info.world_size) == (0, 2)
    assert first.num_nodes_waiting() == second.num_nodes_waiting() == 0
    first.shutdown()
    assert second.num_nodes_waiting() == 1
    info = second.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert machines.addresses[-1] == ("b.local", 7)


def test_agents_meet_again_when_one_restarts_its_workers(machines: Machines) -> None:
    first, second = machines.make("a", min_nodes=2), machines.make("b", min_nodes=2)
    before = all_rendezvous(first, second)
    after = all_rendezvous(second, first)[::-1]
    assert [info.rank for info in after] == [info.rank for info in before]
    assert sorted(info.rank for info in after) == [0, 1]


def test_handler_raises_as_torch_expects_when_it_cannot_join(machines: Machines) -> None:
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes"):
        machines.make("a", min_nodes=2, join_timeout_s=0.01).next_rendezvous()
    machines.make("b", min_nodes=1).next_rendezvous()
    with pytest.raises(ConfigError, match="min_nodes=2"):
        machines.make("c", min_nodes=2).next_rendezvous()


def test_handlers_raise_when_the_run_is_closed(machines: Machines) -> None:
    first = machines.make("a", max_nodes=1)
    first.next_rendezvous()
    assert not first.is_closed()
    first.set_closed()
    assert first.is_closed()
    for handler in (first, machines.make("b", max_nodes=1)):
        with pytest.raises(RendezvousClosedError, match="run run is over"):
            handler.next_rendezvous()


def test_handler_translates_only_when_the_agent_owns_the_driver(machines: Machines) -> None:
    handler = machines.make("a", is_whole_node=False, max_nodes=1)
    driver = machines.driver
    workers = tuple(Candidate(worker_id=f"a{n}", node_id="a", local_rank=n) for n in range(3))
    driver.handle(ev.NodeReady(candidates=workers))
    assert isinstance(driver.poll()[-1], ev.EnterRound)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    driver.handle(ev.LocalBroken(generation=1, cause="worker_died", worker_id="a0"))
    driver.handle(ev.LocalChanged(candidates=workers[1:], settled=1))
    handler.next_rendezvous()
    assert driver.state.generation == 2
