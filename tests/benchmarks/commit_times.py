"""What the workers of a run have committed, and what that says about one accident, departure or arrival."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from statistics import median

LOOK_EVERY_S = 0.02
SETTLED_STEPS = 10

_pause = threading.Event()


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One step committed by one process. An `era` of a process ends when the membership changes."""

    at_s: float
    step: int
    world: int
    era: int
    pid: int
    node: str
    seat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What was known at the moment of an event."""

    at_s: float
    eras: frozenset[tuple[int, int]]
    step_s: float


class CommitTimes:
    """The commits of all processes of a run, read from their files as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.commits: list[Commit] = []

    def read(self) -> None:
        for path in self._folder.glob("commits-*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            self.commits.extend(Commit(**json.loads(line)) for line in whole.splitlines())

    def wait(self, seen: Callable[[], bool], limit_s: float) -> bool:
        """Block until `seen()` after reading; False when that took longer than `limit_s`."""
        until_s = time.monotonic() + limit_s
        while True:
            self.read()
            if seen():
                return True
            if time.monotonic() > until_s:
                return False
            _pause.wait(LOOK_EVERY_S)

    def wait_world(self, size: int, *, after_s: float, limit_s: float) -> bool:
        """Block until every seat of a world of `size` has committed SETTLED_STEPS steps in it after a moment."""

        def is_settled() -> bool:
            recent: dict[tuple[str, int], int] = {}
            for commit in self.commits:
                if commit.at_s > after_s:
                    key = (commit.node, commit.seat)
                    recent[key] = recent.get(key, 0) + 1 if commit.world == size else 0
            return sum(count >= SETTLED_STEPS for count in recent.values()) >= size

        return self.wait(is_settled, limit_s)

    def now(self) -> Before:
        """Remember the present; call it right before the event."""
        self.read()
        eras = frozenset((commit.pid, commit.era) for commit in self.commits)
        step_s = self.step_s(time.monotonic())
        return Before(at_s=time.monotonic(), eras=eras, step_s=step_s)  # the clock last: the event is next

    def step_s(self, until_s: float, over_s: float = 3.0) -> float:
        """The median time between two commits of a seat before a moment."""
        gaps = [
            later - earlier
            for times in self._series(until_s - over_s, until_s).values()
            for earlier, later in itertools.pairwise(times)
        ]
        return median(gaps) if gaps else 0.0

    def first_after(self, before: Before, *, world: int | None = None) -> float | None:
        """Seconds from the event to the first step committed by a changed membership, of this size if one is given."""
        moments = [
            commit.at_s
            for commit in self.commits
            if commit.at_s > before.at_s
            and (commit.pid, commit.era) not in before.eras
            and (world is None or commit.world == world)
        ]
        return min(moments) - before.at_s if moments else None

    def longest_gap(self, before: Before, nodes: set[str], *, without_seats: Collection[int] = ()) -> float:
        """The longest time between two commits of a seat of `nodes` from the event until now, beyond a usual step."""
        longest = 0.0
        for (node, seat), times in self._series(before.at_s - 5 * before.step_s, time.monotonic()).items():
            if node in nodes and seat not in without_seats:
                longest = max([longest, *(b - a for a, b in itertools.pairwise(times) if b > before.at_s)])
        return max(0.0, longest - before.step_s)

    def gap_at_change(self, before: Before, nodes: set[str], *, world: int) -> float:
        """The time that a seat of `nodes` took into the first new world of that size, beyond a usual step."""
        longest = 0.0
        for key in {(commit.node, commit.seat) for commit in self.commits if commit.node in nodes}:
            mine = sorted((one for one in self.commits if (one.node, one.seat) == key), key=lambda one: one.at_s)
            for earlier, later in itertools.pairwise(mine):
                is_fresh = later.at_s > before.at_s and (later.pid, later.era) not in before.eras
                if is_fresh and later.world == world:
                    longest = max(longest, later.at_s - earlier.at_s)
                    break
        return max(0.0, longest - before.step_s)

    def _series(self, from_s: float, until_s: float) -> dict[tuple[str, int], list[float]]:
        """The moments of commits by seat. A seat is held by one process after the other."""
        series: dict[tuple[str, int], list[float]] = {}
        for commit in self.commits:
            if from_s <= commit.at_s <= until_s:
                series.setdefault((commit.node, commit.seat), []).append(commit.at_s)
        return {key: sorted(times) for key, times in series.items()}
