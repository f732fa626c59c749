"""One connection of a client to the served store: found, greeted, proven. Runs on the client's thread."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from elastictrain.config import RDZV_SECRET_VARIABLE
from elastictrain.errors import ConfigError, StoreError
from elastictrain.rendezvous.endpoint import Endpoint
from elastictrain.rendezvous.secret import Secret
from elastictrain.rendezvous.served.handshake import Handshake, Hello
from elastictrain.rendezvous.served.server_line import keep_alive
from elastictrain.rendezvous.served.settings import CONF_OPTION, ENDPOINT_OPTION, SECRET_HINT
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

_READ_BYTES = 1 << 16
_SECRET_FIELD = f"{CONF_OPTION} secret_file"


class LinkError(StoreError):
    """The connection did not come about, or broke; another one may work. `is_refused`: nobody listens there."""

    def __init__(self, message: str, *, is_refused: bool = False) -> None:
        super().__init__(message, retryable=True)
        self.is_refused = is_refused


class Link:
    """A connection whose other side is the store. Made by `open_link`; `close` it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames = Reader()
        self._seal: Seal | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._broken = "it closed the connection"

    def write(self, message: Message) -> None:
        """Hand a message to the kernel, or keep it until the kernel takes it. Does not block."""
        self._writer.write(encode(message, self._seal))

    async def read(self) -> dict[str, Any]:
        """The next message. Raises LinkError when the connection is over, WireError for what is none."""
        while True:
            message = self._frames.next()
            if message is not None:
                return message
            try:
                data = await self._reader.read(_READ_BYTES)
            except OSError as error:
                raise LinkError(_reason(error)) from None
            if not data:
                raise LinkError(self._broken)
            self._frames.feed(data)

    def expect(self, seconds: float) -> None:
        """Give the connection up unless something is read within `seconds`; an earlier limit stays."""
        loop = asyncio.get_running_loop()
        if self._patience is not None and self._patience.when() <= loop.time() + seconds:
            return
        self.heard()
        self._patience = loop.call_later(seconds, self._lose_patience, seconds)

    def _lose_patience(self, seconds: float) -> None:
        self._broken = f"no answer within {seconds:g} s"
        self.close()

    def heard(self) -> None:
        """Something was read: what was expected may have been that."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def close(self) -> None:
        """End the connection. Idempotent."""
        self.heard()
        self._writer.transport.abort()

    # ---------------------------------------------------------------- the greeting

    async def greet(self, secret: Secret | None, where: str) -> None:
        """Prove both sides. Raises ConfigError for what the user must change, LinkError or WireError."""
        hello = Hello.make(secret)
        self._writer.write(MAGIC)
        self.write(hello.to_json())
        answer = Hello.from_json(await self.read())
        if answer.version != PROTOCOL_VERSION:
            raise ConfigError(
                f"the store at {where}: expected its protocol to be {PROTOCOL_VERSION}, seen {answer.version}; "
                "run the same elastictrain on every node"
            )
        if answer.has_secret and secret is None:
            raise ConfigError(
                f"the store at {where} asks for a secret, and this node has none; {SECRET_HINT}",
                field=RDZV_SECRET_VARIABLE,
            )
        if secret is not None and not answer.has_secret:
            raise ConfigError(
                f"this node has a secret, and the store at {where} was started without one; {SECRET_HINT}, also on the "
                "one that serves the store",
                field=RDZV_SECRET_VARIABLE,
            )
        if secret is not None:
            handshake = Handshake(secret, hello, answer)
            self.write({"op": "proof", "proof": handshake.proof_of("client")})
            if not handshake.is_proven("server", (await self.read()).get("proof")):
                raise ConfigError(
                    f"the secret of this node is not that of the store at {where}; {SECRET_HINT}",
                    field=RDZV_SECRET_VARIABLE,
                )
            self._seal, self._frames.seal = handshake.seal_of("client"), handshake.seal_of("server")
        self._frames.max_bytes = MAX_FRAME_BYTES


async def open_link(endpoint: Endpoint, secret: Secret | None, *, timeout_s: float) -> Link:
    """Connect and greet. Raises LinkError where another attempt may work, ConfigError where it cannot."""
    link: Link | None = None
    try:
        async with asyncio.timeout(timeout_s):
            link = Link(*await _connect(endpoint))
            await link.greet(secret, endpoint.address)
            return link
    except TimeoutError:
        error: Exception = LinkError(f"no answer within {timeout_s:g} s")
    except WireError as found:
        error = ConfigError(
            f"{ENDPOINT_OPTION} {endpoint.address}: expected elastictrain's store, seen {found}; give the node that "
            "serves the store, and a port that nothing else uses",
            field=ENDPOINT_OPTION,
        )
    except (LinkError, ConfigError) as found:
        error = found
    except BaseException:
        if link is not None:
            link.close()
        raise
    if link is not None:
        link.close()
    raise error


async def _connect(endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address of the host that answers. Raises LinkError."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError:
        raise LinkError("the name is not known (DNS)") from None
    problems: list[OSError] = []
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            keep_alive(sock)
            await loop.sock_connect(sock, address)
            return await asyncio.open_connection(sock=sock)
        except OSError as error:
            problems.append(error)
            sock.close()
        except BaseException:
            sock.close()
            raise
    is_refused = all(isinstance(one, ConnectionRefusedError) for one in problems)
    raise LinkError(_reason(problems[0]), is_refused=is_refused)


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return os.strerror(error.errno) if error.errno else "the connection was reset"
