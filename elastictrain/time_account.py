"""Where the time of one node's workers went."""

from __future__ import annotations

import threading

from elastictrain.errors import InternalError

TIME_KINDS = ("productive", "recovering", "checkpointing", "waiting", "starting", "idle")


class TimeAccount:
    """Every worker is in exactly one kind of time from its start to its end, so the kinds sum to wall time x workers.

    Times are monotonic seconds. A switch that is told for a moment already accounted for (a scrape came between) counts
    from the accounted moment on: no total ever goes back. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(TIME_KINDS, 0.0)
        self._current: dict[str, tuple[str, float]] = {}  # worker_id: (kind, accounted up to)

    def switch(self, worker_id: str, kind: str, *, at_s: float) -> None:
        """From `at_s` on the worker's time goes into `kind`; its first call starts its account."""
        if kind not in self._totals:
            raise InternalError(f"time kind {kind!r} is not one of {TIME_KINDS}")
        with self._lock:
            self._current[worker_id] = (kind, self._settle(worker_id, at_s))

    def stop(self, worker_id: str, *, at_s: float) -> None:
        """The worker ended; unknown ones are ignored, since a worker may end before it ever started its account."""
        with self._lock:
            self._settle(worker_id, at_s)
            self._current.pop(worker_id, None)

    def totals(self, *, now_s: float) -> dict[str, float]:
        """Seconds by kind up to `now_s`, of all workers that ever were."""
        with self._lock:
            for worker_id, (kind, _) in list(self._current.items()):
                self._current[worker_id] = (kind, self._settle(worker_id, now_s))
            return dict(self._totals)

    def _settle(self, worker_id: str, at_s: float) -> float:
        """Account for the worker up to `at_s`, or leave it where it is already further."""
        if worker_id not in self._current:
            return at_s
        kind, since_s = self._current[worker_id]
        until_s = max(since_s, at_s)
        self._totals[kind] += until_s - since_s
        return until_s
