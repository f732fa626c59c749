"""Is the agent behind an address dead? One attempt to connect, beside the loop that asks."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import threading
from collections.abc import Callable

from elastictrain.clock import Clock, Deadline


class HostProbe:
    """Connects to `host`:`port` once and calls `on_gone` if the machine says that nobody listens there.

    An agent listens as long as it lives, and its workers end with it, so a refusal proves that they are dead. Silence,
    or an answer, proves nothing: then nothing is called. The kernel repeats the request until `timeout_s` is over, so a
    machine that comes back without the agent still tells. `on_gone` is called from a thread of its own.
    """

    def __init__(self, host: str, port: int, *, timeout_s: float, clock: Clock, on_gone: Callable[[], None]) -> None:
        self._address = (host, port)
        self._clock = clock
        self._deadline = Deadline.after("outage time-out", timeout_s, clock)
        self._on_gone = on_gone
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="host-probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the attempt; `on_gone` is not called after this returned. Blocks while a name is looked up."""
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        os.close(self._stop_fd)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a name that is not known proves nothing
            for family, kind, protocol, _, address in socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM):
                with socket.socket(family, kind, protocol) as sock:
                    if self._is_refused(sock, address):
                        self._on_gone()
                        return

    def _is_refused(self, sock: socket.socket, address: tuple[object, ...]) -> bool:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                sock.connect(address)
            except ConnectionRefusedError:
                return True
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_WRITE)
            selector.register(self._stop_fd, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(self._deadline.left_s(self._clock))}
        return ready == {sock} and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED
