"""Whoever reaches the port of the served store: strangers, broken clients, and those who listen on the way."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from store_contract import answer
from store_server import CLOCK, LOCALHOST, ServerProcess, connect, run_server, serve
from waiting import wait_until

from elastictrain.errors import ConfigError
from elastictrain.rendezvous.secret import Secret
from elastictrain.rendezvous.served.handshake import Hello
from elastictrain.rendezvous.served.served_store import ServedStore
from elastictrain.rendezvous.served.wire import MAGIC, Reader, encode

SECRET = "the secret of the nodes"
HELLO = encode(Hello.make(None).to_json(), None)
DEEP = b"[" * 2000 + b"]" * 2000


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.fixture
def server() -> Iterator[Any]:
    running = serve()
    yield running
    running.close(linger_s=0.0)


@pytest.fixture
def store(server: Any) -> Iterator[ServedStore]:
    made = connect(server.port)
    yield made
    made.close()


@contextlib.contextmanager
def stranger(port: int) -> Iterator[socket.socket]:
    with socket.create_connection((LOCALHOST, port), timeout=20.0) as sock:
        yield sock


def is_ended(sock: socket.socket, timeout_s: float) -> bool:
    """The other side ends the connection within the time; what it says before is thrown away."""
    until_s = CLOCK.now_s() + timeout_s
    while (left_s := until_s - CLOCK.now_s()) > 0:
        if not select.select([sock], [], [], left_s)[0]:
            break
        try:
            if not sock.recv(65536):
                return True
        except ConnectionResetError:
            return True
    return False


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        random.Random(7).randbytes(3000),
        b"\n",
        MAGIC + b"\xff\xff\xff\xff",
        MAGIC + (1 << 20).to_bytes(4, "big") + bytes(1000),
        MAGIC + framed(b"no JSON"),
        MAGIC + framed(b"[1]"),
        MAGIC + framed(DEEP),
        MAGIC + framed(b'{"op":"hello","version":1,"nonce":"00","has_secret":false}'),
        MAGIC + framed(b'{"op":"hello","version":"x","nonce":7}'),
        MAGIC + framed(b'{"op":"open","session":"s","known":null}'),
        MAGIC + HELLO + framed(b'{"op":"write","number":1}'),
        MAGIC + HELLO + framed(b'{"op":"open","session":"","known":null}'),
        MAGIC + HELLO + framed(b'{"op":"open","session":[],"known":null}'),
        MAGIC + HELLO + framed(b'{"op":"open","session":"s","known":"x"}') + framed(b'{"op":"past","views":7}'),
        MAGIC + HELLO + framed(b'{"op":"open","session":"s","known":null}') + b"\x7f\xff\xff\xff",
        MAGIC + HELLO + framed(b'{"op":"open","session":"s","known":null}') + framed(b'{"op":"fly"}'),
        MAGIC + HELLO + framed(b'{"op":"open","session":"s","known":null}') + framed(b'{"op":"watch","watch":1e999}'),
        MAGIC
        + HELLO
        + framed(b'{"op":"open","session":"s","known":null}')
        + framed(b'{"op":"write","number":1,"acknowledged":0,"kind":"create","key":"k","lease":null,"value":7}'),
    ],
    ids=lambda data: hashlib.md5(data).hexdigest()[:6],
)
def test_stranger_is_dropped_at_once_when_it_says_something_else(server: Any, store: ServedStore, data: bytes) -> None:
    answer(store.put("/run/a", {"n": 0}))
    with stranger(server.port) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
        assert is_ended(sock, 4.0)
    answer(store.put("/run/a", {"n": 1}))
    assert answer(store.create("k", {})) is True, "nothing was written"


def test_slow_stranger_is_dropped_by_a_deadline(server: Any, store: ServedStore) -> None:
    """One that says nothing, one that greets byte by byte, and one that stays amid a frame when it was let in."""
    began_s = CLOCK.now_s()
    with stranger(server.port) as silent, stranger(server.port) as slow, stranger(server.port) as amid:
        amid.sendall(MAGIC + HELLO + framed(b'{"op":"open","session":"s","known":null}') + b"\x00\x00\x10\x00{")
        is_stopped = threading.Event()

        def drip() -> None:
            for byte in MAGIC + HELLO:
                with contextlib.suppress(OSError):
                    slow.send(bytes([byte]))
                if is_stopped.wait(0.2):
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert is_ended(silent, 12.0)
            assert is_ended(slow, 2.0)
            assert CLOCK.now_s() - began_s > 3.0
            answer(store.put("/run/a", {}))
            assert is_ended(amid, 12.0)
        finally:
            is_stopped.set()
            thread.join()


def test_store_serves_on_when_hundreds_of_strangers_hold_connections(server: Any, store: ServedStore) -> None:
    answer(store.put("/run/a", {}))
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(stranger(server.port)) for _ in range(300)]
        answer(store.put("/run/a", {"n": 1}))
        wait_until(lambda: len(os.listdir("/proc/self/fd")) - before - len(socks) <= 130, 4.0)
        other = connect(server.port)
        try:
            assert answer(other.create("/run/a", {})) is False
        finally:
            other.close()


def test_client_that_does_not_read_is_dropped_and_holds_nobody_up() -> None:
    with run_server(gather_s=0.0) as server:
        store = connect(server.port)
        try:
            answer(store.put("/run/a", {}))
            assert server.process is not None
            process = psutil.Process(server.process.pid)
            with stranger(server.port) as lazy:
                lazy.sendall(MAGIC + HELLO + framed(b'{"op":"open","session":"s","known":null}'))
                lazy.sendall(framed(b'{"op":"watch","watch":1,"prefix":"/"}'))
                wait_until(lambda: num_connections(process) == 2)
                before = process.memory_info().rss
                slowest_s = 0.0
                began_s = CLOCK.now_s()
                number = 0
                while num_connections(process) > 1 and CLOCK.now_s() < began_s + 30.0:
                    number += 1
                    sent_s = CLOCK.now_s()
                    answer(store.put("/run/big", {"n": number, "x": "x" * 500_000}))
                    slowest_s = max(slowest_s, CLOCK.now_s() - sent_s)
                assert num_connections(process) == 1
                assert number > 10
                assert slowest_s < 2.0
                assert process.memory_info().rss - before < 300e6
        finally:
            store.close()


def num_connections(process: psutil.Process) -> int:
    return sum(one.status == psutil.CONN_ESTABLISHED for one in process.net_connections("tcp"))


# ---------------------------------------------------------------- on the way


class Middle:
    """Sits between a client and the server, keeps what the client says, and may alter it, frame by frame."""

    def __init__(self, target_port: int, alter: Callable[[int, bytes], bytes] = lambda _, frame: frame) -> None:
        self._target_port = target_port
        self._alter = alter
        self._listener = socket.create_server((LOCALHOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.said: list[bytes] = []
        self.num_connections = 0
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((LOCALHOST, self._target_port))
                self.num_connections += 1
                self._socks += [client, server]
                for target, ends in ((self._up, (client, server)), (self._down, (server, client))):
                    self._threads.append(threading.Thread(target=target, args=ends))
                    self._threads[-1].start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        number = 0
        with contextlib.suppress(OSError), client.makefile("rb") as stream:
            frame = stream.read(len(MAGIC))
            while frame:
                self.said.append(frame)
                server.sendall(self._alter(number, frame))
                number += 1
                head = stream.read(4)
                frame = head and head + stream.read(int.from_bytes(head, "big"))
        end(server)

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
        end(client)

    def close(self) -> None:
        end(self._listener)
        for sock in self._socks:
            end(sock)
        for thread in self._threads:
            thread.join(5)
        for sock in (self._listener, *self._socks):
            sock.close()


def end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def guarded() -> Iterator[ServerProcess]:
    with run_server(gather_s=0.0, secret=SECRET) as running:
        yield running


@pytest.fixture
def direct(guarded: ServerProcess) -> Iterator[ServedStore]:
    made = connect(guarded.port, secret=SECRET)
    yield made
    made.close()


def test_nothing_is_replayed_when_a_session_was_overheard(guarded: ServerProcess, direct: ServedStore) -> None:
    middle = Middle(guarded.port)
    try:
        store = connect(middle.port, secret=SECRET)
        assert answer(store.create("/run/a", {"by": "store"})) is True
        store.close()
    finally:
        middle.close()
    said = b"".join(middle.said)
    assert SECRET.encode() not in said
    answer(direct.delete("/run/a"))
    with stranger(guarded.port) as sock:
        sock.sendall(said)
        assert is_ended(sock, 4.0)
    assert answer(direct.create("/run/a", {"by": "direct"})) is True


# The frames of a client: magic, hello, proof, open, then its requests.
_FIRST_REQUEST = 4
FORGED = framed(
    json.dumps(
        {"op": "write", "number": 9, "acknowledged": 0, "kind": "put", "key": "/run/x", "lease": None, "value": {}}
    ).encode()
    + bytes(32)
)


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame + FORGED,
        lambda frame: FORGED + frame,
        lambda frame: frame + frame,
        lambda frame: b"",
        lambda frame: frame.replace(b'"/run/a"', b'"/run/x"'),
        lambda frame: frame[:-1] + bytes([frame[-1] ^ 1]),
        lambda frame: framed(frame[4:-32]),
    ],
    ids=["put in behind", "put in before", "repeated", "left out", "changed", "mark changed", "mark left out"],
)
def test_connection_ends_and_the_next_one_does_the_work_when_frames_are_tampered_with(
    guarded: ServerProcess, direct: ServedStore, change: Callable[[bytes], bytes]
) -> None:
    is_over = threading.Event()

    def alter(number: int, frame: bytes) -> bytes:
        if number == _FIRST_REQUEST and not is_over.is_set():
            is_over.set()
            return change(frame)
        return frame

    middle = Middle(guarded.port, alter)
    store = connect(middle.port, secret=SECRET, read_timeout_s=1.0)
    try:
        first, second = store.put("/run/a", {"n": 1}), store.create("/run/b", {})
        assert first.result(10) is None
        assert second.result(10) is True
        assert is_over.is_set()
        assert middle.num_connections == 2, "the altered connection was given up"
        assert answer(direct.create("/run/x", {})) is True, "nobody else's write was done"
    finally:
        store.close()
        middle.close()


def test_client_refuses_a_server_that_cannot_prove_the_secret() -> None:
    """A server that lets the client in: it may not know the secret, and would learn what the nodes say."""
    listener = socket.create_server((LOCALHOST, 0))
    heard: list[dict[str, Any]] = []

    def pretend() -> None:
        sock, _ = listener.accept()
        with sock:
            reader = Reader()
            sock.sendall(MAGIC + encode(Hello.make(Secret("x")).to_json(), None))
            with contextlib.suppress(OSError):
                while data := sock.recv(65536):
                    reader.feed(data)
                    while message := reader.next():
                        heard.append(message)
                        if message["op"] == "proof":
                            sock.sendall(encode({"op": "proof", "proof": message["proof"]}, None))

    thread = threading.Thread(target=pretend)
    thread.start()
    store = connect(listener.getsockname()[1], secret=SECRET)
    try:
        error = store.put("/run/a", {"words": "of the run"}).exception(5)
        assert isinstance(error, ConfigError)
        assert "the secret of this node is not that of the store" in str(error)
    finally:
        store.close()
        thread.join(5)
        listener.close()
    assert [message["op"] for message in heard] == ["hello", "proof"]
