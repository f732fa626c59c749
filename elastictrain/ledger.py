"""The ledger: what happened in a run, one hash-chained JSON line per event, one file and one writer per node.

    RUN_DIR/ledger/<node>.jsonl     the events, append-only
    RUN_DIR/ledger/<node>.head      number and hash of the last event known to be on disk (a cut-off end shows)
    RUN_DIR/ledger/<node>.torn-<n>  bytes of a line that a crash tore, moved out of the way of event n

A line is {"v":1,"seq":n,"wall":..,"mono":..,"event":..,<fields>,"prev":"<hex>","hash":"<hex>"}. `hash` is the first 128
bits of SHA-256 over the line without its hash; `prev` is the hash of the line before, and for the first line it comes
from run id and node. The chain shows damage and edits; it does not stop a forger who computes every later hash and the
head anew. Reading is in ledger_reader.py.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from elastictrain.clock import Clock
from elastictrain.errors import ConfigError, InternalError

LEDGER_VERSION = 1
HASH_DIGITS = 32
MAX_TEXT = 16_384
"""Longest text of one field, in characters; a longer one loses its middle."""

RECOVERY_STAGES = ("detect", "fence", "abort", "park", "agree", "rebuild", "sync", "rewind", "resume")
PLANNED_CAUSES = ("join", "leave", "membership")
"""Causes of a change of membership that is no failure."""
STEP_STAGES = ("draw", "compute", "reduce", "commit")

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_HASH_KEY = b',"hash":"'
HASH_SUFFIX_BYTES = len(_HASH_KEY) + HASH_DIGITS + len(b'"}\n')


@dataclass(frozen=True, slots=True)
class EventSpec:
    """Fields of one kind of event. `durable`: the event is on disk (fsync) when `append` returns."""

    fields: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    durable: bool = False


# Events of the recovery path (round, broken, recovered) are not durable: an fsync there would lengthen the recovery,
# and a machine that loses power loses its part of the round anyway.
EVENT_FIELDS: Mapping[str, EventSpec] = MappingProxyType(
    {
        "run_started": EventSpec(("config",), durable=True),
        "node_started": EventSpec(optional=("pid", "host")),
        "round": EventSpec(("generation", "world_size", "seats", "reason"), optional=("store",)),
        "broken": EventSpec(("generation", "cause", "worker_id", "rank", "detail")),
        "recovered": EventSpec(("generation", "cause", "seconds_by_stage", "step")),
        "commit": EventSpec(
            (
                "step",
                "loop",
                "epoch",
                "start",
                "stop",
                "epoch_length",
                "batch_size",
                "world_size",
                "generation",
            )
        ),
        "epoch_finished": EventSpec(("loop", "epoch", "samples"), durable=True),
        "epoch_left": EventSpec(("loop", "epoch", "samples"), durable=True),
        "evaluated": EventSpec(("step", "result")),
        "checkpoint": EventSpec(("step", "path", "size_bytes", "seconds", "generation"), durable=True),
        "checkpoint_failed": EventSpec(("step", "error"), durable=True),
        "resumed": EventSpec(("step", "cursor", "path", "world_size"), durable=True),
        "worker_started": EventSpec(("worker_id", "local_rank", "pid", "attempt"), optional=("spare",)),
        "worker_exited": EventSpec(("worker_id", "local_rank", "rank", "pid", "exit_code", "signal", "cause")),
        "replaced": EventSpec(("worker_id", "local_rank", "lost", "source", "seconds", "step")),
        "spare_ready": EventSpec(("worker_id", "pid", "memory_bytes", "seconds")),
        "spare_lost": EventSpec(("worker_id", "pid", "reason")),
        "spares_off": EventSpec(("reason",)),
        "failure": EventSpec(("rank", "worker_id", "step", "error_type", "message", "traceback")),
        "user_values": EventSpec(("step", "values")),
        "run_finished": EventSpec(("step", "exit_code"), durable=True),
        "run_stopped": EventSpec(("step", "exit_code", "reason"), durable=True),
        # The ledger's own events.
        "torn": EventSpec(("size_bytes", "kept_in", "missing"), durable=True),
        "gap": EventSpec(("lost", "error"), durable=True),
    }
)
DURABLE_EVENTS = frozenset(name for name, spec in EVENT_FIELDS.items() if spec.durable)


@dataclass(frozen=True, slots=True)
class Head:
    """The last event that is known to be on disk."""

    seq: int
    hash: str


def ledger_folder(run_dir: Path) -> Path:
    return run_dir / "ledger"


def ledger_path(run_dir: Path, node_id: str) -> Path:
    """Where the events of this node go. Raises ConfigError where the node's name cannot be a file name."""
    if not node_id or "/" in node_id or "\0" in node_id or node_id.startswith("."):
        raise ConfigError(f"node id {node_id!r} cannot name a ledger file: use letters, digits, '-', '_' and inner '.'")
    return ledger_folder(run_dir) / f"{node_id}.jsonl"


