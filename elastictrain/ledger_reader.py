"""Reading ledgers: the events of all nodes in order, and where a chain is broken. Never writes; works on a live run."""

from __future__ import annotations

import contextlib
import heapq
import json
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from elastictrain.errors import ConfigError
from elastictrain.ledger import LEDGER_VERSION, Head, chain_root, ledger_folder, line_hash, read_head

# Holds hundreds of events, and every commit names its generation.
_TAIL_BYTES = 1 << 18
_ROUND_MARK = b'"event":"round"'

ProblemKind = Literal["altered", "removed", "inserted", "reordered", "truncated", "unreadable", "torn"]


class Entry(NamedTuple):
    """One event. `line` counts from 1 in the node's file; `wall` and `mono` are seconds, `mono` of that node only."""

    node: str
    line: int
    seq: int
    wall: float
    mono: float
    event: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """Where a ledger file is not what was written, and why. A torn last line is a crash's mark, not a break."""

    path: Path
    line: int
    kind: ProblemKind
    detail: str

    @property
    def is_break(self) -> bool:
        return self.kind != "torn"

    def __str__(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}:{self.line}: {self.kind}: {self.detail}"


class Entries(list[Entry]):
    """Entries of all nodes, merged; `problems` holds at most the first break and the torn end of each file."""

    problems: list[Problem]


@dataclass(slots=True)
class LedgerScan:
    """Yields the events of a run directory one by one; `problems` and `num_files` are complete afterwards.

    Files are merged by generation and step, which all nodes agree on, each keeping its own order: no clock of a node is
    compared with another's. Events behind a break are still yielded where they can be read. A million take seconds.
    """

    run_dir: Path
    problems: list[Problem] = field(default_factory=list)
    num_files: int = 0

    def __iter__(self) -> Iterator[Entry]:
        folder = ledger_folder(self.run_dir)
        run_id = read_run_id(self.run_dir)
        paths = sorted(folder.glob("*.jsonl"))
        self.num_files = len(paths)
        for head_path in sorted(folder.glob("*.head")):
            if head_path.with_suffix(".jsonl") not in paths:
                self.problems.append(Problem(head_path.with_suffix(".jsonl"), 1, "removed", "the whole file is gone"))
        streams = [self._file(path, run_id) for path in paths]
        if len(streams) == 1:
            return streams[0]
        return (entry for _, _, entry in heapq.merge(*map(_placed, streams), key=lambda placed: placed[:2]))

    def _file(self, path: Path, run_id: str | None) -> Iterator[Entry]:
        for item in scan_file(path, run_id=run_id):
            if isinstance(item, Problem):
                self.problems.append(item)
            else:
                yield item


def _placed(stream: Iterator[Entry]) -> Iterator[tuple[int, int, Entry]]:
    """Each event of one file with the generation and the step that this node was in."""
    generation = step = 0
    for entry in stream:
        told = entry.fields.get("generation")
        if type(told) is int and told > generation:
            generation, step = told, 0
        if entry.event in ("commit", "resumed", "evaluated") and type(entry.fields.get("step")) is int:
            step = entry.fields["step"]
        yield generation, step, entry


def read_run_id(run_dir: Path) -> str | None:
    """The run id that run.json names, None where it names none. Raises ConfigError where the file is no JSON object."""
    path = run_dir / "run.json"
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}: expected the JSON object that `elastictrain run` wrote"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}, not the JSON object that `elastictrain run` wrote")
    for section in (value, *(item for item in value.values() if isinstance(item, dict))):
        if isinstance(section.get("run_id"), str):
            return str(section["run_id"])
    return None


def newest_generation(run_dir: Path) -> int:
    """The highest generation that the last lines of the ledgers name, 0 where there is none.

    Blocks for one read of each file. A torn or altered line is skipped; `verify` names it.
    """
    newest = 0
    for path in ledger_folder(run_dir).glob("*.jsonl"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            for raw in file.read().split(b"\n"):
                value, _ = _parse(raw + b"\n")
                told = value.get("generation") if value is not None else None
                if type(told) is int:
                    newest = max(newest, told)
    return newest


def newest_round(run_dir: Path) -> Mapping[str, Any] | None:
    """The `round` event of the highest generation, None where there is none.

    Blocks for the reading of each file from its end to its last such event. A torn or altered line is skipped.
    """
    newest: Mapping[str, Any] | None = None
    for path in ledger_folder(run_dir).glob("*.jsonl"):
        # ValueError: an empty file cannot be mapped.
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                found = _last_round(content)
            if found is not None and (newest is None or found["generation"] > newest["generation"]):
                newest = found
    return newest


def _last_round(content: mmap.mmap) -> Mapping[str, Any] | None:
    place = len(content)
    while (place := content.rfind(_ROUND_MARK, 0, place)) >= 0:
        content.seek(content.rfind(b"\n", 0, place) + 1)
        value, _ = _parse(content.readline())
        if value is not None and value.get("event") == "round" and type(value.get("generation")) is int:
            return value
    return None


def read_ledger(run_dir: Path) -> Entries:
    """All events of all nodes in memory (about 1 KB each), merged by time, with `.problems`."""
    scan = LedgerScan(run_dir)
    entries = Entries(scan)
    entries.problems = scan.problems
    return entries


def check_chain(path: Path, *, run_id: str | None = None) -> Problem | None:
    """The first break of one file's chain, None where it is whole. A torn last line is no break."""
    problems = (item for item in scan_file(path, run_id=run_id) if isinstance(item, Problem))
    return next((problem for problem in problems if problem.is_break), None)


def scan_file(path: Path, *, run_id: str | None = None) -> Iterator[Entry | Problem]:
    """Yield the events of one file, and a Problem at its first break and at a torn end.

    `run_id` None leaves unchecked only which run the file belongs to.
    """
    # The head first: a run that is alive goes on writing while we read, and the head must not be newer than the lines.
    head = read_head(path)
    node = path.stem
    expected, prev = 1, chain_root(run_id, node) if run_id is not None else None
    is_broken = False
    number = whole_lines = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    yield Problem(path, number, "torn", f"the last line is incomplete ({len(raw)} bytes)")
                    break
                whole_lines = number
                value, digest = _parse(raw)
                if not is_broken:
                    problem = _check_link(path, number, value, digest, expected=expected, prev=prev, head=head)
                    if problem is not None:
                        is_broken = True
                        yield problem
                if value is None:
                    continue
                expected, prev = value["seq"] + 1, digest
                del value["v"], value["prev"], value["hash"]
                seq, wall, mono = value.pop("seq"), value.pop("wall"), value.pop("mono")
                yield Entry(node, number, seq, wall, mono, value.pop("event"), value)
    except OSError as error:
        yield Problem(path, number + 1, "unreadable", error.strerror or str(error))
        return
    if head is not None and expected <= head.seq and not is_broken:
        detail = f"the file ends after event {expected - 1}, but event {head.seq} was on disk"
        yield Problem(path, whole_lines + 1, "truncated", detail)


def _parse(raw: bytes) -> tuple[dict[str, Any] | None, str | None]:
    """A line's content (None where it is no ledger line) and its hash (None where the content does not have it)."""
    try:
        value = json.loads(raw)
        is_line = (
            type(value["seq"]) is int
            and isinstance(value["event"], str)
            and isinstance(value["wall"], int | float)
            and isinstance(value["mono"], int | float)
            and value.keys() >= {"v", "prev", "hash"}
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None, None
    return (value, line_hash(raw)) if is_line else (None, None)


def _check_link(
    path: Path,
    number: int,
    value: dict[str, Any] | None,
    digest: str | None,
    *,
    expected: int,
    prev: str | None,
    head: Head | None,
) -> Problem | None:
    """Why this line does not follow the one before it, or None."""
    if value is None:
        return Problem(path, number, "altered", "this is no ledger line")
    if digest is None:
        return Problem(path, number, "altered", "the content does not have the hash the line carries")
    if value["v"] != LEDGER_VERSION:
        detail = f"the line has format {value['v']!r}, this version reads {LEDGER_VERSION}: use the version that ran"
        return Problem(path, number, "unreadable", detail)
    seq = value["seq"]
    if seq > expected:
        if _has_event(path, expected):
            return Problem(path, number, "reordered", f"event {seq} stands where event {expected} belongs")
        return Problem(path, number, "removed", f"event {expected} is missing before event {seq}")
    if seq < expected:
        return Problem(path, number, "inserted", f"event {seq} stands again where event {expected} belongs")
    if prev is not None and value["prev"] != prev:
        if number == 1:
            return Problem(path, number, "altered", "the first line belongs to another run or node")
        return Problem(
            path, number, "altered", f"event {seq} does not continue event {seq - 1}: one of them was replaced"
        )
    if head is not None and seq == head.seq and digest != head.hash:
        return Problem(path, number, "altered", f"event {seq} is not the one that was put on disk: it was replaced")
    return None


def _has_event(path: Path, seq: int) -> bool:
    with path.open("rb") as file:
        return any(value is not None and value["seq"] == seq for value, _ in map(_parse, file))
