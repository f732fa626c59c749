"""Loader processes: batches read ahead by torch's DataLoader, without anything that outlives the trainer.

Four things differ from a bare DataLoader. Its processes are killed by the kernel when the trainer dies. They are killed
at once when the iteration is given up, since what they have read ahead counts for nothing. A death among them surfaces
in `next()` only. And starting them draws nothing from the trainer's random streams.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import multiprocessing.util
import os
import queue
import select
import signal
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from elastictrain.data.samples import Failure
from elastictrain.errors import DataError
from elastictrain.shared_memory import remove_files_of

_PR_SET_PDEATHSIG = 1
_torch_signals: Any = signal_handling


def bind_to_trainer(trainer_pid: int, loader_number: int) -> None:
    """Runs first in every loader process: it dies with the trainer, whatever kills that."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != trainer_pid:
        os._exit(1)  # the trainer died before the call above
    # A fork inherits the trainer's wakeup socket: a signal sent here would look like one sent to the trainer.
    signal.set_wakeup_fd(-1)


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_method() -> str:
    """How loader processes start: "fork", or "spawn" where the user chose another method.

    With a fork server the parent is that server, so that the loaders would outlive the trainer: not offered.
    """
    chosen = multiprocessing.get_start_method(allow_none=True)
    return "fork" if chosen in (None, "fork") else "spawn"


class _Watched(Connection):
    """The reading end of the queue of finished batches, with an ear for the deaths of the processes that fill it.

    A process killed while it writes leaves half a message, and the others keep the pipe open: a plain read would wait
    for the other half without end. Once a process has died nothing more is read.
    """

    def __init__(self, batches: Any, sentinels: list[int]) -> None:
        super().__init__(os.dup(batches._reader.fileno()), writable=False)
        self._events = select.poll()
        for descriptor in (self.fileno(), *sentinels):
            self._events.register(descriptor, select.POLLIN)

    def _is_filled(self, timeout_s: float | None) -> bool:
        """Wait for data. Raises EOFError when a process has died."""
        ready = self._events.poll(None if timeout_s is None else timeout_s * 1000)
        if any(descriptor != self.fileno() for descriptor, _ in ready):
            raise EOFError("a loader process has died")
        return bool(ready)

    def _recv(self, size: int, read: Callable[[int, int], bytes] = os.read) -> io.BytesIO:
        def read_watching(descriptor: int, most: int) -> bytes:
            self._is_filled(None)
            return read(descriptor, most)

        received: io.BytesIO = super()._recv(size, read_watching)  # type: ignore[misc]  # private to the base class
        return received

    def get(self, timeout: float) -> Any:
        """What torch calls, as on a queue: the next message, or queue.Empty after `timeout` seconds."""
        if not self._is_filled(timeout):
            raise queue.Empty
        return self.recv()


class Loader:
    """An iterator over `dataset`'s ready batches, read ahead in `num_workers` processes, in the order of `requests`.

    `dataset` answers a request with a batch or a Failure; with requests None it is an IterableDataset of those, read by
    one process. The processes start here and end with `close()` or with the last batch. Use it from one thread, which
    must live as long as the loader: the kernel takes the end of the thread that started a process for its parent's.
    """

    def __init__(self, dataset: Dataset[Any], *, requests: Iterable[int] | None, num_workers: int) -> None:
        # Made here, it is removed by this process; a killed loader process would leave its own behind.
        multiprocessing.util.get_temp_dir()
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=requests,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            multiprocessing_context=_start_method(),
            worker_init_fn=partial(bind_to_trainer, os.getpid()),
            generator=torch.Generator(),
        )
        iterator: Any = iter(loader)
        # torch would raise from its SIGCHLD handler, anywhere in the trainer: in the middle of a commit, say. With the
        # pids taken off its list, next() finds the death, and at once.
        _torch_signals._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False
        sentinels = [process.sentinel for process in iterator._workers]
        self._watched = iterator._data_queue = _Watched(iterator._worker_result_queue, sentinels)
        self._pids = tuple(int(process.pid) for process in iterator._workers)
        self._iterator: Any = iterator

    @property
    def pids(self) -> tuple[int, ...]:
        return self._pids

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        """The next batch. Blocks until it is read. Raises DataError when it could not be, or a loader process died."""
        if self._iterator is None:
            raise StopIteration
        dead: list[tuple[int, int]] = []
        batch = None
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.close()
            raise
        except (RuntimeError, OSError, EOFError):
            dead = self._wait_dead()
            self.close()
            if not dead:
                raise
        except BaseException:
            self.close()
            raise
        if dead:
            # Not chained to torch's error: it tells less, and its traceback would keep torch's iterator with its files.
            raise DataError(
                f"loader process {', '.join(f'{pid} ended with {_ending(code)}' for pid, code in dead)} while it read "
                "batches: out of memory, or killed by hand? Fewer num_workers need less memory"
            )
        if isinstance(batch, Failure):
            self.close()
            raise batch.to_error()
        return batch

    def _wait_dead(self) -> list[tuple[int, int]]:
        """Pids and exit codes of loader processes that died. A dying one closes its files a moment before it can be
        reaped, so that the error comes first: hence the wait, of 1 s at most."""
        processes = {process.sentinel: process for process in self._iterator._workers}
        dead = [processes[sentinel] for sentinel in wait(list(processes), timeout=1)]
        for process in dead:
            process.join()
        return [(process.pid, process.exitcode) for process in dead]

    def close(self) -> None:
        """End the loader processes. Blocks for milliseconds, whatever they are doing; may be called again."""
        iterator, self._iterator = self._iterator, None
        if iterator is None:
            return
        iterator._shutdown = True  # leaves nothing for torch's destructor, which would wait for batches in the making
        for process in iterator._workers:
            process.kill()
        for process in iterator._workers:
            process.join()
            process.close()
        remove_files_of(self._pids)
        self._watched.close()
        for channel in (*iterator._index_queues, iterator._worker_result_queue):
            channel.cancel_join_thread()
            channel.close()
        # Only a thread that has written closes this end, and here none has: it would stay open as long as a traceback
        # holds the queue.
        iterator._worker_result_queue._writer.close()


def _ending(exitcode: int) -> str:
    if exitcode < 0:
        try:
            return signal.Signals(-exitcode).name
        except ValueError:
            return f"signal {-exitcode}"
    return f"exit code {exitcode}"
