"""The writes of one client, in their order: each is sent until it is answered, and done once.

Every write has a number. The server keeps what it answered until the client says that it has it, so a write whose
answer was lost is answered again and not done again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from elastictrain.clock import Clock
from elastictrain.errors import ConfigError, StoreError
from elastictrain.rendezvous.served.link import Link

_MAX_UNDER_WAY = 512


@dataclass(slots=True)
class _Request:
    message: dict[str, Any]
    what: str
    future: Future[Any]
    take: Callable[[Any, float], Any]
    lost: Callable[[], StoreError]
    first_sent_s: float | None = None
    is_sent: bool = False
    limit: asyncio.TimerHandle | None = None


class Requests:
    """The queue. Belongs to the client's thread; futures are completed there."""

    def __init__(self, clock: Clock, *, timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self._number = 0
        self._queue: dict[int, _Request] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def add(
        self,
        message: dict[str, Any],
        what: str,
        future: Future[Any],
        *,
        take: Callable[[Any, float], Any],
        lost: Callable[[], StoreError],
        limit_s: float | None,
    ) -> None:
        """Queue a write behind those before it.

        `take` makes the future's value of the server's result and of when the write was first sent; `lost` the error
        of one whose lease is over. After `limit_s` it fails, retryably.
        """
        if not future.set_running_or_notify_cancel():
            return
        self._number += 1
        request = _Request(message, what, future, take, lost)
        self._queue[self._number] = request
        self._empty.clear()
        if limit_s is not None:
            request.limit = asyncio.get_running_loop().call_later(limit_s, self._expire, self._number, limit_s)

    def connection_made(self) -> None:
        """A new connection: everything that is not answered is sent again."""
        for request in self._queue.values():
            request.is_sent = False

    def send(self, link: Link) -> None:
        """Send what has not been sent over this connection, as far as the server is to keep answers."""
        acknowledged = next(iter(self._queue), self._number + 1) - 1
        for place, (number, request) in enumerate(self._queue.items()):
            if place >= _MAX_UNDER_WAY:
                break
            if not request.is_sent:
                request.is_sent = True
                if request.first_sent_s is None:
                    request.first_sent_s = self._clock.now_s()
                link.write({"op": "write", "number": number, "acknowledged": acknowledged, **request.message})
        if self._queue:
            link.expect(self._timeout_s)

    def take_answer(self, message: dict[str, Any]) -> None:
        """Complete the write that is answered; one that was given up meanwhile is none any more."""
        request = self._remove(int(message["number"]))
        if request is None:
            return
        error = message.get("error")
        if error is not None:
            failure = request.lost() if error == "lease" else StoreError(f"{request.what}: {error}", retryable=False)
            request.future.set_exception(failure)
        else:
            request.future.set_result(request.take(message["result"], request.first_sent_s or self._clock.now_s()))

    def fail_all(self, error: StoreError | ConfigError) -> None:
        for number in list(self._queue):
            request = self._remove(number)
            if request is not None:
                request.future.set_exception(error)

    async def wait_empty(self) -> None:
        """Wait until all that was added is done."""
        await self._empty.wait()

    def _expire(self, number: int, limit_s: float) -> None:
        request = self._remove(number)
        if request is not None:
            request.future.set_exception(
                StoreError(f"limit of {limit_s:g} s for the {request.what} is over: no answer", retryable=True)
            )

    def _remove(self, number: int) -> _Request | None:
        request = self._queue.pop(number, None)
        if request is not None and request.limit is not None:
            request.limit.cancel()
        if not self._queue:
            self._empty.set()
        return request
