"""What a run leaves in the store: while it lasts, after its end, and after the death of all its nodes."""

from __future__ import annotations

from typing import Any

from elastictrain.clock import ManualClock
from elastictrain.rendezvous.driver import Driver
from elastictrain.rendezvous.embedded import EmbeddedStore
from elastictrain.rendezvous.events import CloseRun, EnterRound, NodeReady, Output, Refused, RunClosed
from elastictrain.rendezvous.records import Settings
from elastictrain.rendezvous.store import Inbox, Snapshot
from elastictrain.topology import Candidate

CLOSED_TTL_S = 60.0
TTL_S = 10.0


class Site:
    """A store with nodes that all run in this thread."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = EmbeddedStore(clock=self.clock)
        self.drivers: list[Driver] = []

    def join(self, node_id: str, **values: Any) -> Driver:
        settings = Settings(
            run_id="run", ttl_s=TTL_S, closed_ttl_s=CLOSED_TTL_S, **{"last_call_timeout_s": 0.0, **values}
        )
        driver = Driver(self.store, settings, clock=self.clock, node_id=node_id, host="h", store_port=1)
        self.drivers.append(driver)
        driver.handle(NodeReady(candidates=(Candidate(worker_id=f"{node_id}-0", node_id=node_id, local_rank=0),)))
        return driver

    def turn(self) -> list[Output]:
        """Let every node act until nobody has anything to do."""
        outputs: list[Output] = []
        for _ in range(20):
            outputs.extend(output for driver in self.drivers for output in driver.poll())
        return outputs

    def kill(self, driver: Driver) -> None:
        """The node is not heard of again: no goodbye, and its lease runs out."""
        self.drivers.remove(driver)
        driver._watch.close()
        driver._inbox.close()

    def pass_time(self, seconds: float) -> None:
        """Let time pass in steps in which the living renew their leases."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.store.expire_leases()
            for driver in self.drivers:
                driver.poll()

    def names(self) -> list[str]:
        inbox = Inbox()
        watch = self.store.watch("/elastictrain/run/", inbox)
        (snapshot,) = inbox.drain()
        watch.close()
        inbox.close()
        assert isinstance(snapshot, Snapshot)
        return sorted(entry.key.removeprefix("/elastictrain/run/") for entry in snapshot.entries)

    def close(self) -> None:
        for driver in self.drivers:
            driver.close()


def test_only_the_closed_record_stays_for_its_time_when_a_run_has_finished() -> None:
    site = Site()
    first, second = (site.join(name, min_nodes=2, max_nodes=2) for name in "ab")
    site.turn()
    assert site.names() == ["config", "members/a", "members/b", "round/1"]
    second.handle(CloseRun(reason="finished"))
    outputs = site.turn()
    assert [output for output in outputs if isinstance(output, RunClosed)] == [RunClosed(reason="finished")] * 2
    assert site.names() == ["closed"]
    late = site.join("c", min_nodes=2, max_nodes=2)
    assert RunClosed(reason="finished") in site.turn()
    assert site.names() == ["closed"]
    for driver in (first, second, late):
        driver.close()
        site.drivers.remove(driver)
    site.pass_time(CLOSED_TTL_S + 1)
    assert site.names() == []
    site.join("d", max_nodes=5)  # the same id, another run with other options
    entered = [output for output in site.turn() if isinstance(output, EnterRound)]
    assert [output.round.generation for output in entered] == [1]
    site.close()


def test_new_run_starts_with_other_options_when_all_nodes_of_the_old_one_are_dead() -> None:
    site = Site()
    dead = site.join("a", max_nodes=2)
    site.turn()
    site.kill(dead)
    site.join("b", max_nodes=3)
    refused = [output for output in site.turn() if isinstance(output, Refused)]
    assert [output.kind for output in refused] == ["config"], "the lease of the dead node has not run out yet"
    site.drivers.pop().close()
    site.pass_time(TTL_S + 1)
    site.join("c", max_nodes=3)
    entered = [output for output in site.turn() if isinstance(output, EnterRound)]
    assert [output.round.seats[0].node_id for output in entered] == ["c"]
    assert entered[0].round.generation == 2, "a generation is never used twice"
    site.close()


def test_options_stay_agreed_when_the_node_that_wrote_them_dies() -> None:
    site = Site()
    first, second = site.join("a", max_nodes=3), site.join("b", max_nodes=3)
    site.turn()
    site.kill(first)
    site.pass_time(TTL_S + 1)
    site.turn()
    assert "config" in site.names()
    site.join("c", max_nodes=2)
    refused = [output for output in site.turn() if isinstance(output, Refused)]
    assert len(refused) == 1
    assert "max_nodes=2" in refused[0].message
    assert "max_nodes=3" in refused[0].message
    assert second in site.drivers
    site.close()
