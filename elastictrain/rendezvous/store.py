"""The store port: what the rendezvous needs of etcd, of one process's memory, or of anything else.

No call waits for the network. A write returns a `Future` at once; what other nodes wrote is pushed into an `Inbox`,
whose file descriptor wakes the one selector loop of the agent. Values are JSON objects and nothing else.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from elastictrain.errors import ConfigError, StoreError

Value = Mapping[str, Any]


def copy_value(key: str, value: Value) -> dict[str, Any]:
    """Give a copy of `value` as JSON would bring it back. Raises StoreError when it is not a JSON object.

    The round trip is the promise that a caller's later change of its dict, or a value that JSON cannot carry, behaves
    in one process as it would over the network.
    """
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
        if not isinstance(copy, dict) or copy != value:
            raise ValueError("it does not come back as it was written")
    except (TypeError, ValueError) as error:
        raise StoreError(f"{key}: the value is not a JSON object: {error}", retryable=False) from None
    return copy


class LeaseLostError(StoreError):
    """The lease behind a write is gone, and with it every key that hung on it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyEvent:
    """One change of one key.

    `value` is None when the key is gone. `revision` numbers the change, over all keys of the store;
    `created_revision` is that of the create or put that made the key exist (0 when it is gone). Read-only: the value
    is shared with the other watchers of this process.
    """

    key: str
    value: Value | None
    revision: int
    created_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All keys that are watched as they were at `revision`; what is not listed does not exist.

    `is_partial` says that the watch leaves keys under its prefix out (P9): of those nothing is said.
    """

    revision: int
    entries: tuple[KeyEvent, ...]
    is_partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchFailed:
    """The watch has ended for good, for the reason given: the store's, or a mistake in how the user named the store."""

    error: StoreError | ConfigError


WatchItem = Snapshot | KeyEvent | WatchFailed


class Inbox:
    """Where watches deliver: a queue that any thread may fill, and a file descriptor that is readable while it is full.

    Owned, drained and closed by one thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[WatchItem] = []
        self._is_signalled = False
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """File descriptor that polls readable from a delivery or `wake` until the next `drain`."""
        return self._fd

    def deliver(self, item: WatchItem) -> None:
        """Append one item and wake the owner. Any thread; never blocks; does nothing once closed."""
        with self._lock:
            if self._fd >= 0:
                self._items.append(item)
                self._signal()

    def wake(self) -> None:
        """Wake the owner without an item. Any thread; never blocks."""
        with self._lock:
            if self._fd >= 0:
                self._signal()

    def drain(self) -> list[WatchItem]:
        """Take everything delivered so far, in order. Never blocks."""
        with self._lock:
            if self._is_signalled and self._fd >= 0:
                os.eventfd_read(self._fd)
                self._is_signalled = False
            items, self._items = self._items, []
            return items

    def close(self) -> None:
        """Close the file descriptor; later deliveries are dropped."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _signal(self) -> None:
        if not self._is_signalled:
            os.eventfd_write(self._fd, 1)
            self._is_signalled = True


class Lease(Protocol):
    """A promise to be alive, which must be renewed.

    L1. `keep_alive` asks for a renewal to `ttl_s` from now and does not wait for the answer.
    L2. `expires_at_s()` is a time on this node's monotonic clock, before which the store cannot have dropped the lease
        on its own: it counts from the *sending* of the last renewal that was answered. +inf while the lease was never
        granted or cannot expire, -inf once it is known to be lost or revoked.
    L3. When the lease expires or is revoked, every key last written under it is deleted, in one revision.
    L4. A lost lease never comes back: later writes under it fail with LeaseLostError and change nothing.
    """

    @property
    def ttl_s(self) -> float: ...

    def keep_alive(self) -> None: ...

    def expires_at_s(self) -> float: ...

    def revoke(self) -> Future[None]: ...


class Watch(Protocol):
    """A running watch."""

    def close(self) -> None:
        """End the watch. Nothing is delivered after this returned."""
        ...


class Store(Protocol):
    """What a store promises. The contract tests carry the same numbers.

    P1. No method blocks. A write's future completes when the store has accepted or refused it; it fails with StoreError
        after the store's own deadline and back-off (`retryable` tells whether asking again can help: callers do so
        without a pause of their own).
    P2. `create` writes only if the key does not exist: of any number of concurrent creators exactly one gets True.
    P3. `put` writes unconditionally; its lease replaces the key's previous lease, None detaches the key from it.
    P4. `delete` of a missing key succeeds and makes no event.
    P5. The writes of one caller take effect in the order of the calls.
    P6. A watch delivers first a Snapshot, then every later change under the prefix exactly once, in the order of
        revisions, the caller's own changes included; none is lost between snapshot and first event. When the store
        cannot give the changes in between (after an outage), it delivers a new Snapshot.
    P7. A revision only grows; `created_revision` changes exactly when the key had not existed before.
    P8. Values come back as they were written: JSON objects, never pickled, never mutable through the caller's copy. One
        that is not a JSON object fails with StoreError and changes nothing.
    P9. With `without`, a watch need not tell of the keys under its prefix that begin so, but for the one named `but`;
        its Snapshots say whether it leaves them out. Changes of different keys may then overtake each other.
    """

    def create(self, key: str, value: Value, *, lease: Lease | None = None) -> Future[bool]: ...

    def put(self, key: str, value: Value, *, lease: Lease | None = None) -> Future[None]: ...

    def delete(self, key: str) -> Future[None]: ...

    def lease(self, ttl_s: float) -> Lease: ...

    def watch(self, prefix: str, inbox: Inbox, *, without: str = "", but: str = "") -> Watch: ...
