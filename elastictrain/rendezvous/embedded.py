"""The store of a run on one node: this process's memory. Nothing to install, nothing to connect to."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from elastictrain.clock import Clock
from elastictrain.errors import StoreError
from elastictrain.rendezvous.store import KeyEvent, Lease, LeaseLostError, Snapshot, Value, WatchItem, copy_value


class Receiver(Protocol):
    """Where a watch delivers; an `Inbox` is one. Called with the store's lock held: it must not block."""

    def deliver(self, item: WatchItem) -> None: ...


@dataclass(slots=True)
class _Entry:
    value: Value
    revision: int
    created_revision: int
    lease: EmbeddedLease | None


@dataclass(slots=True, eq=False)
class EmbeddedLease:
    """A lease of an EmbeddedStore; see `Lease` for its promises. `ttl_s` may be infinite."""

    store: EmbeddedStore
    ttl_s: float
    deadline_s: float
    keys: set[str] = field(default_factory=set)

    def keep_alive(self) -> None:
        self.store.renew(self)

    def expires_at_s(self) -> float:
        return self.deadline_s

    def revoke(self) -> Future[None]:
        return self.store.revoke(self)


@dataclass(slots=True, eq=False)
class EmbeddedWatch:
    """A watch of an EmbeddedStore."""

    store: EmbeddedStore
    prefix: str
    inbox: Receiver
    without: str = ""
    but: str = ""

    def covers(self, key: str) -> bool:
        is_left_out = bool(self.without) and key.startswith(self.without) and key != self.but
        return key.startswith(self.prefix) and not is_left_out

    def close(self) -> None:
        self.store.forget(self)


