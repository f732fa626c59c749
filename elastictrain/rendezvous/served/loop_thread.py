"""A thread with an asyncio loop, for one side of the served store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs until `stop`. A daemon: a process that ends without closing its store must not hang."""

    def __init__(self, name: str) -> None:
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.loop = self._started.result()

    def post(self, action: Callable[[], object]) -> None:
        """Have the thread call `action`, behind all that was posted before. Any thread; not once stopped."""
        self.loop.call_soon_threadsafe(action)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `work` there and wait for its result. Raises TimeoutError. Not from the thread itself."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def stop(self) -> None:
        """End the loop and wait for the thread. Not from the thread itself."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        # Names are looked up by a blocking call: one thread, and only while a connection is made.
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{self._thread.name}-names")
        loop.set_default_executor(executor)
        try:
            loop.call_soon(self._started.set_result, loop)
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(asyncio.sleep(0))  # transports that were aborted take their leave
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
            loop.close()
