"""Telling people that a store is away, rarely enough to be read. Pure but for the clock that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastictrain.clock import Clock

_PATIENCE_S = 1.0


@dataclass(slots=True)
class _Outage:
    since_s: float
    reported_s: float | None = None


class Trouble:
    """Keeps one outage per subject. A line comes once it has lasted a second, then every `every_s`, and at its end."""

    def __init__(self, clock: Clock, report: Callable[[str], None], *, every_s: float) -> None:
        self._clock = clock
        self._report = report
        self._every_s = every_s
        self._outages: dict[str, _Outage] = {}

    def failed(self, subject: str, text: str) -> None:
        """Note that `subject` failed once more, for the reason in `text`."""
        now_s = self._clock.now_s()
        outage = self._outages.setdefault(subject, _Outage(now_s))
        due_s = outage.since_s + _PATIENCE_S if outage.reported_s is None else outage.reported_s + self._every_s
        if now_s >= due_s:
            outage.reported_s = now_s
            self._report(f"{text} (for {now_s - outage.since_s:.0f} s)")

    def ended(self, subject: str, text: str) -> None:
        """Note that `subject` works; `text` is told if its outage was."""
        outage = self._outages.pop(subject, None)
        if outage is not None and outage.reported_s is not None:
            self._report(f"{text} after {self._clock.now_s() - outage.since_s:.0f} s")
