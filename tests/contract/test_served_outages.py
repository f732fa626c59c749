"""The server of the served store goes away in every way that it can while clients hang on it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from relay import Relay, run_relay
from store_contract import Watcher, answer
from store_server import CLOCK, ServerProcess, connect, free_port, run_server, serve, settings_of
from waiting import wait_until

from elastictrain.errors import ConfigError, StoreError
from elastictrain.rendezvous import events as ev
from elastictrain.rendezvous.driver import Driver
from elastictrain.rendezvous.endpoint import Endpoint
from elastictrain.rendezvous.records import Settings
from elastictrain.rendezvous.served.hosting import Hosting
from elastictrain.rendezvous.served.served_store import ServedStore, make_session
from elastictrain.rendezvous.store import Inbox, KeyEvent, LeaseLostError, Snapshot, WatchFailed
from elastictrain.topology import Candidate


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with run_server() as running:
        yield running


@pytest.fixture
def opened() -> Iterator[Callable[..., ServedStore]]:
    """Opens clients, and closes them at the end."""
    stores: list[ServedStore] = []

    def make(port: int, **rest: Any) -> ServedStore:
        stores.append(connect(port, **rest))
        return stores[-1]

    yield make
    for store in stores:
        store.close(0.2)


@contextlib.contextmanager
def watching(store: ServedStore, prefix: str = "/run/") -> Iterator[Watcher]:
    watcher = Watcher(store, prefix)
    try:
        yield watcher
    finally:
        watcher.close()


def shown(watcher: Watcher) -> dict[str, KeyEvent]:
    """The keys as all that was delivered until now leaves them."""
    watcher.items += watcher.inbox.drain()
    view: dict[str, KeyEvent] = {}
    for item in watcher.items:
        if isinstance(item, Snapshot):
            view = {entry.key: entry for entry in item.entries}
        elif isinstance(item, KeyEvent) and item.value is not None:
            view[item.key] = item
        elif isinstance(item, KeyEvent):
            view.pop(item.key, None)
    return view


def values(watcher: Watcher) -> dict[str, Any]:
    return {key: event.value for key, event in shown(watcher).items()}


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_writes_are_done_once_when_their_answers_are_lost(
    server: ServerProcess, opened: Callable[..., ServedStore]
) -> None:
    other = opened(server.port)
    with run_relay(server.port) as relay, watching(other) as watcher:
        store = opened(relay.port, read_timeout_s=30.0)
        try:
            lease = store.lease(20.0)
            answer(store.put("/run/ready", {}, lease=lease))
            relay.loses_answers = True
            sent_s = CLOCK.now_s()
            made = store.create("/run/round/1", {"same": "value"})
            written = store.put("/run/n", {"n": 1})
            second = store.lease(20.0)
            below = store.put("/run/n", {"n": 2}, lease=second)
            wait_until(lambda: values(watcher).get("/run/n") == {"n": 2})
            assert answer(other.create("/run/round/1", {"same": "value"})) is False
            assert not made.done()
            assert relay.num_bytes_lost > 0
            wait_until(lambda: CLOCK.now_s() > sent_s + 1.5)
            relay.loses_answers = False
            relay.cut()
            assert answer(made) is True
            answer(written)
            answer(below)
            answer(store.put("/run/end", {}))
            wait_until(lambda: "/run/end" in values(watcher))
            keys = [item.key for item in watcher.items if isinstance(item, KeyEvent)]
            assert keys == ["/run/ready", "/run/round/1", "/run/n", "/run/n", "/run/end"]
            # The grant counts from its first sending, however late the answer came.
            assert second.expires_at_s() < sent_s + 0.75 + 20.0
        finally:
            store.close()


def test_writes_keep_their_order_and_the_watch_is_whole_when_the_connection_is_cut_again_and_again(
    server: ServerProcess, opened: Callable[..., ServedStore]
) -> None:
    chance = random.Random(1)
    other = opened(server.port)
    with run_relay(server.port) as relay, watching(other) as straight:
        store = opened(relay.port)
        with watching(store) as cut:
            futures = []
            for number in range(150):
                futures.append(store.put(f"/run/{number % 7}", {"n": number}))
                if number % 30 == 29:
                    pause(chance.random() * 0.1)
                    relay.cut()
            for future in futures:
                future.result(20)
            answer(store.delete("/run/0"))
            wait_until(lambda: "/run/0" not in values(straight) and values(cut) == values(straight))
            told = [item for item in straight.items if isinstance(item, KeyEvent) and item.value is not None]
            assert [event.value for event in told] == [{"n": number} for number in range(150)]
            assert shown(cut) == shown(straight)
            revisions = [item.revision for item in cut.items if isinstance(item, KeyEvent | Snapshot)]
            assert revisions == sorted(revisions)
            assert sum(isinstance(item, Snapshot) for item in cut.items) > 1


def test_nobody_vanishes_when_the_server_is_stopped_for_longer_than_a_lease(
    server: ServerProcess, opened: Callable[..., ServedStore]
) -> None:
    stores = [opened(server.port) for _ in range(3)]
    leases = [store.lease(2.0) for store in stores]
    for place, store in enumerate(stores):
        answer(store.put(f"/run/members/{place}", {}, lease=leases[place]))
    with watching(stores[0]) as watcher:
        server.stop()
        sent_s = CLOCK.now_s()
        waiting = stores[1].put("/run/n", {"n": 1})
        stopped = [lease.expires_at_s() for lease in leases]

        def renew(until_s: float) -> bool:
            for lease in leases:
                lease.keep_alive()
            pause(0.2)
            return CLOCK.now_s() > until_s

        wait_until(lambda: renew(sent_s + 3.0))
        assert [lease.expires_at_s() for lease in leases] == stopped, "no answer, no longer lease"
        assert not waiting.done()
        server.resume()
        waiting.result(10)
        wait_until(lambda: renew(0.0) and all(lease.expires_at_s() > CLOCK.now_s() + 1.0 for lease in leases))
        wait_until(lambda: renew(sent_s + 7.0))
        assert values(watcher) == {**{f"/run/members/{place}": {} for place in range(3)}, "/run/n": {"n": 1}}
        gone = [item for item in watcher.items if isinstance(item, KeyEvent) and item.value is None]
        assert not gone
        # One that is really silent is dropped as ever.
        silent = leases.pop()

        def is_dropped() -> bool:
            renew(0.0)
            return "/run/members/2" not in values(watcher)

        wait_until(is_dropped)
        with pytest.raises(LeaseLostError):
            answer(stores[2].put("/run/members/2", {}, lease=silent))


def test_expiry_counts_from_the_sending_when_the_answer_is_late(
    server: ServerProcess, opened: Callable[..., ServedStore]
) -> None:
    lease = opened(server.port, read_timeout_s=30.0).lease(6.0)
    wait_until(lambda: lease.expires_at_s() < 1e18)
    first_s = lease.expires_at_s()
    server.stop()
    sent_s = CLOCK.now_s()
    lease.keep_alive()
    wait_until(lambda: CLOCK.now_s() >= sent_s + 1.0)
    server.resume()
    wait_until(lambda: lease.expires_at_s() > first_s)
    assert lease.expires_at_s() < sent_s + 0.5 + 6.0


def test_keys_and_leases_are_put_back_when_the_server_restarts_empty(
    server: ServerProcess, opened: Callable[..., ServedStore]
) -> None:
    """Nobody has left, so nobody may seem to have; only what the server's own node held goes with it."""
    first, second = opened(server.port), opened(server.port)
    host = opened(server.port, session="host")
    leases = [first.lease(4.0), second.lease(4.0)]
    answer(host.put("/run/members/host", {}, lease=host.lease(60.0)))
    answer(first.put("/run/members/a", {"n": 0}, lease=leases[0]))
    answer(second.put("/run/members/b", {"n": 0}, lease=leases[1]))
    answer(first.create("/run/round/1", {"by": "a"}))
    with watching(first) as at_first, watching(second) as at_second:
        answer(second.put("/run/members/b", {"n": 1}, lease=leases[1]))
        wait_until(lambda: values(at_first).get("/run/members/b") == {"n": 1})
        before, newest = shown(at_first), at_first.items[-1]
        assert isinstance(newest, KeyEvent)
        server.kill()
        host.close(0.0)
        late = second.create("/run/round/2", {"by": "b"})
        server.start()
        assert late.result(10) is True
        wait_until(lambda: all("/run/members/host" not in values(one) for one in (at_first, at_second)))
        # What was known has its old numbers, for all, and what is new has larger ones.
        third = opened(server.port)
        with watching(third) as at_third:
            wait_until(lambda: shown(at_first) == shown(at_second) == shown(at_third))
            found = shown(at_third)
        round_2 = found.pop("/run/round/2")
        assert found == {key: event for key, event in before.items() if key != "/run/members/host"}
        assert round_2.revision > newest.revision
        answer(second.put("/run/members/b", {"n": 2}, lease=leases[1]))
        wait_until(lambda: values(at_first)["/run/members/b"] == {"n": 2})
        assert shown(at_first)["/run/members/b"].created_revision == newest.created_revision

        # The leases are those of before: alive while renewed, gone with their keys when they are not.
        def is_only_the_renewed_left() -> bool:
            leases[0].keep_alive()
            pause(0.1)
            return sorted(values(at_first)) == ["/run/members/a", "/run/round/1", "/run/round/2"]

        wait_until(is_only_the_renewed_left)
        with pytest.raises(LeaseLostError):
            answer(second.put("/run/members/b", {"n": 3}, lease=leases[1]))


