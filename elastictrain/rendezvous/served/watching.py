"""A watch of the served store: it tells its owner, and remembers what it told, in case the store loses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastictrain.rendezvous.served.past import View, event_from_json
from elastictrain.rendezvous.store import Inbox, KeyEvent, Snapshot, WatchItem


class ServedWatch:
    """A watch of a ServedStore. `close` may be called from any thread; the rest belongs to the client's."""

    def __init__(self, number: int, prefix: str, inbox: Inbox, forget: Callable[[ServedWatch], None]) -> None:
        self.number, self.prefix = number, prefix
        self._inbox = inbox
        self._forget = forget
        self._lock = threading.Lock()
        self._is_closed = False
        self._revision = 0
        self._known: dict[str, KeyEvent] | None = None

    def close(self) -> None:
        """End the watch. Nothing is delivered after this returned."""
        with self._lock:
            self._is_closed = True
        self._forget(self)

    def wake(self) -> None:
        self._inbox.wake()

    def deliver(self, item: WatchItem) -> None:
        with self._lock:
            if not self._is_closed:
                self._inbox.deliver(item)

    def take(self, message: dict[str, Any]) -> None:
        """Tell what the server tells. Raises WireError, KeyError, TypeError or ValueError for what is no such thing."""
        if "entries" in message:
            entries = [event_from_json(one) for one in message["entries"]]
            self._known = {entry.key: entry for entry in entries}
            self._revision = int(message["at"])
            self.deliver(Snapshot(revision=self._revision, entries=tuple(map(_unwrap, entries))))
            return
        for event in map(event_from_json, message["events"]):
            known = self._known
            if known is None:
                return
            if event.value is None:
                known.pop(event.key, None)
            else:
                known[event.key] = event
            self._revision = max(self._revision, event.revision)
            self.deliver(_unwrap(event))

    @property
    def view(self) -> View | None:
        """What is known, None before the first Snapshot."""
        if self._known is None:
            return None
        return View(self.prefix, self._revision, tuple(self._known.values()))


def _unwrap(event: KeyEvent) -> KeyEvent:
    return event if event.value is None else replace(event, value=event.value["value"])
