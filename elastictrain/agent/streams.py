"""Where the workers' stdout and stderr go: the console, files of RUN_DIR/logs, or both, in torchrun's notation.

A stream that is teed, or shown for some ranks only, comes to the agent through a pipe and is written by whole lines.
A log file that cannot be written is reported once and does not stop training.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from elastictrain.config import RunConfig
from elastictrain.log import get_logger

STDOUT: Final = 1
STDERR: Final = 2
READ_BYTES: Final = 1 << 16
NAMES: Final = {STDOUT: "stdout", STDERR: "stderr"}

logger = get_logger(__name__)


def selected(notation: str, local_rank: int) -> int:
    """Bits of the streams that `notation` ("3", "0:1,1:2") selects for a local rank: 1 stdout, 2 stderr."""
    if ":" not in notation:
        return int(notation or "0")
    for part in notation.split(","):
        rank, _, bits = part.partition(":")
        if int(rank) == local_rank:
            return int(bits)
    return 0


@dataclass(slots=True)
class Pipe:
    """One worker's stream on its way through the agent."""

    fd: int
    file: int | None
    prefix: bytes
    target: int
    is_shown: bool
    pending: bytearray = field(default_factory=bytearray)


class Streams:
    """Opens the descriptors of a new worker's streams and carries what comes through pipes."""

    def __init__(self, config: RunConfig, selector: selectors.BaseSelector) -> None:
        self._output = config.output
        self._role = config.role
        self._folder = config.output.log_dir / config.run_id if config.output.log_dir else config.run_dir / "logs"
        self._selector = selector
        self._pipes: dict[int, Pipe] = {}
        self._has_complained = False
        self.spares_log: Path | None = None
        """Where the spares' output is, None when there was no spare."""

    def open(self, local_rank: int, attempt: int) -> tuple[int, int]:
        """Descriptors for stdout and stderr of a worker; the caller closes them after the worker has them."""
        return self._open(STDOUT, local_rank, attempt), self._open(STDERR, local_rank, attempt)

    def open_for_spares(self, node_id: str) -> tuple[int, int]:
        """Descriptors for the streams of a spare: one file of this node, until a place brings those of the place."""
        path = Path(self._folder) / f"spares-{node_id}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self.spares_log = path
        except OSError as error:
            self._complain(f"cannot write {path}: {error.strerror}; that output is lost")
            file = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        return file, os.dup(file)

    def _open(self, target: int, local_rank: int, attempt: int) -> int:
        redirects = bool(selected(self._output.redirects, local_rank) & target)
        tees = bool(selected(self._output.tee, local_rank) & target)
        shown = self._output.local_ranks_filter is None or local_rank in self._output.local_ranks_filter
        file = self._open_file(target, local_rank, attempt) if redirects or tees else None
        if redirects and not tees:
            return file if file is not None else os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        if not tees and shown:
            return os.dup(target)
        if not tees:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_end, False)
        pipe = Pipe(read_end, file, f"[{self._role}{local_rank}]:".encode(), target, shown)
        self._pipes[read_end] = pipe
        self._selector.register(read_end, selectors.EVENT_READ, lambda: self._carry(pipe))
        return write_end

    def _open_file(self, target: int, local_rank: int, attempt: int) -> int | None:
        path = Path(self._folder) / f"attempt_{attempt}" / str(local_rank) / f"{NAMES[target]}.log"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._complain(f"cannot write {path}: {error.strerror}; that output is lost")
            return None

    def _complain(self, text: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning("%s", text)

    def _carry(self, pipe: Pipe) -> None:
        if pipe.fd not in self._pipes:
            return  # ended by an event of the same turn
        try:
            data = os.read(pipe.fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end(pipe)
            return
        if pipe.file is not None:
            try:
                os.write(pipe.file, data)
            except OSError as error:
                self._complain(f"cannot write a log file: {error.strerror}; that output is lost")
        pipe.pending += data
        end = pipe.pending.rfind(b"\n") + 1
        if end and pipe.is_shown:
            self._show(pipe, bytes(pipe.pending[:end]))
        del pipe.pending[:end]

    def _show(self, pipe: Pipe, lines: bytes) -> None:
        stream = sys.stdout if pipe.target == STDOUT else sys.stderr
        text = b"".join(pipe.prefix + line for line in lines.splitlines(keepends=True))
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
            os.write(stream.fileno(), text)

    def _end(self, pipe: Pipe) -> None:
        if pipe.pending and pipe.is_shown:
            self._show(pipe, bytes(pipe.pending) + b"\n")
        self._selector.unregister(pipe.fd)
        os.close(pipe.fd)
        if pipe.file is not None:
            os.close(pipe.file)
        self._pipes.pop(pipe.fd, None)

    def close(self) -> None:
        """Carry what is still in the pipes, then close everything; leave no empty log of spares."""
        for pipe in list(self._pipes.values()):
            with contextlib.suppress(OSError):
                while pipe.fd in self._pipes and (is_readable(pipe.fd)):
                    self._carry(pipe)
            if pipe.fd in self._pipes:
                self._end(pipe)
        if self.spares_log is not None:
            with contextlib.suppress(OSError):
                if not self.spares_log.stat().st_size:
                    self.spares_log.unlink()


def is_readable(fd: int) -> bool:
    """Whether a read of `fd` would return at once."""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(0))