class EmbeddedStore:
    """Keeps the promises of `Store` in memory. Any thread may call it; every future it returns is already done.

    It has no timer: leases are looked at whenever it is called, and by `expire_leases`. Whoever serves it to others
    calls that at `next_expiry_s`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._revision = 0
        self._entries: dict[str, _Entry] = {}
        self._leases: set[EmbeddedLease] = set()
        self._watches: list[EmbeddedWatch] = []

    def create(self, key: str, value: Value, *, lease: Lease | None = None) -> Future[bool]:
        return self._write(key, value, lease, is_create=True)

    def put(self, key: str, value: Value, *, lease: Lease | None = None) -> Future[None]:
        done: Future[None] = Future()
        written = self._write(key, value, lease, is_create=False)
        error = written.exception()
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
        return done

    def delete(self, key: str) -> Future[None]:
        return self._done(lambda: self._remove({key}))

    def lease(self, ttl_s: float) -> EmbeddedLease:
        with self._lock:
            self.expire_leases()
            lease = EmbeddedLease(self, ttl_s, self._clock.now_s() + ttl_s)
            self._leases.add(lease)
            return lease

    def watch(self, prefix: str, inbox: Receiver, *, without: str = "", but: str = "") -> EmbeddedWatch:
        with self._lock:
            self.expire_leases()
            watch = EmbeddedWatch(self, prefix, inbox, without, but)
            inbox.deliver(self._snapshot(watch))
            self._watches.append(watch)
            return watch

    def get(self, key: str) -> KeyEvent | None:
        """One key as it is, None when it does not exist."""
        with self._lock:
            entry = self._entries.get(key)
            return None if entry is None else self._event(key, entry)

    def snapshot(self, prefix: str) -> Snapshot:
        """All keys under `prefix`, as they are."""
        with self._lock:
            entries = (self._event(key, entry) for key, entry in self._entries.items() if key.startswith(prefix))
            return Snapshot(revision=self._revision, entries=tuple(entries))

    def _snapshot(self, watch: EmbeddedWatch) -> Snapshot:
        whole = self.snapshot(watch.prefix)
        entries = tuple(entry for entry in whole.entries if watch.covers(entry.key))
        return Snapshot(revision=whole.revision, entries=entries, is_partial=bool(watch.without))

    def expire_leases(self) -> None:
        """Drop the leases whose time is over, with their keys."""
        with self._lock:
            now_s = self._clock.now_s()
            for lease in [lease for lease in self._leases if lease.deadline_s <= now_s]:
                self._drop(lease)

    def next_expiry_s(self) -> float | None:
        """When the next lease runs out unless it is renewed (monotonic), or None."""
        with self._lock:
            times = [lease.deadline_s for lease in self._leases if math.isfinite(lease.deadline_s)]
            return min(times, default=None)

    def postpone_expiry(self, seconds: float) -> None:
        """Give every lease so much longer, for a time in which nobody could renew one."""
        with self._lock:
            for lease in self._leases:
                lease.deadline_s += seconds

    def load(self, revision: int, entries: Iterable[tuple[KeyEvent, EmbeddedLease | None]]) -> None:
        """Put keys in with the numbers that they had in another store, whose newest revision is `revision`.

        What was here before and is not replaced is numbered anew, behind it. Every watch gets a new Snapshot.
        """
        with self._lock:
            self._revision = max(self._revision, revision)
            loaded = {event.key: (event, lease) for event, lease in entries}
            for key, entry in self._entries.items():
                if key not in loaded:
                    self._revision += 1
                    entry.revision = entry.created_revision = self._revision
            for key, (event, lease) in loaded.items():
                known = self._entries.get(key)
                if known is not None and known.lease is not None:
                    known.lease.keys.discard(key)
                if lease is not None:
                    lease.keys.add(key)
                self._entries[key] = _Entry(event.value or {}, event.revision, event.created_revision, lease)
            self._revision += 1  # the Snapshot is newer than whatever anybody has seen
            for watch in self._watches:
                watch.inbox.deliver(self._snapshot(watch))

    def renew(self, lease: EmbeddedLease) -> None:
        with self._lock:
            self.expire_leases()
            if lease in self._leases:
                lease.deadline_s = self._clock.now_s() + lease.ttl_s

    def revoke(self, lease: EmbeddedLease) -> Future[None]:
        return self._done(lambda: self._drop(lease))

    def forget(self, watch: EmbeddedWatch) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def _done(self, action: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        with self._lock:
            self.expire_leases()
            action()
        done.set_result(None)
        return done

    def _write(self, key: str, value: Value, lease: Lease | None, *, is_create: bool) -> Future[bool]:
        done: Future[bool] = Future()
        try:
            copy = copy_value(key, value)
        except StoreError as error:
            done.set_exception(error)
            return done
        with self._lock:
            self.expire_leases()
            if lease is not None and lease not in self._leases:
                done.set_exception(LeaseLostError(f"{key}: the lease it was to be written under has expired"))
            elif is_create and key in self._entries:
                done.set_result(False)
            else:
                self._set(key, copy, lease if isinstance(lease, EmbeddedLease) else None)
                done.set_result(True)
        return done

    def _set(self, key: str, value: dict[str, Any], lease: EmbeddedLease | None) -> None:
        self._revision += 1
        known = self._entries.get(key)
        if known is not None and known.lease is not None:
            known.lease.keys.discard(key)
        if lease is not None:
            lease.keys.add(key)
        created = self._revision if known is None else known.created_revision
        self._entries[key] = entry = _Entry(value, self._revision, created, lease)
        self._announce(self._event(key, entry))

    def _drop(self, lease: EmbeddedLease) -> None:
        self._leases.discard(lease)
        lease.deadline_s = -math.inf
        self._remove(lease.keys)

    def _remove(self, keys: set[str]) -> None:
        found = [key for key in sorted(keys) if key in self._entries]
        if not found:
            return
        self._revision += 1
        for key in found:
            entry = self._entries.pop(key)
            if entry.lease is not None:
                entry.lease.keys.discard(key)
            self._announce(KeyEvent(key=key, value=None, revision=self._revision, created_revision=0))

    def _announce(self, event: KeyEvent) -> None:
        for watch in self._watches:
            if watch.covers(event.key):
                watch.inbox.deliver(event)

    @staticmethod
    def _event(key: str, entry: _Entry) -> KeyEvent:
        return KeyEvent(key=key, value=entry.value, revision=entry.revision, created_revision=entry.created_revision)
