"""The server of the served store: a thread in the agent of one node, which the agents of all nodes connect to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Final

from elastictrain.clock import Clock, Deadline
from elastictrain.rendezvous.secret import Secret
from elastictrain.rendezvous.served.loop_thread import LoopThread
from elastictrain.rendezvous.served.server_line import ServerLine
from elastictrain.rendezvous.served.service import Service

GATHER_S: Final = 3.0
"""How long a new server waits for those who knew the one before it; they try to connect every second."""
LINGER_S: Final = 10.0
"""How long a server stays, at most, for others when its own node has ended."""
LINGER_QUIET_S: Final = 2.0
"""It goes before that when nobody has written anything for so long."""
_MAX_LINES: Final = 2048
_MAX_STRANGERS: Final = 128
_SAY_EVERY_S: Final = 60.0
_MARGIN_S: Final = 10.0
_BACKLOG: Final = 512


class StoreServer:
    """Serves from when it is made until `close`.

    `listeners` are bound and listen; they belong to the server. `host` is the session of this node's own client.
    `report` is called on the server's thread with lines for people. Clients are served after `gather_s`, or up to
    `patience_s` where that is longer, unless `hurry` is called or one comes back that knows the store of before.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        *,
        secret: Secret | None,
        host: str,
        clock: Clock,
        report: Callable[[str], None],
        gather_s: float = GATHER_S,
        patience_s: float = 0.0,
    ) -> None:
        self.secret = secret
        self._clock, self._report = clock, report
        self._lines: set[ServerLine] = set()
        self._strangers: dict[ServerLine, None] = {}
        self._said_s: dict[str, float] = {}
        self._changed = asyncio.Event()
        self._thread = LoopThread("elastictrain-store-server")
        self._is_closed = False
        loop = self._thread.loop

        async def start() -> list[asyncio.Server]:
            self.service = Service(loop, clock, host=host, gather_s=gather_s, patience_s=patience_s, report=report)
            return [await loop.create_server(lambda: ServerLine(self), sock=one, backlog=_BACKLOG) for one in listeners]

        self._servers = self._thread.run(start(), _MARGIN_S)

    def hurry(self) -> None:
        """Nobody has to be waited for longer than `gather_s` from now. Any thread."""
        self._thread.post(self.service.hurry)

    def close(self, *, linger_s: float = LINGER_S, quiet_s: float = LINGER_QUIET_S) -> None:
        """Serve on until the others have gone or are quiet, at most `linger_s`; then end. Blocks. Idempotent.

        What this node wrote last, its own departure, is only of use when the others hear of it and can answer it.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(TimeoutError):
            self._thread.run(self._stop(linger_s, quiet_s), linger_s + _MARGIN_S)
        self._thread.stop()

    # ---------------------------------------------------------------- for the connections; the server's thread

    def add(self, line: ServerLine) -> None:
        self._lines.add(line)
        self._strangers[line] = None
        if len(self._lines) > _MAX_LINES:
            line.abort(f"more than {_MAX_LINES} connections")
        elif len(self._strangers) > _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]  # the end of its connection comes later, and others may come before it
            oldest.abort(f"more than {_MAX_STRANGERS} connections that have proven nothing")

    def prove(self, line: ServerLine) -> None:
        self._strangers.pop(line, None)

    def remove(self, line: ServerLine) -> None:
        self._lines.discard(line)
        self._strangers.pop(line, None)
        self.service.leave(line)
        self._changed.set()

    def note_drop(self, line: ServerLine, reason: str) -> None:
        """Tell of a connection that is ended, each reason rarely: whoever can connect must not fill a log."""
        now_s = self._clock.now_s()
        kind = reason.partition(" ")[0] if not line.session else reason
        if len(self._said_s) < _MAX_STRANGERS and now_s >= self._said_s.get(kind, -_SAY_EVERY_S) + _SAY_EVERY_S:
            self._said_s[kind] = now_s
            self._report(f"store: a connection from {line.peer} was ended: {reason}")

    async def _stop(self, linger_s: float, quiet_s: float) -> None:
        await self._linger(Deadline.after("linger time", linger_s, self._clock), quiet_s)
        self.service.close()
        for server in self._servers:
            server.close()
        for line in list(self._lines):
            line.drop("the server ends")
        await asyncio.sleep(0)
        for line in list(self._lines):
            line.abort("the server ends")
        while self._lines:
            self._changed.clear()
            await self._changed.wait()

    async def _linger(self, deadline: Deadline, quiet_s: float) -> None:
        while self.service.num_others and not deadline.has_passed(self._clock):
            quiet_at_s = self.service.last_write_s + quiet_s
            left_s = min(quiet_at_s - self._clock.now_s(), deadline.left_s(self._clock))
            if left_s <= 0:
                return
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s)
