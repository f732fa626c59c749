"""etcd goes away in every way that it can while a run hangs on it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from etcd_server import BINARIES, NEWEST, NO_SERVER, Cluster, Member, run_cluster
from relay import run_relay
from store_contract import Watcher, answer
from waiting import wait_until

from elastictrain.clock import SystemClock
from elastictrain.errors import StoreError
from elastictrain.rendezvous import events as ev
from elastictrain.rendezvous.driver import Driver
from elastictrain.rendezvous.endpoint import Endpoint
from elastictrain.rendezvous.etcd.etcd_store import EtcdStore
from elastictrain.rendezvous.etcd.opening import open_etcd_store
from elastictrain.rendezvous.records import Settings
from elastictrain.rendezvous.store import KeyEvent, LeaseLostError, Snapshot
from elastictrain.topology import Candidate

CLOCK = SystemClock()
pytestmark = pytest.mark.skipif(not BINARIES, reason=NO_SERVER)


@pytest.fixture(params=sorted(BINARIES))
def single(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with run_cluster(request.param) as running:
        yield running


@pytest.fixture(params=sorted(BINARIES))
def three(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with run_cluster(request.param, num_members=3) as running:
        yield running


@pytest.fixture
def opened() -> Iterator[Callable[..., EtcdStore]]:
    """Opens stores, and closes them at the end."""
    stores: list[EtcdStore] = []

    def make(cluster: Cluster, **rest: Any) -> EtcdStore:
        on_trouble = rest.pop("on_trouble", lambda line: None)
        stores.append(open_etcd_store(cluster.settings(**rest), CLOCK, on_trouble=on_trouble))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@contextlib.contextmanager
def watching(store: EtcdStore, prefix: str = "/run/") -> Iterator[Watcher]:
    watcher = Watcher(store, prefix)
    try:
        yield watcher
    finally:
        watcher.close()


def events_of(watcher: Watcher) -> list[KeyEvent]:
    """Everything delivered until now; Snapshots are told apart by their own tests."""
    watcher.items += watcher.inbox.drain()
    return [item for item in watcher.items if isinstance(item, KeyEvent)]


def is_told(watcher: Watcher, key: str, value: dict[str, Any]) -> bool:
    """A change or a snapshot has shown the key with the value."""
    watcher.items += watcher.inbox.drain()
    shown: list[KeyEvent] = []
    for item in watcher.items:
        shown += item.entries if isinstance(item, Snapshot) else [item] if isinstance(item, KeyEvent) else []
    return any(event.key == key and event.value == value for event in shown)


def member_of(cluster: Cluster, store: EtcdStore) -> Member:
    """The member that the store talks to."""
    connection = store.client._connection
    assert connection is not None
    return next(member for member in cluster.members if member.endpoint == connection.endpoint)


def test_writes_and_watch_go_on_when_the_leader_is_killed(three: Cluster, opened: Callable[..., EtcdStore]) -> None:
    store, other = opened(three), opened(three)
    lease = store.lease(10.0)
    answer(store.put("/run/a", {"n": 0}, lease=lease))
    with watching(store) as watcher:
        three.leader().kill()
        began_s = CLOCK.now_s()
        store.put("/run/a", {"n": 1}, lease=lease).result(30)
        other.put("/run/b", {"n": 2}).result(30)
        lease.keep_alive()
        assert CLOCK.now_s() - began_s < 30
        wait_until(lambda: is_told(watcher, "/run/a", {"n": 1}) and is_told(watcher, "/run/b", {"n": 2}))
        before_s = lease.expires_at_s()
        lease.keep_alive()
        wait_until(lambda: lease.expires_at_s() > before_s)


def test_writes_and_watch_go_on_when_their_member_hangs(three: Cluster, opened: Callable[..., EtcdStore]) -> None:
    """The member that hung wakes up later, carries out the old write in its queue, and must not undo the newer one."""
    store, other = opened(three), opened(three)
    answer(store.put("/run/still", {}))
    answer(store.put("/run/a", {"n": 0}))
    hung = member_of(three, store)
    with watching(store) as watcher:
        hung.stop()
        try:
            began_s = CLOCK.now_s()
            first, second = store.put("/run/a", {"n": 1}), store.put("/run/a", {"n": 2})
            first.result(30)
            second.result(30)
            assert CLOCK.now_s() - began_s < 30
            other.put("/run/b", {"n": 3}).result(30)
            wait_until(lambda: is_told(watcher, "/run/a", {"n": 2}) and is_told(watcher, "/run/b", {"n": 3}))
        finally:
            hung.resume()
        wait_until(lambda: three.is_healthy(hung))
        # Whatever it still had to say is behind this write of its own.
        direct = opened(three, members=[hung])
        answer(direct.put("/run/end", {}))
        wait_until(lambda: is_told(watcher, "/run/end", {}))
        assert [event.value for event in events_of(watcher) if event.key == "/run/a"] == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize("three", [NEWEST], indirect=True)
def test_nothing_is_lost_when_all_members_are_restarted_on_their_data(
    three: Cluster, opened: Callable[..., EtcdStore]
) -> None:
    store = opened(three)
    lease = store.lease(10.0)
    answer(store.put("/run/a", {"n": 0}, lease=lease))
    answer(store.put("/run/b", {"n": 0}))
    with watching(store) as watcher:
        watcher.snapshot()
        three.kill()
        waiting = store.put("/run/a", {"n": 1}, lease=lease)
        three.start()
        waiting.result(15)
        wait_until(lambda: is_told(watcher, "/run/a", {"n": 1}))
        lease.keep_alive()
        answer(store.put("/run/a", {"n": 2}, lease=lease))
        wait_until(lambda: is_told(watcher, "/run/a", {"n": 2}))
        # A key proves that etcd has kept its past: the watch goes on where it stopped.
        assert all(isinstance(item, KeyEvent) and item.value is not None for item in watcher.items)


def test_snapshot_comes_anew_when_no_key_proves_the_past(single: Cluster, opened: Callable[..., EtcdStore]) -> None:
    store = opened(single)
    with watching(store) as watcher:
        answer(store.put("/run/a", {"n": 0}))
        answer(store.delete("/run/a"))
        first, _, gone = watcher.take(3)
        assert isinstance(first, Snapshot)
        assert isinstance(gone, KeyEvent)
        single.restart()
        answer(store.put("/run/a", {"n": 1}))
        wait_until(lambda: is_told(watcher, "/run/a", {"n": 1}))
        latest = next(item for item in watcher.items if isinstance(item, Snapshot))
        assert latest.revision >= gone.revision


def test_keys_and_leases_are_put_back_when_etcd_restarts_empty(
    single: Cluster, opened: Callable[..., EtcdStore]
) -> None:
    """All data of etcd are gone. No node has left, so no node may seem to have."""
    first, second = opened(single), opened(single)
    leases = [first.lease(3.0), second.lease(3.0)]
    answer(first.put("/run/members/a", {"n": 0}, lease=leases[0]))
    answer(second.put("/run/members/b", {"n": 0}, lease=leases[1]))
    answer(first.create("/run/round/1", {"by": "a"}))
    with watching(first) as at_first, watching(second) as at_second:
        before = {entry.key: entry for entry in at_first.snapshot().entries}
        answer(second.put("/run/members/b", {"n": 1}, lease=leases[1]))
        at_second.take(2)
        newest = at_first.event()
        single.restart(is_empty=True)
        for lease in leases:
            lease.keep_alive()
        wait_until(lambda: len(single.values("/run/")) == 3, describe=lambda: single.values("/run/"))
        for watcher in (at_first, at_second):
            latest = watcher.snapshot()
            assert latest.revision > newest.revision
            found = {entry.key: entry for entry in latest.entries}
            assert found.keys() == before.keys()
            assert found["/run/round/1"] == before["/run/round/1"]
            assert found["/run/members/b"] == newest
        # A node that comes new reads the same numbers.
        with watching(opened(single)) as at_third:
            assert {entry.key: entry for entry in at_third.snapshot().entries} == found
        answer(second.put("/run/members/b", {"n": 2}, lease=leases[1]))
        told = at_first.event()
        assert told.value == {"n": 2}
        assert told.revision > latest.revision
        assert told.created_revision == newest.created_revision
        assert events_of(at_second) == [told]
        # The leases are those of before: alive while renewed, gone with their keys when they are not.

        def is_only_the_renewed_left() -> bool:
            leases[0].keep_alive()
            assert leases[0].expires_at_s() > CLOCK.now_s()
            return sorted(single.values("/run/")) == ["/run/members/a", "/run/round/1"]

        wait_until(is_only_the_renewed_left)
        with pytest.raises(LeaseLostError):
            answer(second.put("/run/members/b", {"n": 3}, lease=leases[1]))
        assert at_first.event().value is None


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


@pytest.mark.parametrize("single", [NEWEST], indirect=True)
def test_training_goes_on_when_etcd_restarts_empty(single: Cluster, opened: Callable[..., EtcdStore]) -> None:
    settings = Settings(run_id="r", min_nodes=2, max_nodes=2, ttl_s=6.0)
    drivers = {
        name: Driver(opened(single), settings, clock=CLOCK, node_id=name, host=name, store_port=1) for name in "ab"
    }
    outputs: dict[str, list[ev.Output]] = {name: [] for name in drivers}

    def poll(until: Callable[[], bool]) -> None:
        def is_done() -> bool:
            for name, driver in drivers.items():
                outputs[name] += driver.poll()
            return until()

        wait_until(is_done, describe=lambda: outputs)

    def entered(name: str) -> list[int]:
        return [output.round.generation for output in outputs[name] if isinstance(output, ev.EnterRound)]

    try:
        for name, driver in drivers.items():
            driver.handle(ev.NodeReady(candidates=(Candidate(worker_id=f"{name}0", node_id=name, local_rank=0),)))
        poll(lambda: entered("a") == entered("b") == [1])
        for told in outputs.values():
            told.clear()
        single.kill()
        single.members[0].wipe()
        until_s = CLOCK.now_s() + 0.5
        poll(lambda: CLOCK.now_s() > until_s)
        single.start()
        back_s = CLOCK.now_s()

        def is_renewed_twice() -> bool:
            leases = [driver._lease for driver in drivers.values()]
            return all(lease is not None and lease.expires_at_s() > back_s + 1.5 * settings.ttl_s for lease in leases)

        poll(is_renewed_twice)
        assert len(single.values("/elastictrain/r/")) == 4
        assert outputs == {"a": [], "b": []}
        # A worker that dies right after is replaced as ever.
        drivers["a"].handle(ev.LocalBroken(generation=1, cause="worker_died", worker_id="a0"))
        poll(
            lambda: (
                all(isinstance(output, ev.Fence) for told in outputs.values() for output in told[:1])
                and all(outputs.values())
            )
        )
        drivers["a"].handle(
            ev.LocalChanged(candidates=(Candidate(worker_id="a1", node_id="a", local_rank=0),), settled=1)
        )
        drivers["b"].handle(
            ev.LocalChanged(candidates=(Candidate(worker_id="b0", node_id="b", local_rank=0),), settled=1)
        )
        poll(lambda: entered("a") == entered("b") == [2])
    finally:
        for driver in drivers.values():
            driver.close()


def test_creator_is_told_the_truth_when_its_answer_was_lost(single: Cluster, opened: Callable[..., EtcdStore]) -> None:
    with run_relay(single.members[0].client_port) as relay:
        settings = single.settings(conf={"read_timeout": "0.5"})
        store = open_etcd_store(
            type(settings)(endpoints=(Endpoint("127.0.0.1", relay.port),), attempt_timeout_s=0.5),
            CLOCK,
            on_trouble=lambda line: None,
        )
        other = opened(single)
        try:
            lease = store.lease(10.0)
            answer(store.put("/run/ready", {}, lease=lease))
            relay.loses_answers = True
            made = store.create("/run/round/1", {"same": "value"})
            written = store.put("/run/n", {"n": 1})
            wait_until(lambda: "/run/round/1" in single.values("/run/"))
            assert answer(other.create("/run/round/1", {"same": "value"})) is False
            assert not made.done()
            assert relay.num_bytes_lost > 0
            relay.loses_answers = False
            relay.cut()
            assert answer(made) is True
            answer(written)
            revision = single.ask("KV", "Range", key=b"/run/round/1").kvs[0]
            assert revision.version == 1
            # The same for a put: it took effect once.
            relay.loses_answers = True
            again = store.put("/run/n", {"n": 2})
            wait_until(lambda: b'"n":2' in single.values("/run/")["/run/n"])
            relay.loses_answers = False
            relay.cut()
            answer(again)
            assert single.ask("KV", "Range", key=b"/run/n").kvs[0].version == 2
        finally:
            store.close()


def test_lease_is_granted_once_when_its_answer_was_lost(single: Cluster) -> None:
    with run_relay(single.members[0].client_port) as relay:
        settings = single.settings()
        store = open_etcd_store(
            type(settings)(endpoints=(Endpoint("127.0.0.1", relay.port),), attempt_timeout_s=0.5),
            CLOCK,
            on_trouble=lambda line: None,
        )
        try:
            answer(store.put("/run/ready", {}))
            relay.loses_answers = True
            began_s = CLOCK.now_s()
            lease = store.lease(10.0)
            written = store.put("/run/a", {}, lease=lease)
            wait_until(lambda: single.num_leases() == 1)
            relay.loses_answers = False
            relay.cut()
            answer(written)
            assert single.num_leases() == 1
            assert began_s + 9.0 < lease.expires_at_s() < CLOCK.now_s() + 10.0
        finally:
            store.close()


def cpu_s() -> float:
    return time.process_time()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("single", [NEWEST], indirect=True)
def test_agent_stays_calm_when_etcd_is_away(single: Cluster, opened: Callable[..., EtcdStore]) -> None:
    """No answer for seconds: neither threads nor processor time grow, a line tells of it, and all goes on after."""
    lines: list[str] = []
    store = opened(single, on_trouble=lines.append)
    lease = store.lease(10.0)
    answer(store.put("/run/a", {"n": 0}, lease=lease))
    with watching(store) as watcher:
        single.kill()
        waiting = store.put("/run/a", {"n": 1}, lease=lease)
        lease.keep_alive()
        wait_until(lambda: lines)
        began_s, began_cpu_s, began_threads = CLOCK.now_s(), cpu_s(), num_threads()
        most_threads = 0
        while len(lines) < 2:
            assert CLOCK.now_s() < began_s + 60.0
            pause(0.25)
            most_threads = max(most_threads, num_threads())
        used = (cpu_s() - began_cpu_s) / (CLOCK.now_s() - began_s)
        assert used < 0.25
        assert most_threads <= began_threads + 2  # gRPC's own pool breathes
        assert CLOCK.now_s() - began_s > 4.0
        assert "connection refused" in lines[0]
        assert single.members[0].endpoint.address in lines[0]
        assert "training goes on" in lines[0]
        assert not waiting.done()
        single.start()
        waiting.result(30)
        wait_until(lambda: is_told(watcher, "/run/a", {"n": 1}))
        assert "answers again after" in lines[-1]


@pytest.mark.parametrize("single", [NEWEST], indirect=True)
def test_write_fails_retryably_when_etcd_is_away_for_too_long(single: Cluster) -> None:
    settings = single.settings()
    short = type(settings)(endpoints=settings.endpoints, write_timeout_s=0.7, attempt_timeout_s=0.5)
    store = open_etcd_store(short, CLOCK, on_trouble=lambda line: None)
    try:
        answer(store.put("/run/a", {"n": 0}))
        single.members[0].stop()
        try:
            futures = [store.put("/run/a", {"n": number}) for number in (1, 2)]
            for future in futures:
                error = future.exception(5)
                assert isinstance(error, StoreError)
                assert error.retryable
                assert "limit of 0.7 s for the put of /run/a" in str(error)
        finally:
            single.members[0].resume()
        answer(store.put("/run/a", {"n": 3}))
        assert b'"n":3' in single.values("/run/")["/run/a"]
    finally:
        store.close()


@pytest.mark.parametrize("single", [NEWEST], indirect=True)
def test_nothing_stays_behind_when_stores_are_closed(single: Cluster) -> None:
    def held() -> tuple[set[str], int]:
        return {thread.name for thread in threading.enumerate()}, len(list(Path("/proc/self/fd").iterdir()))

    single.values("/run/")
    before = held()
    for _ in range(3):
        store = open_etcd_store(single.settings(), CLOCK)
        with watching(store):
            lease = store.lease(5.0)
            answer(store.put("/run/a", {}, lease=lease))
            lease.keep_alive()
            assert "elastictrain-etcd" in {thread.name for thread in threading.enumerate()}
        store.close()
        assert "elastictrain-etcd" not in {thread.name for thread in threading.enumerate()}
    wait_until(lambda: held()[0] == before[0] and held()[1] <= before[1], describe=held)


@pytest.mark.parametrize("single", [NEWEST], indirect=True)
def test_waiting_writes_fail_when_the_store_is_closed_without_etcd(single: Cluster) -> None:
    store = open_etcd_store(single.settings(), CLOCK, on_trouble=lambda line: None)
    answer(store.put("/run/a", {}))
    single.kill()
    futures = [store.put("/run/a", {"n": number}) for number in range(3)]
    began_s = CLOCK.now_s()
    store.close(0.5)
    assert CLOCK.now_s() - began_s < 30
    for future in futures:
        with pytest.raises(StoreError, match="was closed before"):
            future.result(0)