def test_create_is_told_the_truth_when_the_server_died_with_the_answer(
    server: ServerProcess, opened: Callable[..., ServedStore]
) -> None:
    other = opened(server.port)
    with run_relay(server.port) as relay, watching(other) as watcher:
        store = opened(relay.port, read_timeout_s=30.0)
        answer(store.put("/run/ready", {}))
        relay.loses_answers = True
        made = store.create("/run/round/1", {"by": "store"})
        wait_until(lambda: "/run/round/1" in values(watcher))
        told = shown(watcher)["/run/round/1"]
        server.kill()
        relay.loses_answers = False
        server.start()
        assert made.result(10) is True
        answer(other.put("/run/end", {}))
        wait_until(lambda: "/run/end" in values(watcher))
        assert shown(watcher)["/run/round/1"] == told


def test_late_survivor_is_turned_away_in_words_when_others_have_begun_anew(opened: Callable[..., ServedStore]) -> None:
    with run_server(gather_s=0.3) as server:
        lines: list[str] = []
        with run_relay(server.port) as relay:
            late = opened(relay.port, on_trouble=lines.append)
            answer(late.create("/run/round/1", {"by": "late"}))
            watcher = Watcher(late, "/run/")
            server.kill()
            relay.close()
            server.start()
            fresh = opened(server.port)
            answer(fresh.create("/run/round/1", {"by": "fresh"}))
            back = Relay(server.port, port=relay.port)
            try:
                wait_until(lambda: any(isinstance(item, WatchFailed) for item in drain(watcher)))
                error = late.put("/run/a", {}).exception(5)
            finally:
                back.close()
                watcher.close()
        assert isinstance(error, StoreError)
        assert not error.retryable
        assert "start this node again" in str(error)
        assert answer(fresh.create("/run/a", {})) is True