def chain_root(run_id: str, node_id: str) -> str:
    """The `prev` of a file's first line."""
    return hashlib.sha256(f"elastictrain ledger {run_id}\n{node_id}".encode()).hexdigest()[:HASH_DIGITS]


def line_hash(raw: bytes) -> str | None:
    """The hash that a complete line carries, or None where the line's content does not have that hash."""
    body, suffix = raw[:-HASH_SUFFIX_BYTES], raw[-HASH_SUFFIX_BYTES:]
    if not suffix.startswith(_HASH_KEY) or not suffix.endswith(b'"}\n'):
        return None
    digest = hashlib.sha256(body)
    digest.update(b"}")
    computed = digest.hexdigest()[:HASH_DIGITS]
    return computed if suffix[len(_HASH_KEY) : -3] == computed.encode() else None


def read_head(path: Path) -> Head | None:
    """The head that belongs to a ledger file, None where there is none or where it is unreadable."""
    try:
        value = json.loads(path.with_suffix(".head").read_bytes())
        return Head(int(value["seq"]), str(value["hash"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class LedgerWriter:
    """Appends the events of one node. Thread-safe. A full or failing disk costs events, never the training.

    An event goes to the file in one write and costs about 20 us; durable ones are also synced (milliseconds, blocking).
    Events that could not be written are counted in `dropped`, told once through `on_problem`, and the next event that
    can be written is preceded by a `gap` event with their number.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        node_id: str,
        clock: Clock,
        *,
        on_problem: Callable[[str], None] | None = None,
    ) -> None:
        """Open or create the file, and heal the line that a crash tore. Blocks on the disk.

        Raises ConfigError where the file cannot be opened for writing.
        """
        if path.stem != node_id:
            raise InternalError(f"the ledger of node {node_id!r} must be named {node_id}.jsonl, not {path.name}")
        self.path = path
        self.dropped = 0
        self._clock = clock
        self._on_problem = on_problem
        self._lock = threading.Lock()
        self._lost = 0  # events dropped since the last one that was written
        self._error = ""
        self._has_partial_line = False
        self._seq = 0
        self._prev = chain_root(run_id, node_id)
        self._synced = Head(0, self._prev)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write the ledger {path}: {error.strerror}: choose another --run-dir") from None
        try:
            self._size = os.fstat(self._fd).st_size
            self._take_up_chain()
        except OSError as error:
            os.close(self._fd)
            raise ConfigError(
                f"cannot read back the ledger {path}: {error.strerror}: choose another --run-dir"
            ) from None

    def append(self, event: str, **fields: object) -> bool:
        """Write one event; True when it is in the file. Raises InternalError on an unknown event or wrong fields."""
        spec = EVENT_FIELDS.get(event)
        if spec is None:
            raise InternalError(f"ledger event {event!r} is not one of {sorted(EVENT_FIELDS)}")
        unknown = fields.keys() - {*spec.fields, *spec.optional}
        missing = set(spec.fields) - fields.keys()
        if unknown or missing:
            raise InternalError(f"ledger event {event!r}: unknown {sorted(unknown)}, missing {sorted(missing)}")
        with self._lock:
            if self._lost and not self._write("gap", {"lost": self._lost, "error": self._error}):
                return self._drop(self._error)
            if self._lost:
                self._report(f"the ledger {self.path} can be written again; {self._lost} events are lost")
                self._lost = 0
            if not self._write(event, fields):
                return self._drop(self._error)
            return True

    def sync(self) -> None:
        """Put every event on disk and record the head. Blocks on the disk; a failure is reported, not raised."""
        with self._lock:
            self._sync()

    def close(self) -> None:
        """Sync and close. May be called twice; events that come later are dropped."""
        with self._lock:
            if self._fd >= 0:
                self._sync()
                os.close(self._fd)
                self._fd = -1

    def _write(self, event: str, fields: Mapping[str, object]) -> bool:
        if self._fd < 0:
            self._error = "the ledger is closed"
            return False
        envelope = {
            "v": LEDGER_VERSION,
            "seq": self._seq + 1,
            "wall": round(self._clock.wall_time_s(), 6),
            "mono": round(self._clock.now_s(), 6),
            "event": event,
        }
        body = _to_json(event, {**envelope, **fields, "prev": self._prev})
        digest = hashlib.sha256(body).hexdigest()[:HASH_DIGITS]
        line = b"".join((body[:-1], _HASH_KEY, digest.encode(), b'"}\n'))
        try:
            if self._has_partial_line:
                os.ftruncate(self._fd, self._size)
            self._has_partial_line = True
            written = os.write(self._fd, line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._error = error.strerror or str(error)
            # Half a line must not stay in front of the next one (shrinking works on a full disk), or, if the run ends
            # here, at the end of the file.
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)
            return False
        self._has_partial_line = False
        self._size += len(line)
        self._seq += 1
        self._prev = digest
        if event in DURABLE_EVENTS:
            self._sync()
        return True

    def _drop(self, error: str) -> bool:
        self.dropped += 1
        self._lost += 1
        if self._lost == 1:
            self._report(f"cannot write the ledger {self.path}: {error}: events are lost until it can be written")
        return False

    def _report(self, message: str) -> None:
        if self._on_problem is not None:
            self._on_problem(message)

    def _sync(self) -> None:
        if self._fd < 0 or self._synced.seq == self._seq:
            return
        head = Head(self._seq, self._prev)
        try:
            os.fsync(self._fd)
            # Only after the events themselves: the head must never promise more than the disk holds.
            content = json.dumps({"v": LEDGER_VERSION, "seq": head.seq, "hash": head.hash}).encode()
            _replace_file(self.path.with_suffix(".head"), content)
        except OSError as error:
            self._report(
                f"cannot sync the ledger {self.path}: {error.strerror}: its last events may not survive a crash"
            )
            return
        self._synced = head

    def _take_up_chain(self) -> None:
        """Continue after the last whole line of an existing file; move aside what a crash left behind it."""
        head = read_head(self.path)
        end, last = _last_whole_line(self._fd, self._size)
        if last is not None:
            self._seq = int(last["seq"])
            self._prev = str(last["hash"])
        missing = max(0, head.seq - self._seq) if head is not None else 0
        if end == self._size and not missing:
            self._synced = head if head is not None else self._synced
            return
        torn = os.pread(self._fd, min(self._size - end, 1 << 20), end)
        kept_in = f"{self.path.stem}.torn-{self._seq + 1}" if torn else None
        if kept_in is not None:
            _replace_file(self.path.with_name(kept_in), torn)
            os.ftruncate(self._fd, end)
        size_bytes, self._size = self._size - end, end
        self.append("torn", size_bytes=size_bytes, kept_in=kept_in, missing=missing)


def _last_whole_line(fd: int, size: int) -> tuple[int, dict[str, Any] | None]:
    """The last line with a right hash and where it ends: (0, None) where there is none."""
    end = size
    while end > 0:
        start, block = end, b""
        # Lines are short, but one with a traceback may be long: read backwards until the line's start is seen.
        while start > 0 and block.rfind(b"\n", 0, -1) < 0:
            step = min(65_536, start)
            start -= step
            block = os.pread(fd, step, start) + block
        cut = block.rfind(b"\n", 0, -1) + 1
        line = block[cut:]
        if line.endswith(b"\n") and line_hash(line) is not None:
            value: dict[str, Any] = json.loads(line)
            return end, value
        end -= len(line)
    return 0, None


def _to_json(event: str, value: Mapping[str, object]) -> bytes:
    """One line of pure ASCII. Not-a-number and infinities become texts, since JSON has no such numbers."""
    shortened = {name: _shorten(item) for name, item in value.items()}
    try:
        return _encode(shortened).encode()
    except ValueError:
        return json.dumps(_without_nan(shortened), separators=(",", ":")).encode()
    except TypeError as error:
        raise InternalError(f"ledger event {event!r} holds a value that JSON cannot hold: {error}") from None


def _shorten(value: object) -> object:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        left_out = len(value) - MAX_TEXT
        return f"{value[: MAX_TEXT // 2]}\n[... {left_out} characters left out ...]\n{value[-MAX_TEXT // 2 :]}"
    return value


def _without_nan(value: object) -> object:
    match value:
        case float() if value != value or value in (float("inf"), float("-inf")):
            return str(value)
        case dict():
            return {key: _without_nan(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_nan(item) for item in value]
        case _:
            return value


def _replace_file(path: Path, content: bytes) -> None:
    """Write a whole file so that a crash leaves the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
