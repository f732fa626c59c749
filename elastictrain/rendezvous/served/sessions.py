"""What the server keeps of one client beyond a connection: which writes were done, and what it is to be told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from elastictrain.rendezvous.embedded import EmbeddedWatch
from elastictrain.rendezvous.served.past import event_to_json
from elastictrain.rendezvous.served.wire import Message, WireError
from elastictrain.rendezvous.store import KeyEvent, Snapshot, WatchItem

_MAX_ANSWERS = 4096
_EVENTS_PER_FRAME = 500


class Line(Protocol):
    """A connection to a client. `send` never blocks."""

    session: str

    def send(self, message: Message) -> None: ...

    def drop(self, reason: str) -> None: ...


class Feed:
    """Where a watch of the embedded store delivers: what has not been sent yet waits in the session."""

    def __init__(self, number: int, session: Session) -> None:
        self.number = number
        self._session = session

    def deliver(self, item: WatchItem) -> None:
        self._session.take(self.number, item)


class Session:
    """One client, over all its connections. Belongs to the server's thread."""

    def __init__(self, name: str, wants_flush: Callable[[Session], None]) -> None:
        self.name = name
        self.line: Line | None = None
        self.gone_since_s = 0.0
        self._wants_flush = wants_flush
        self._newest = 0
        self._answers: dict[int, Message] = {}
        self._watches: dict[int, EmbeddedWatch] = {}
        self._untold: deque[tuple[int, WatchItem]] = deque()

    # ---------------------------------------------------------------- writes

    def find_answer(self, number: int, acknowledged: int) -> tuple[bool, Message | None]:
        """Whether write `number` was seen before, and its answer if the client may not have got it.

        The client has all answers up to `acknowledged`. A write that was seen is never done again, not even one that
        the client gave up and that came late, on a connection of before.
        """
        for known in [one for one in self._answers if one <= acknowledged]:
            del self._answers[known]
        return number <= self._newest, self._answers.get(number)

    def keep_answer(self, number: int, answer: Message) -> None:
        """Note that write `number` is done. Raises WireError for a client that acknowledges nothing."""
        self._newest = number
        self._answers[number] = answer
        if len(self._answers) > _MAX_ANSWERS:
            raise WireError(f"more than {_MAX_ANSWERS} answers that were not acknowledged")

    # ---------------------------------------------------------------- watches

    def add_watch(self, number: int, watch: EmbeddedWatch) -> None:
        self._watches[number] = watch

    def end_watch(self, number: int) -> None:
        watch = self._watches.pop(number, None)
        if watch is not None:
            watch.close()

    def end_watches(self) -> None:
        """Forget what a connection was to be told: the next one begins with Snapshots."""
        for number in list(self._watches):
            self.end_watch(number)
        self._untold.clear()

    def take(self, number: int, item: WatchItem) -> None:
        if not self._untold:
            self._wants_flush(self)
        self._untold.append((number, item))

    def flush(self) -> None:
        """Send what is untold. A frame holds whole revisions, so that a client never knows half of one."""
        while self._untold and self.line is not None:
            number, item = self._untold.popleft()
            if isinstance(item, Snapshot):
                entries = [event_to_json(entry) for entry in item.entries]
                told: dict[str, Any] = {"op": "told", "watch": number, "at": item.revision, "entries": entries}
            elif isinstance(item, KeyEvent):
                told = {"op": "told", "watch": number, "events": self._batch(number, item)}
            else:
                continue  # the embedded store's watches do not fail
            self.line.send(told)

    def _batch(self, number: int, first: KeyEvent) -> list[list[Any]]:
        """Take the changes that follow `first` for the same watch."""
        events, newest = [event_to_json(first)], first.revision
        while self._untold:
            other, item = self._untold[0]
            if other != number or not isinstance(item, KeyEvent):
                break
            if item.revision != newest and len(events) >= _EVENTS_PER_FRAME:
                break
            self._untold.popleft()
            events.append(event_to_json(item))
            newest = item.revision
        return events
