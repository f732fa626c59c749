"""What every rendezvous store must do. Subclass it once per store; the numbers are those of `Store` and `Lease`."""

from __future__ import annotations

import abc
import math
import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

import pytest

from elastictrain.errors import StoreError
from elastictrain.rendezvous.store import Inbox, KeyEvent, LeaseLostError, Snapshot, Store, WatchItem

ANSWER_S = 5.0
T = TypeVar("T")


class Watcher:
    """A client that collects what a watch delivers and waits on its file descriptor, as the agent does."""

    def __init__(self, store: Store, prefix: str, *, without: str = "", but: str = "") -> None:
        self.inbox = Inbox()
        self.items: list[WatchItem] = []
        self.watch = store.watch(prefix, self.inbox, without=without, but=but)
        # Over a network the snapshot shows the store as it is a moment after the call: writes must not come before it.
        self.items = self.take(1) + self.items

    def take(self, count: int) -> list[WatchItem]:
        """The next `count` items; fails when they do not come."""
        while len(self.items) < count:
            ready, _, _ = select.select([self.inbox], [], [], ANSWER_S)
            assert ready, f"expected {count} items within {ANSWER_S} s, got {self.items}"
            self.items += self.inbox.drain()
        taken, self.items = self.items[:count], self.items[count:]
        return taken

    def event(self) -> KeyEvent:
        (item,) = self.take(1)
        assert isinstance(item, KeyEvent)
        return item

    def snapshot(self) -> Snapshot:
        (item,) = self.take(1)
        assert isinstance(item, Snapshot)
        return item

    def close(self) -> None:
        self.watch.close()
        self.inbox.close()


def answer(future: Future[T]) -> T:
    return future.result(ANSWER_S)