def drain(watcher: Watcher) -> list[Any]:
    watcher.items += watcher.inbox.drain()
    return list(watcher.items)


def test_late_survivor_goes_on_when_nobody_has_decided_anything(opened: Callable[..., ServedStore]) -> None:
    with run_server(gather_s=0.2) as server, run_relay(server.port) as relay:
        late = opened(relay.port)
        lease = late.lease(20.0)
        answer(late.put("/run/members/late", {}, lease=lease))
        answer(late.create("/run/round/7", {"by": "late"}))
        with watching(late) as at_late:
            wait_until(lambda: len(values(at_late)) == 2)
            before = shown(at_late)
            server.kill()
            relay.close()
            server.start()
            fresh = opened(server.port)
            own = fresh.lease(20.0)
            answer(fresh.put("/run/members/fresh", {}, lease=own))
            with watching(fresh) as at_fresh:
                back = Relay(server.port, port=relay.port)
                try:
                    wait_until(lambda: len(values(at_late)) == len(values(at_fresh)) == 3)
                    assert shown(at_late) == shown(at_fresh)
                    joined = shown(at_late).pop("/run/members/fresh")
                    assert {key: shown(at_late)[key] for key in before} == before
                    assert joined.created_revision > max(event.revision for event in before.values())
                    answer(late.put("/run/members/late", {"n": 1}, lease=lease))
                    answer(fresh.put("/run/members/fresh", {"n": 1}, lease=own))
                finally:
                    back.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_nodes_agree_on_everything_when_the_server_is_emptied_repeatedly(
    seed: int, opened: Callable[..., ServedStore]
) -> None:
    chance = random.Random(seed)
    num_nodes = 4
    with run_server(gather_s=3.0) as server:
        stores = [opened(server.port) for _ in range(num_nodes)]
        leases = [store.lease(8.0) for store in stores]
        last = [0] * num_nodes

        def write(place: int) -> None:
            last[place] += 1
            stores[place].put(f"/run/members/{place}", {"n": last[place]}, lease=leases[place])

        for place in range(num_nodes):
            write(place)
        answer(stores[0].create("/run/round/1", {"x": 1}))
        watchers = [Watcher(store, "/run/") for store in stores]
        try:
            wait_until(lambda: all(len(values(one)) == num_nodes + 1 for one in watchers))

            def live(seconds: float) -> None:
                until_s = CLOCK.now_s() + seconds
                while CLOCK.now_s() < until_s:
                    if chance.random() < 0.3:
                        write(chance.randrange(num_nodes))
                    if chance.random() < 0.2:
                        leases[chance.randrange(num_nodes)].keep_alive()
                    pause(0.01)
                for watcher in watchers:
                    assert len(values(watcher)) == num_nodes + 1, "nobody ever seems gone"

            for seconds in (1.0, 0.1, 2.0, 0.0):
                server.restart()
                live(seconds)
            for place in range(num_nodes):
                write(place)
                leases[place].keep_alive()

            def is_settled() -> bool:
                wanted = {f"/run/members/{place}": {"n": last[place]} for place in range(num_nodes)}
                return all(values(one) == {**wanted, "/run/round/1": {"x": 1}} for one in watchers)

            wait_until(is_settled, 20.0, lambda: [values(one) for one in watchers])
            late = opened(server.port)
            with watching(late) as at_late:
                wait_until(lambda: all(shown(one) == shown(at_late) for one in watchers))
            for watcher in watchers:
                revisions = [item.revision for item in watcher.items if isinstance(item, KeyEvent | Snapshot)]
                assert revisions == sorted(revisions)
        finally:
            for watcher in watchers:
                watcher.close()


