"""Time as an argument: the monotonic clock that deadlines use, and the wall clock that only records use."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """P1: `now_s` never goes back. P2: `wall_time_s` is for records read by people and is never compared."""

    def now_s(self) -> float: ...

    def wall_time_s(self) -> float: ...


class SystemClock:
    """The clocks of this machine."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_time_s(self) -> float:
        return time.time()


@dataclass(slots=True)
class ManualClock:
    """A clock that moves only when told to, for tests."""

    now: float = 0.0
    wall: float = 1_700_000_000.0

    def now_s(self) -> float:
        return self.now

    def wall_time_s(self) -> float:
        return self.wall

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


@dataclass(frozen=True, slots=True)
class Deadline:
    """A named point in monotonic time; the name appears in the error when it passes."""

    name: str
    at_s: float

    @classmethod
    def after(cls, name: str, seconds: float, clock: Clock) -> Deadline:
        return cls(name, clock.now_s() + seconds)

    def left_s(self, clock: Clock) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - clock.now_s())

    def has_passed(self, clock: Clock) -> bool:
        return clock.now_s() >= self.at_s
