"""One connection at the server: from the first byte of somebody unknown to the requests of a client.

Nobody who connects can hurt: what is no greeting is dropped at its first wrong byte, whoever does not prove himself in
time or stays amid a frame is dropped, whoever does not read what he is told is dropped, and none of it makes anybody
else wait.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any, Final

from elastictrain.rendezvous.served.handshake import Handshake, Hello
from elastictrain.rendezvous.served.past import Offer
from elastictrain.rendezvous.served.wire import (
    MAGIC,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    Message,
    Reader,
    Seal,
    WireError,
    encode,
)

if TYPE_CHECKING:
    from elastictrain.rendezvous.served.server import StoreServer

GREETING_S: Final = 5.0
"""How long somebody may take from the connection to the end of the handshake."""
FRAME_S: Final = 10.0
"""How long a frame may take from its first byte to its last."""
READING_S: Final = 10.0
"""How long a client may leave unread what it is told."""
_MAX_UNREAD_BYTES: Final = 2 * MAX_FRAME_BYTES
_KEEP_ALIVE: Final = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
_MAX_NAME: Final = 128


def keep_alive(sock: socket.socket) -> None:
    """Have the kernel notice within some ten seconds that the other machine is gone."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


class ServerLine(asyncio.Protocol):
    """See the module. `session` is empty until the client has proven itself and said who it is."""

    def __init__(self, server: StoreServer) -> None:
        self.session = ""
        self.peer = "?"
        self._server = server
        self._reader = Reader()
        self._seal: Seal | None = None
        self._hello = Hello.make(server.secret)
        self._handshake: Handshake | None = None
        self._step = self._take_hello
        self._transport: asyncio.Transport | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}

    # ---------------------------------------------------------------- for the service

    def send(self, message: Message) -> None:
        """Hand a message to the kernel, as far as it takes it; the rest waits here, within bounds."""
        if self._transport is None or self._transport.is_closing():
            return
        try:
            self._transport.write(encode(message, self._seal))
        except WireError as error:
            self.drop(str(error))
            return
        if self._transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            self.abort("it does not read what it is told")

    def drop(self, reason: str) -> None:
        """End the connection behind what was sent."""
        if self._transport is not None and not self._transport.is_closing():
            self._server.note_drop(self, reason)
            self._transport.close()
            # A close waits for the other side to read.
            self._start("reading", READING_S, "it does not read what it is told")

    def abort(self, reason: str) -> None:
        """End the connection at once."""
        if self._transport is not None:
            if not self._transport.is_closing():
                self._server.note_drop(self, reason)
            self._transport.abort()

    # ---------------------------------------------------------------- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = str(transport.get_extra_info("peername", ("?",))[0])
        keep_alive(transport.get_extra_info("socket"))
        self._start("greeting", GREETING_S, f"no greeting within {GREETING_S:g} s")
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while self._transport is not None and not self._transport.is_closing():
                message = self._reader.next()
                if message is None:
                    break
                self._stop("frame")
                self._step(message)
        except WireError as error:
            self.abort(str(error))
            return
        except Exception as error:  # whatever a client sends must end with its own connection
            self.abort(f"a request that cannot be: {error!r}")
            return
        if self._reader.is_amid_frame and "frame" not in self._timers:
            self._start("frame", FRAME_S, f"a frame that was not whole within {FRAME_S:g} s")

    def pause_writing(self) -> None:
        self._start("reading", READING_S, "it does not read what it is told")

    def resume_writing(self) -> None:
        self._stop("reading")

    def connection_lost(self, error: Exception | None) -> None:
        for name in list(self._timers):
            self._stop(name)
        self._transport = None
        self._server.remove(self)

    # ---------------------------------------------------------------- the steps of a greeting

    def _take_hello(self, message: dict[str, Any]) -> None:
        client = Hello.from_json(message)
        assert self._transport is not None
        self._transport.write(MAGIC)
        self.send(self._hello.to_json())
        if client.version != PROTOCOL_VERSION or client.has_secret != self._hello.has_secret:
            # The client reads it from the hello, and says so to its user.
            self.drop("another version" if client.version != PROTOCOL_VERSION else _one_sided(client))
        elif self._server.secret is None:
            self._expect_client()
        else:
            self._handshake = Handshake(self._server.secret, client, self._hello)
            self._step = self._take_proof

    def _take_proof(self, message: dict[str, Any]) -> None:
        handshake = self._handshake
        assert handshake is not None
        if not handshake.is_proven("client", message.get("proof")):
            self.send({"op": "refused", "reason": "secret"})
            self.drop("its secret is another one")
            return
        self.send({"op": "proof", "proof": handshake.proof_of("server")})
        self._seal, self._reader.seal = handshake.seal_of("server"), handshake.seal_of("client")
        self._expect_client()

    def _expect_client(self) -> None:
        self._step = self._take_open

    def _take_open(self, message: dict[str, Any]) -> None:
        session, known = message.get("session"), message.get("known")
        if message.get("op") != "open" or not isinstance(session, str) or not 0 < len(session) <= _MAX_NAME:
            raise WireError("a first request that opens no session")
        self._stop("greeting")
        self._server.prove(self)
        self._reader.max_bytes = MAX_FRAME_BYTES
        self.session = session
        self._step = self._take_past if known is not None and known != self._server.service.id else self._take_request
        self._server.service.open(self, known)

    def _take_past(self, message: dict[str, Any]) -> None:
        self._step = self._take_request
        self._server.service.admit(self, Offer.from_json(self.session, message))

    def _take_request(self, message: dict[str, Any]) -> None:
        self._server.service.take(self, message)

    # ---------------------------------------------------------------- deadlines

    def _start(self, name: str, seconds: float, reason: str) -> None:
        self._stop(name)
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, self.abort, reason)

    def _stop(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


def _one_sided(client: Hello) -> str:
    return "it has a secret, this store has none" if client.has_secret else "it has no secret, this store has one"
