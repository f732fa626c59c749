"""The HTTP endpoint of an agent: /metrics for Prometheus and /healthz for probes.

One thread serves all clients with non-blocking sockets, so a client that is slow, silent or hostile costs one of
MAX_CONNECTIONS places until its deadline and keeps nobody waiting. Every answer ends its connection.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from elastictrain.errors import ConfigError

MAX_CONNECTIONS = 32
MAX_REQUEST_BYTES = 16_384
REQUEST_DEADLINE_S = 10.0
"""A client has this long to send its request, and as long again to take the answer; Prometheus itself waits 10 s."""

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_TEXT = "text/plain; charset=utf-8"

Health = Callable[[], str | None]
"""Asked at each /healthz, in the exporter's thread: None for 200, a sentence that says what is wrong for 503."""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    content_type: str = _TEXT

    def to_bytes(self, *, with_body: bool) -> bytes:
        allow = "Allow: GET, HEAD\r\n" if self.status == 405 else ""
        head = (
            f"HTTP/1.1 {self.status} {_REASONS[self.status]}\r\nContent-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\n{allow}Connection: close\r\n\r\n"
        )
        return head.encode() + (self.body if with_body else b"")


@dataclass(slots=True)
class _Connection:
    """One client: reads until `outgoing` is set, then writes it, then waits for the client to close."""

    sock: socket.socket
    deadline_s: float
    received: bytearray
    outgoing: memoryview | None = None


class Exporter:
    """A running endpoint. `port` is the real one; `close` is idempotent and leaves no socket and no thread."""

    def __init__(self, registry: CollectorRegistry, listener: socket.socket, health: Health) -> None:
        self.host: str = listener.getsockname()[0]
        self.port: int = listener.getsockname()[1]
        self._registry = registry
        self._health = health
        self._listener = listener
        self._closing = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}  # by file descriptor, oldest first
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="elastictrain-exporter", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving. Blocks until the thread has ended: milliseconds, or the scrape in progress."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake_writer.send(b"x")
        self._thread.join()
        # Not by the thread: it may see the flag and end before the byte above is sent.
        self._wake_reader.close()
        self._wake_writer.close()

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                for key, _ in self._selector.select(self._timeout_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif (connection := self._connections.get(key.fd)) is not None:
                        self._advance(connection)
                self._drop_late()
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            self._listener.close()

    def _timeout_s(self) -> float | None:
        first = min((connection.deadline_s for connection in self._connections.values()), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def _drop_late(self) -> None:
        now_s = time.monotonic()
        for connection in list(self._connections.values()):
            if now_s >= connection.deadline_s:
                self._drop(connection)

    def _accept(self) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            # The oldest has had the most time. A scraper sends its request at once and seldom is the oldest.
            self._drop(next(iter(self._connections.values())))
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client is gone again
        except OSError:
            # Out of descriptors or memory: the client stays in the queue, and without a pause this would spin.
            self._closing.wait(0.1)
            return
        sock.setblocking(False)
        self._connections[sock.fileno()] = _Connection(sock, time.monotonic() + REQUEST_DEADLINE_S, bytearray())
        self._selector.register(sock, selectors.EVENT_READ)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.sock.fileno(), None)
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _advance(self, connection: _Connection) -> None:
        try:
            if connection.outgoing is None:
                self._receive(connection)
            elif connection.outgoing:
                self._send(connection, connection.outgoing)
            elif not connection.sock.recv(4096):
                self._drop(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)  # reset by the client

    def _receive(self, connection: _Connection) -> None:
        data = connection.sock.recv(4096)
        if not data:
            self._drop(connection)
            return
        received = connection.received
        received += data
        if b"\r\n\r\n" in received or b"\n\n" in received:
            answer, is_head = self._answer(bytes(received))
        elif len(received) > MAX_REQUEST_BYTES:
            answer, is_head = _Answer(431, b"request too large\n"), False
        elif not _may_become_request(received):
            answer, is_head = _Answer(400, b"not an HTTP request\n"), False
        else:
            return
        received.clear()
        connection.deadline_s = time.monotonic() + REQUEST_DEADLINE_S
        self._selector.modify(connection.sock, selectors.EVENT_WRITE)
        connection.outgoing = memoryview(answer.to_bytes(with_body=not is_head))
        self._send(connection, connection.outgoing)

    def _send(self, connection: _Connection, outgoing: memoryview) -> None:
        connection.outgoing = outgoing[connection.sock.send(outgoing) :]
        if not connection.outgoing:
            # Closing at once would reset the connection if more of the request is under way, and the client would lose
            # the answer: say that nothing follows and let the client close.
            connection.sock.shutdown(socket.SHUT_WR)
            self._selector.modify(connection.sock, selectors.EVENT_READ)

    def _answer(self, request: bytes) -> tuple[_Answer, bool]:
        """The answer to a complete request head, and whether its body is to be left out."""
        lines = request.decode("latin-1").splitlines()
        words = lines[0].split(" ") if lines else []
        if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
            return _Answer(400, b"not an HTTP request\n"), False
        method, target = words[0], words[1].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _Answer(405, b"only GET and HEAD\n"), False
        accept = ",".join(
            value for name, _, value in (line.partition(":") for line in lines[1:]) if name.strip().lower() == "accept"
        )
        return self._page(target, accept), method == "HEAD"

    def _page(self, target: str, accept: str) -> _Answer:
        try:
            if target == "/metrics":
                encode, content_type = choose_encoder(accept)
                return _Answer(200, encode(self._registry), content_type)
            if target == "/healthz":
                problem = self._health()
                return _Answer(200, b"ok\n") if problem is None else _Answer(503, f"{problem}\n".encode())
        except Exception as error:  # a fault in one collector or in the health callback must not end the endpoint
            return _Answer(500, f"{type(error).__name__}: {error}\n".encode(errors="replace"))
        if target == "/":
            return _Answer(200, b"elastictrain: /metrics /healthz\n")
        return _Answer(404, b"not found: try /metrics or /healthz\n")


def _may_become_request(received: bytearray) -> bool:
    """Whether these first bytes can begin a request line: garbage is answered without waiting for more of it."""
    method = bytes(received[:16]).partition(b" ")[0]
    return method.isalpha() and method.isupper() and len(method) < 16


def start_exporter(
    registry: CollectorRegistry, host: str = "127.0.0.1", port: int = 0, *, health: Health = lambda: None
) -> Exporter:
    """Serve the registry on `host`; port 0 takes a free port. Returns once the port is open.

    Raises ConfigError where the port is taken or not allowed, or the host is none of this machine's addresses.
    """
    if not 0 <= port <= 65_535:
        raise ConfigError(f"--metrics-port {port} is no port: use 0 (any free one) to 65535", field="port", seen=port)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--metrics-host {host!r} is no address of this machine: {error}", field="host", seen=host
        ) from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(MAX_CONNECTIONS)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot serve metrics on port {port} of {host}: {error.strerror}: "
            "give another --metrics-port (0 takes a free one) or --metrics-host",
            field="port",
            seen=port,
        ) from None
    return Exporter(registry, listener, health)
