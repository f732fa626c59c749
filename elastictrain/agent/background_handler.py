"""A rendezvous that is served while torch's agent does something else for long.

That agent stops workers for up to 30 s and waits at its exit barrier for 300 s; the lease must be renewed meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousInfo

from elastictrain.clock import SystemClock
from elastictrain.errors import ConfigError
from elastictrain.rendezvous.driver import Driver
from elastictrain.rendezvous.handler import ElasticRendezvousHandler


class BackgroundHandler(RendezvousHandler):
    """Passes the agent's calls on to `handler`; they and the turns of the serving thread exclude each other.

    `close` is called at the end of `shutdown`.
    """

    def __init__(self, handler: ElasticRendezvousHandler, driver: Driver, close: Callable[[], None]) -> None:
        self._handler = handler
        self._driver = driver
        self._close = close
        self._lock = threading.RLock()
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="elastictrain-rendezvous", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        clock = SystemClock()
        with selectors.DefaultSelector() as selector:
            selector.register(self._stop_read, selectors.EVENT_READ)
            selector.register(self._driver, selectors.EVENT_READ)
            while True:
                with self._lock:
                    due_s = self._driver.next_deadline_s()
                ready = selector.select(None if due_s is None else max(0.0, due_s - clock.now_s()))
                if any(key.fileobj == self._stop_read for key, _ in ready):
                    return
                with self._lock:
                    if not self._handler.serve():
                        return

    def get_backend(self) -> str:
        return self._handler.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        with self._lock:
            return self._handler.next_rendezvous()

    def is_closed(self) -> bool:
        with self._lock:
            return self._handler.is_closed()

    def set_closed(self) -> None:
        with self._lock:
            self._handler.set_closed()

    def num_nodes_waiting(self) -> int:
        with self._lock:
            return self._handler.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def shutdown(self) -> bool:
        """End the run for all nodes, as torch's own backends do when an agent ends, and everything here. Idempotent."""
        if self._is_open:
            self._is_open = False
            os.write(self._stop_write, b"x")
            self._thread.join()
            os.close(self._stop_read)
            os.close(self._stop_write)
            with contextlib.suppress(RendezvousConnectionError, ConfigError):
                self._handler.set_closed()
            self._handler.shutdown()
            self._close()
        return True