class StoreContract(abc.ABC):
    """The tests. `store` is a fresh one; `expire` lets time pass until a lease of `ttl_s` not renewed since is over."""

    ttl_s = 10.0

    @pytest.fixture
    @abc.abstractmethod
    def store(self) -> Store: ...

    @pytest.fixture
    @abc.abstractmethod
    def expire(self) -> Callable[[], None]: ...

    @pytest.fixture
    @abc.abstractmethod
    def half_expire(self) -> Callable[[], None]: ...

    @pytest.fixture
    def watcher(self, store: Store) -> Iterator[Watcher]:
        watcher = Watcher(store, "/run/")
        yield watcher
        watcher.close()

    def test_p2_create_writes_once_when_called_twice(self, store: Store, watcher: Watcher) -> None:
        assert answer(store.create("/run/a", {"by": 1})) is True
        assert answer(store.create("/run/a", {"by": 2})) is False
        answer(store.put("/run/end", {}))
        _, first, end = watcher.take(3)
        assert isinstance(first, KeyEvent)
        assert first.value == {"by": 1}
        assert isinstance(end, KeyEvent)
        assert end.key == "/run/end"

    def test_p2_create_has_one_winner_when_threads_race(self, store: Store) -> None:
        outcomes: list[bool] = []
        barrier = threading.Barrier(8)

        def race(number: int) -> None:
            barrier.wait()
            outcomes.append(answer(store.create("/run/round/1", {"by": number})))

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == [False] * 7 + [True]

    def test_p2_create_succeeds_when_the_key_was_deleted(self, store: Store) -> None:
        answer(store.create("/run/a", {}))
        answer(store.delete("/run/a"))
        assert answer(store.create("/run/a", {})) is True

    def test_p3_put_moves_the_key_when_it_names_another_lease(self, store: Store, watcher: Watcher) -> None:
        first, second = store.lease(self.ttl_s), store.lease(self.ttl_s)
        answer(store.put("/run/a", {"n": 1}, lease=first))
        answer(store.put("/run/a", {"n": 2}, lease=second))
        answer(first.revoke())
        answer(store.put("/run/b", {}))
        keys = [item.key for item in watcher.take(4)[1:] if isinstance(item, KeyEvent)]
        assert keys == ["/run/a", "/run/a", "/run/b"]
        answer(second.revoke())
        assert watcher.event().value is None

    def test_p3_put_detaches_the_key_when_it_names_no_lease(self, store: Store, watcher: Watcher) -> None:
        lease = store.lease(self.ttl_s)
        answer(store.put("/run/a", {"n": 1}, lease=lease))
        answer(store.put("/run/a", {"n": 2}))
        answer(lease.revoke())
        answer(store.delete("/run/a"))
        values = [item.value for item in watcher.take(4)[1:] if isinstance(item, KeyEvent)]
        assert values == [{"n": 1}, {"n": 2}, None]

    def test_p4_delete_is_silent_when_the_key_is_missing(self, store: Store, watcher: Watcher) -> None:
        answer(store.delete("/run/none"))
        answer(store.put("/run/a", {}))
        assert watcher.snapshot().entries == ()
        assert watcher.event().key == "/run/a"

    def test_p5_writes_keep_their_order_when_nobody_waits_for_answers(self, store: Store, watcher: Watcher) -> None:
        futures = [store.put("/run/a", {"n": number}) for number in range(50)]
        for future in futures:
            answer(future)
        values = [item.value for item in watcher.take(51)[1:] if isinstance(item, KeyEvent)]
        assert values == [{"n": number} for number in range(50)]

    def test_p6_watch_tells_the_keys_of_its_prefix_when_it_starts(self, store: Store) -> None:
        answer(store.put("/run/a", {"n": 1}))
        answer(store.put("/other/a", {"n": 2}))
        watcher = Watcher(store, "/run/")
        try:
            entries = watcher.snapshot().entries
            assert [(entry.key, entry.value) for entry in entries] == [("/run/a", {"n": 1})]
            answer(store.put("/other/b", {}))
            answer(store.put("/run/b", {}))
            assert watcher.event().key == "/run/b"
        finally:
            watcher.close()

    def test_p6_watch_misses_nothing_when_it_starts_amid_writes(self, store: Store) -> None:
        def write() -> None:
            for number in range(200):
                answer(store.put("/run/n", {"n": number}))

        thread = threading.Thread(target=write)
        thread.start()
        watcher = Watcher(store, "/run/")
        thread.join()
        try:
            entries = watcher.snapshot().entries
            last = -1 if not entries or entries[0].value is None else entries[0].value["n"]
            rest = watcher.take(199 - last)
            assert [item.value for item in rest if isinstance(item, KeyEvent)] == [
                {"n": number} for number in range(last + 1, 200)
            ]
        finally:
            watcher.close()

    def test_p6_watch_is_silent_when_closed(self, store: Store, watcher: Watcher) -> None:
        watcher.snapshot()
        watcher.watch.close()
        answer(store.put("/run/a", {}))
        assert watcher.inbox.drain() == []

    def test_p7_revisions_grow_when_keys_change(self, store: Store, watcher: Watcher) -> None:
        answer(store.create("/run/a", {}))
        answer(store.put("/run/a", {"n": 1}))
        answer(store.delete("/run/a"))
        answer(store.put("/run/a", {"n": 2}))
        watcher.snapshot()
        made, changed, gone, again = (watcher.event() for _ in range(4))
        assert made.revision < changed.revision < gone.revision < again.revision
        assert made.created_revision == changed.created_revision == made.revision
        assert again.created_revision == again.revision

    def test_p8_value_is_untouched_when_the_caller_changes_its_copy(self, store: Store, watcher: Watcher) -> None:
        value = {"list": [1, 2.5, None, True, "ü"], "map": {"x": "y"}}
        answer(store.put("/run/a", value))
        value["list"] = []
        watcher.snapshot()
        assert watcher.event().value == {"list": [1, 2.5, None, True, "ü"], "map": {"x": "y"}}

    @pytest.mark.parametrize("value", [{"n": math.nan}, {"n": object()}, {1: 2}, [1], {"n": (1, 2)}])
    def test_p8_write_is_refused_when_the_value_is_not_json(
        self, store: Store, watcher: Watcher, value: object
    ) -> None:
        for future in (store.put("/run/a", value), store.create("/run/a", value)):  # type: ignore[arg-type]
            with pytest.raises(StoreError, match="/run/a"):
                answer(future)
        answer(store.put("/run/b", {}))
        watcher.snapshot()
        assert watcher.event().key == "/run/b"

    def test_p9_watch_tells_all_the_rest_when_keys_may_be_left_out(self, store: Store) -> None:
        names = ("config", "members/a", "members/ab", "members/b", "round/1")
        for name in names:
            answer(store.put(f"/run/{name}", {"n": 1}))
        watcher = Watcher(store, "/run/", without="/run/members/", but="/run/members/a")
        try:
            snapshot = watcher.snapshot()
            wanted = {f"/run/{name}" for name in names}
            if snapshot.is_partial:
                wanted -= {"/run/members/ab", "/run/members/b"}
            assert {entry.key for entry in snapshot.entries} == wanted
            for name in names:
                answer(store.put(f"/run/{name}", {"n": 2}))
            told = watcher.take(len(wanted))
            assert {item.key for item in told if isinstance(item, KeyEvent)} == wanted
            answer(store.delete("/run/members/b"))
            answer(store.delete("/run/members/a"))
            events = watcher.take(1 if snapshot.is_partial else 2)
            assert [item.value for item in events if isinstance(item, KeyEvent)] == [None] * len(events)
            assert isinstance(events[-1], KeyEvent)
            assert events[-1].key == "/run/members/a"
        finally:
            watcher.close()

    def test_l1_lease_lives_on_when_renewed(
        self, store: Store, watcher: Watcher, half_expire: Callable[[], None]
    ) -> None:
        lease = store.lease(self.ttl_s)
        answer(store.put("/run/a", {}, lease=lease))
        for _ in range(4):
            half_expire()
            lease.keep_alive()
        answer(store.put("/run/a", {"still": True}, lease=lease))
        watcher.snapshot()
        watcher.event()
        assert watcher.event().value == {"still": True}

    def test_l3_keys_vanish_together_when_the_lease_expires(
        self, store: Store, watcher: Watcher, expire: Callable[[], None]
    ) -> None:
        lease = store.lease(self.ttl_s)
        answer(store.put("/run/a", {}, lease=lease))
        answer(store.create("/run/b", {}, lease=lease))
        answer(store.put("/run/kept", {}))
        expire()
        events = [item for item in watcher.take(6)[4:] if isinstance(item, KeyEvent)]
        assert [(event.key, event.value) for event in events] == [("/run/a", None), ("/run/b", None)]
        assert len({event.revision for event in events}) == 1

    def test_l4_write_is_refused_when_the_lease_is_lost(
        self, store: Store, watcher: Watcher, expire: Callable[[], None]
    ) -> None:
        lost, revoked = store.lease(self.ttl_s), store.lease(self.ttl_s)
        answer(revoked.revoke())
        expire()
        lost.keep_alive()
        for lease in (lost, revoked):
            with pytest.raises(LeaseLostError):
                answer(store.put("/run/a", {}, lease=lease))
            assert lease.expires_at_s() == -math.inf
        answer(store.put("/run/b", {}))
        watcher.snapshot()
        assert watcher.event().key == "/run/b"
