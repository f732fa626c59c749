"""How long each stage of a recovery took, put together from the agent's and the survivors' parts."""

from __future__ import annotations

from collections.abc import Mapping

from elastictrain.agent.recorder import Recorder
from elastictrain.agent.supervisor import WorkerProcess
from elastictrain.clock import Clock
from elastictrain.topology import Round

STAGES = ("detect", "fence", "abort", "park", "agree", "rebuild", "sync", "rewind", "resume")


class RecoveryRecord:
    """One recovery at a time: from the first evidence of a failure until all workers of this node in the next Round
    train."""

    def __init__(self, recorder: Recorder, clock: Clock, node_id: str) -> None:
        self._recorder = recorder
        self._node_id = node_id
        self._clock = clock
        self._cause = ""
        self._evidence_s: float | None = None
        self._handled_s: float | None = None
        self._seconds: dict[str, float] = {}
        self._awaited: set[str] = set()
        self._generation = 0
        self._is_first = True

    def detected(self, worker: WorkerProcess) -> None:
        """A worker is known to be dead; `evidence_s` is when somebody saw it first."""
        if self._handled_s is None:
            self._handled_s = self._clock.now_s()
            self._evidence_s = min(worker.evidence_s or self._handled_s, self._handled_s)

    def fenced(self, generation: int, cause: str) -> None:
        """Every worker of this node has been told."""
        now_s = self._clock.now_s()
        if not self._cause:
            self._cause = cause
            handled_s = self._handled_s if self._handled_s is not None else now_s
            evidence_s = self._evidence_s if self._evidence_s is not None else handled_s
            self._seconds = {"detect": handled_s - evidence_s, "fence": now_s - handled_s}

    def entered(self, round_: Round) -> None:
        self._generation = round_.generation
        self._awaited = {seat.worker_id for seat in round_.seats if seat.node_id == self._node_id}
        if not self._cause:
            self._cause = "start" if self._is_first else (round_.reason or "membership")
        self._is_first = False

    def resumed(self, worker: WorkerProcess, generation: int, seconds: Mapping[str, float], step: int) -> None:
        """A worker trains again; the record is made when all do. Each stage lasts as long as its slowest survivor."""
        if generation != self._generation:
            return
        self._awaited.discard(worker.worker_id)
        if not worker.is_newcomer:
            for stage, value in seconds.items():
                self._seconds[stage] = max(self._seconds.get(stage, 0.0), float(value))
        if self._awaited:
            return
        if self._cause != "start":
            ordered = {stage: self._seconds[stage] for stage in STAGES if stage in self._seconds}
            self._recorder.recovered(generation, cause=self._cause, seconds=ordered, step=step)
        self._cause, self._seconds, self._evidence_s, self._handled_s = "", {}, None, None
