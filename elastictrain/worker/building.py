"""Making a process group without waiting for members that are gone.

torch's constructors connect to the other members, and only their own time-outs end that. A connection that is being
made to a machine that has vanished survives shutdown(2), and gloo waits for one that is to come in, with no socket that
could be shut, for five times its time-out. So each constructor runs in a thread of its own. When the generation breaks,
nobody waits for that thread: it ends by the time-outs, and what it has made by then is dropped.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Build:
    """One attempt to make a group. `before`: the sockets (inodes) that were there when it began."""

    def __init__(self, before: set[int]) -> None:
        self.before = before
        self._abandoned: futures.Future[None] = futures.Future()

    def abandon(self) -> None:
        """Free the thread that waits in `make`, now and ever after. Any thread; call it once."""
        if not self._abandoned.done():
            self._abandoned.set_result(None)

    def make(self, construct: Callable[[], T]) -> T:
        """What `construct()` gives; blocks. Raises what it raises, and RuntimeError when the build is abandoned."""
        outcome: futures.Future[T] = futures.Future()

        def run() -> None:
            try:
                outcome.set_result(construct())
            except BaseException as error:  # for the thread that waits, or for nobody
                outcome.set_exception(error.with_traceback(None))  # its frames would keep the store alive

        threading.Thread(target=run, name="group-build", daemon=True).start()
        ends: tuple[futures.Future[Any], ...] = (outcome, self._abandoned)
        futures.wait(ends, return_when=futures.FIRST_COMPLETED)
        if self._abandoned.done():
            raise RuntimeError("given up: the generation is broken")
        return outcome.result()

    @contextlib.contextmanager
    def making_gloo(self) -> Iterator[None]:
        """Let `make` call gloo's constructor when torch makes the next group."""
        c10d: Any = dist.distributed_c10d
        original = c10d.ProcessGroupGloo

        def construct(*args: Any, **options: Any) -> Any:
            c10d.ProcessGroupGloo = original  # as a type it is asked for right afterwards
            return self.make(lambda: original(*args, **options))

        c10d.ProcessGroupGloo = construct
        try:
            yield
        finally:
            c10d.ProcessGroupGloo = original