def test_training_goes_on_when_the_server_restarts_empty(
    server: ServerProcess, opened: Callable[..., ServedStore]
) -> None:
    settings = Settings(run_id="r", min_nodes=2, max_nodes=2, ttl_s=8.0)
    drivers = {
        name: Driver(opened(server.port), settings, clock=CLOCK, node_id=name, host=name, store_port=1) for name in "ab"
    }
    outputs: dict[str, list[ev.Output]] = {name: [] for name in drivers}

    def poll(until: Callable[[], bool]) -> None:
        def is_done() -> bool:
            for name, driver in drivers.items():
                outputs[name] += driver.poll()
            return until()

        wait_until(is_done, 20.0, describe=lambda: outputs)

    def entered(name: str) -> list[int]:
        return [output.round.generation for output in outputs[name] if isinstance(output, ev.EnterRound)]

    def candidate(name: str) -> tuple[Candidate, ...]:
        return (Candidate(worker_id=f"{name}0", node_id=name, local_rank=0),)

    try:
        for name, driver in drivers.items():
            driver.handle(ev.NodeReady(candidates=candidate(name)))
        poll(lambda: entered("a") == entered("b") == [1])
        for told in outputs.values():
            told.clear()
        server.kill()
        until_s = CLOCK.now_s() + 0.5
        poll(lambda: CLOCK.now_s() > until_s)
        server.start()
        back_s = CLOCK.now_s()

        def is_renewed_twice() -> bool:
            leases = [driver._lease for driver in drivers.values()]
            return all(lease is not None and lease.expires_at_s() > back_s + 1.5 * settings.ttl_s for lease in leases)

        poll(is_renewed_twice)
        assert outputs == {"a": [], "b": []}
        # A worker that dies right after is replaced as ever.
        drivers["a"].handle(ev.LocalBroken(generation=1, cause="worker_died", worker_id="a0"))
        poll(lambda: all(any(isinstance(output, ev.Fence) for output in told) for told in outputs.values()))
        for name, driver in drivers.items():
            driver.handle(ev.LocalChanged(candidates=candidate(name), settled=1))
        poll(lambda: entered("a") == entered("b") == [2])
    finally:
        for driver in drivers.values():
            driver.close()


