"""A TCP relay between a client and a server that can lose what the server says, or everything."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator


class Relay:
    """Listens at `port` and passes bytes on to `target_port`; its own thread does the work."""

    def __init__(self, target_port: int, *, port: int = 0) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_out, self._wake_in = socket.socketpair()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._peers: dict[socket.socket, socket.socket] = {}
        self._clients: set[socket.socket] = set()
        self._is_cut = False
        self._is_closed = False
        self.loses_answers = False
        self.num_bytes_lost = 0
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def cut(self) -> None:
        """Break all connections; new ones are accepted."""
        self._is_cut = True
        self._wake_in.send(b"x")

    def close(self) -> None:
        """End everything. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake_in.send(b"x")
        self._thread.join()
        for end in (self._listener, self._wake_in, self._wake_out, self._selector):
            end.close()

    def _serve(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_out:
                    self._wake_out.recv(16)
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._peers:
                    self._pass_on(key.fileobj)
            if self._is_cut:
                self._is_cut = False
                for one in list(self._clients):
                    self._drop(one)
        for one in list(self._clients):
            self._drop(one)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._target_port))
        except OSError:
            client.close()
            return
        self._clients.add(client)
        for one, peer in ((client, server), (server, client)):
            self._peers[one] = peer
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> None:
        try:
            data = source.recv(65536)
            if data and source not in self._clients and self.loses_answers:
                self.num_bytes_lost += len(data)
            elif data:
                self._peers[source].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._drop(source)

    def _drop(self, one: socket.socket) -> None:
        for end in (one, self._peers[one]):
            self._selector.unregister(end)
            del self._peers[end]
            self._clients.discard(end)
            end.close()


@contextlib.contextmanager
def run_relay(target_port: int) -> Iterator[Relay]:
    relay = Relay(target_port)
    try:
        yield relay
    finally:
        relay.close()
