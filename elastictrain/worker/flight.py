"""Collectives under way, whose waiters can be freed although the transport never finishes them.

gloo can lose the wake-up of a receive whose connection closes in the middle of a message: its thread then waits for the
group's time-out, half an hour, although every connection is closed. So nobody here waits for gloo's own future, but for
one that `give_up` can end. The thread stays where it is; `destruction` keeps what it uses.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

Pending = torch.futures.Future[Any]


class Flights:
    """The collectives of the present group. `give_up` may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[tuple[dist.Work, Pending]] = []
        self._is_ending = self._is_given_up = False

    def track(self, work: dist.Work) -> Pending:
        """A future of the collective's first tensor; it fails with RuntimeError when the collective does."""
        if work.is_completed():
            return work.get_future().then(_first)
        landing: Pending = torch.futures.Future()
        with self._lock:
            # One that was given up counts as long as the transport works on it.
            self._open = [(flying, future) for flying, future in self._open if not flying.is_completed()]
            self._open.append((work, landing))
        outcome: Pending = landing.then(_first)
        work.get_future().then(lambda done: self._land(landing, done))
        if self._is_given_up:  # it began when the connections were closed already
            self.give_up()
        return outcome

    def has_open(self) -> bool:
        """Whether a collective is under way."""
        with self._lock:
            return any(not work.is_completed() for work, _ in self._open)

    def _land(self, landing: Pending, done: Pending) -> None:
        try:
            value: Any = done.value()
        except RuntimeError as error:
            value = error
        self._settle(landing, value)

    def _settle(self, landing: Pending, value: Any) -> None:
        with self._lock:
            if not landing.done():
                landing.set_result(value)

    def begin_ending(self) -> bool:
        """The connections are closed; True at the first call.

        `give_up` is to follow even when nothing flies: the main thread may be about to begin a collective.
        """
        with self._lock:
            is_first, self._is_ending = not self._is_ending, True
            return is_first

    def give_up(self) -> None:
        """Fail every collective that has not ended by itself, and those that still begin."""
        with self._lock:
            self._is_given_up = True
            for _, landing in self._open:
                self._settle(landing, RuntimeError("given up: the generation is broken"))

    def take_works(self) -> list[dist.Work]:
        """Forget all collectives; those that the transport has not finished are returned."""
        with self._lock:
            works = [work for work, _ in self._open if not work.is_completed()]
            self._open = []
            return works


def _first(future: Pending) -> torch.Tensor:
    """The first tensor of a collective's result. Raises what the collective failed with."""
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    while isinstance(value, list | tuple):
        value = value[0]
    tensor: torch.Tensor = value
    return tensor