def test_agent_stays_calm_when_the_server_is_away(server: ServerProcess, opened: Callable[..., ServedStore]) -> None:
    """No answer for seconds: neither threads nor processor time grow, a line tells of it, and all goes on after."""
    lines: list[str] = []
    store = opened(server.port, on_trouble=lines.append)
    lease = store.lease(30.0)
    answer(store.put("/run/a", {"n": 0}, lease=lease))
    with watching(store) as watcher:
        server.kill()
        waiting = store.put("/run/a", {"n": 1}, lease=lease)
        lease.keep_alive()
        wait_until(lambda: lines)
        began_s, began_cpu_s = CLOCK.now_s(), time.process_time()
        began_threads = len(os.listdir("/proc/self/task"))
        wait_until(lambda: len(lines) >= 2, 30.0)
        assert (time.process_time() - began_cpu_s) / (CLOCK.now_s() - began_s) < 0.25
        assert len(os.listdir("/proc/self/task")) <= began_threads + 1
        assert CLOCK.now_s() - began_s > 3.0
        assert "connection refused" in lines[0]
        assert f"127.0.0.1:{server.port}" in lines[0]
        assert not waiting.done()
        server.start()
        waiting.result(10)
        wait_until(lambda: values(watcher).get("/run/a") == {"n": 1})
        assert "answers again after" in lines[-1]


def test_write_fails_retryably_when_the_server_is_away_for_too_long(opened: Callable[..., ServedStore]) -> None:
    with run_server(gather_s=0.0) as server:
        store = opened(server.port, write_timeout_s=0.7)
        answer(store.put("/run/a", {"n": 0}))
        server.kill()
        for future in [store.put("/run/a", {"n": number}) for number in (1, 2)]:
            error = future.exception(5)
            assert isinstance(error, StoreError)
            assert error.retryable
            assert "limit of 0.7 s for the put of /run/a" in str(error)
        server.start()
        wait_until(lambda: store.put("/run/a", {"n": 3}).exception(5) is None)


def test_new_node_says_what_it_tries_and_gives_up_when_nobody_serves(opened: Callable[..., ServedStore]) -> None:
    port, lines = free_port(), list[str]()
    store = opened(port, on_trouble=lines.append, join_timeout_s=5.0, report_every_s=0.5)
    inbox = Inbox()
    store.watch("/run/", inbox)
    error = store.put("/run/a", {}).exception(20)
    assert isinstance(error, StoreError)
    assert not error.retryable
    assert f"127.0.0.1:{port}" in str(error)
    assert "join time-out of 5 s" in str(error)
    (item,) = inbox.drain()
    assert isinstance(item, WatchFailed)
    inbox.close()
    assert 2 <= len(lines) <= 12
    assert "connection refused" in lines[0]
    assert "--rdzv-endpoint" in lines[0]


def test_another_agent_of_the_machine_serves_when_the_first_is_gone(opened: Callable[..., ServedStore]) -> None:
    """Two that may serve: the first does, the second finds the port taken and takes over later."""
    port = free_port()
    hostings: list[Hosting] = []

    def start(name: str) -> ServedStore:
        session = make_session()
        hosting = Hosting(settings_of(port), None, CLOCK, session=session, report=lambda line: None, gather_s=2.0)
        hostings.append(hosting)
        hosting.try_serve()
        return opened(port, session=session, hosting=hosting)

    try:
        first, second = start("a"), start("b")
        third = opened(port)
        assert [hosting.was_taken for hosting in hostings] == [False, True]
        for name, store in (("a", first), ("b", second), ("c", third)):
            answer(store.put(f"/run/members/{name}", {}, lease=store.lease(20.0)))
        answer(third.create("/run/round/1", {}))
        with watching(second) as at_second, watching(third) as at_third:
            before = shown(at_second)
            assert len(before) == 4
            first.close(0.0)
            hostings[0].close(linger_s=0.0)
            answer(third.put("/run/n", {}))
            assert hostings[1].own_endpoint is not None
            wait_until(lambda: "/run/members/a" not in values(at_second), 10.0)
            wait_until(lambda: shown(at_second) == shown(at_third))
            found = shown(at_third)
            del found["/run/n"], before["/run/members/a"]
            assert found == before
    finally:
        for hosting in hostings[::-1]:
            hosting.close(linger_s=0.0)


