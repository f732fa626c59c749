"""The one thread of this process that talks to etcd: an asyncio loop that all stores share.

gRPC's own asyncio layer adds one thread that waits for the network; neither grows with stores, watches, leases or
trouble. The thread starts with the first store and ends with the last.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future, ThreadPoolExecutor

_DRAIN_ROUNDS = 200
_DRAIN_PAUSE_S = 0.01
_lock = threading.Lock()
_users = 0
_running: _Running | None = None


class _Running:
    """The thread while it runs."""

    def __init__(self) -> None:
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop: asyncio.Event | None = None
        # Daemon: a process that ends without closing its stores must not hang.
        self.thread = threading.Thread(target=self._run, name="elastictrain-etcd", daemon=True)
        self.thread.start()
        self.loop = self._started.result()

    def stop(self) -> None:
        if self._stop is not None:
            self.loop.call_soon_threadsafe(self._stop.set)
        self.thread.join()

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        # Names are looked up by a blocking call: one thread, and only while etcd is not found at the start.
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="elastictrain-etcd-names")
        loop.set_default_executor(executor)
        try:
            loop.run_until_complete(self._serve(loop))
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            loop.close()

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        self._stop = asyncio.Event()
        self._started.set_result(loop)
        await self._stop.wait()
        # gRPC's closed calls have tasks of their own, and after those its core still hands back what was under way. All
        # that must find the loop running: gRPC's poller and its descriptors stay for ever if anything is not taken.
        for number in range(_DRAIN_ROUNDS):
            if not (asyncio.all_tasks(loop) - {asyncio.current_task(loop)} or _is_grpc_polling()):
                break
            await asyncio.sleep(_DRAIN_PAUSE_S)
            if number % 10 == 1:
                gc.collect()  # channels hang in reference cycles


def _is_grpc_polling() -> bool:
    """Tell whether gRPC's poller runs: it ends with the last channel, and has no name but that of its function."""
    return any("_poll_wrapper" in thread.name for thread in threading.enumerate())


def acquire() -> asyncio.AbstractEventLoop:
    """Give the running loop, started if need be. Each call is paired with one of `release`. Any thread."""
    global _users, _running
    with _lock:
        if _running is None:
            _running = _Running()
        _users += 1
        return _running.loop


def release() -> None:
    """Give the loop back; the last one ends the thread and blocks until it has ended. Not from the loop itself."""
    global _users, _running
    with _lock:
        _users -= 1
        if _users == 0 and _running is not None:
            running, _running = _running, None
            running.stop()