def test_new_server_is_patient_with_survivors_until_one_is_back_or_none_can_be(
    opened: Callable[..., ServedStore],
) -> None:
    """Where the run was here before, nobody begins anew while somebody may still train."""
    port = free_port()
    server = serve(port)
    with run_relay(port) as relay:
        survivor = opened(relay.port)
        answer(survivor.create("/run/round/1", {"by": "survivor"}))
        watcher = Watcher(survivor, "/run/")
        relay.close()
        server.close(linger_s=0.0)
        server = serve(port, gather_s=0.5, patience_s=60.0)
        try:
            fresh = opened(port)
            made = fresh.create("/run/round/1", {"by": "fresh"})
            pause(2.5)
            assert not made.done()
            back = Relay(port, port=relay.port)
            try:
                assert made.result(10) is False
                assert values(watcher) == {"/run/round/1": {"by": "survivor"}}
            finally:
                back.close()
        finally:
            watcher.close()
            server.close(linger_s=0.0)
        server = serve(gather_s=0.5, patience_s=60.0)
        try:
            made = opened(server.port).create("/run/round/1", {"by": "fresh"})
            pause(1.0)
            assert not made.done()
            server.hurry()
            assert made.result(5) is True
        finally:
            server.close(linger_s=0.0)


def listening(port: int) -> set[str]:
    return {one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.laddr.port == port and not one.raddr}


@pytest.mark.parametrize(
    ("host", "conf", "addresses"),
    [
        ("localhost", {}, [{"127.0.0.1"}, {"127.0.0.1", "::1"}]),
        ("127.0.0.1", {}, [{"127.0.0.1"}]),
        ("127.0.0.2", {"is_host": True}, [{"127.0.0.2"}]),
        ("192.0.2.1", {}, [set()]),
        ("no-such-host.invalid", {}, [set()]),
        ("localhost", {"is_host": False}, [set()]),
        ("192.0.2.1", {"is_host": True, "bind": "127.0.0.3"}, [{"127.0.0.3"}]),
        ("localhost", {"bind": "0.0.0.0"}, [{"0.0.0.0"}]),
        (socket.gethostname(), {}, [{"127.0.0.4"}, {"127.0.0.1", "127.0.0.4"}, {"127.0.1.1", "127.0.0.4"}]),
    ],
)
def test_machine_serves_at_the_address_that_the_endpoint_means(
    opened: Callable[..., ServedStore], host: str, conf: dict[str, Any], addresses: list[set[str]]
) -> None:
    port = free_port()
    settings = dataclasses.replace(settings_of(port, **conf), endpoint=Endpoint(host, port))
    hosting = Hosting(
        settings, None, CLOCK, session="host", report=lambda line: None, node_address="127.0.0.4", gather_s=0.0
    )
    try:
        found = hosting.try_serve()
        where = listening(port)
        if host == socket.gethostname() and not all(one.startswith("127.") for one in where):
            assert where
            assert "0.0.0.0" not in where
        else:
            assert where in addresses
        assert found == bool(where)
        if found:
            own = ServedStore(
                settings, CLOCK, secret=None, session="host", on_trouble=lambda line: None, hosting=hosting
            )
            assert own.create("/run/a", {}).result(5) is True
            own.close()
    finally:
        hosting.close(linger_s=0.0)


def test_machine_is_refused_in_one_line_when_it_shall_serve_elsewhere() -> None:
    settings = dataclasses.replace(settings_of(1, is_host=True), endpoint=Endpoint("192.0.2.1", 29400))
    with pytest.raises(ConfigError, match=r"is_host: expected .* seen 192.0.2.1.*bind=ADDRESS"):
        Hosting(settings, None, CLOCK, session="host", report=lambda line: None)


def test_server_stays_for_the_others_when_its_node_ends(opened: Callable[..., ServedStore]) -> None:
    server = serve()
    store = opened(server.port)
    answer(store.put("/run/a", {}))
    thread = threading.Thread(target=server.close)
    thread.start()
    until_s = CLOCK.now_s() + 3.0
    while CLOCK.now_s() < until_s:
        answer(store.put("/run/a", {}))
        pause(0.1)
    assert thread.is_alive(), "somebody still writes"
    store.close()
    thread.join(1.5)
    assert not thread.is_alive(), "nobody is left"
