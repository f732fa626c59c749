"""One state change, one record: the ledger's event, its log line and its metric are made here from the same facts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from elastictrain.agent.policy import Failure
from elastictrain.agent.supervisor import WorkerProcess
from elastictrain.clock import Clock
from elastictrain.exporter import Exporter, start_exporter
from elastictrain.ledger import PLANNED_CAUSES, LedgerWriter, ledger_path
from elastictrain.log import get_logger
from elastictrain.metrics import RunMetrics
from elastictrain.topology import Round

logger = get_logger(__name__)


class StepValues:
    """What the workers of this node have logged in one step, until all of them have told of it."""

    def __init__(self) -> None:
        self.num_told = 0
        self._totals: dict[str, list[float]] = {}

    def add(self, values: Mapping[str, float], *, weight: float) -> None:
        self.num_told += 1
        for name, value in values.items():
            total = self._totals.setdefault(name, [0.0, 0.0])
            total[0] += value * weight
            total[1] += weight

    def means(self) -> dict[str, float]:
        """The means over the ranks, weighted by their samples."""
        return {name: total / weight for name, (total, weight) in self._totals.items() if weight}


class Recorder:
    """The record of one node: ledger, metrics endpoint, log."""

    def __init__(self, *, run_id: str, run_dir: Path, node_id: str, clock: Clock) -> None:
        self._clock = clock
        self._run_dir = run_dir
        self._node_id = node_id
        self.ledger = LedgerWriter(
            ledger_path(run_dir, node_id), run_id=run_id, node_id=node_id, clock=clock, on_problem=logger.warning
        )
        self._registry = CollectorRegistry()
        self.metrics = RunMetrics(self._registry, run_id=run_id, clock=clock)
        self._exporter: Exporter | None = None
        self.committed_step = 0
        self._values: dict[int, StepValues] = {}
        self._num_local = 0
        self._world_size = 0
        self._has_history = False
        self._pass = (-1, -1, 0)
        self._finished_pass = (-1, -1)

    def start_exporter(self, host: str, port: int, *, health: Any) -> str:
        """Serve /metrics; returns its URL, which is also written to RUN_DIR/agents/<node>.json."""
        self._exporter = start_exporter(self._registry, host, port, health=health)
        facts = {"pid": os.getpid(), "metrics_url": self._exporter.url, "started": self._clock.wall_time_s()}
        folder = self._run_dir / "agents"
        folder.mkdir(exist_ok=True)
        temporary = folder / f".{self._node_id}.{os.getpid()}"
        temporary.write_text(json.dumps(facts))
        temporary.replace(folder / f"{self._node_id}.json")
        logger.info("metrics at %s", self._exporter.url)
        return self._exporter.url

    def run_started(self, config: Mapping[str, Any]) -> None:
        self.ledger.append("run_started", config=config)
        self.ledger.append("node_started", pid=os.getpid(), host=os.uname().nodename)

    # -- workers ---------------------------------------------------------------------------------------------------

    def worker_started(self, worker: WorkerProcess) -> None:
        self.ledger.append(
            "worker_started",
            worker_id=worker.worker_id,
            local_rank=worker.local_rank,
            pid=worker.pid,
            attempt=worker.attempt,
            **({"spare": True} if worker.was_spare else {}),
        )
        if worker.attempt:
            self.metrics.worker_restarted()
        self.metrics.time.switch(worker.worker_id, "starting", at_s=self._clock.now_s())

    def worker_is(self, worker: WorkerProcess, kind: str) -> None:
        """From now on the worker's time goes into `kind`."""
        self.metrics.time.switch(worker.worker_id, kind, at_s=self._clock.now_s())

    def worker_gone(self, worker: WorkerProcess) -> None:
        self.metrics.time.stop(worker.worker_id, at_s=self._clock.now_s())
        if worker.rank is not None:
            self.metrics.worker_left(worker.rank)

    def worker_exited(self, worker: WorkerProcess, *, cause: str) -> None:
        code = worker.exit_code or 0
        self.ledger.append(
            "worker_exited",
            worker_id=worker.worker_id,
            local_rank=worker.local_rank,
            rank=worker.rank,
            pid=worker.pid,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            cause=cause,
        )

    def replaced(self, worker: WorkerProcess, *, lost: str, seconds: float) -> None:
        """A worker trains in the place of a lost one; `seconds`: how long the world was one short."""
        source = "spare" if worker.was_spare else "new"
        self.ledger.append(
            "replaced",
            worker_id=worker.worker_id,
            local_rank=worker.local_rank,
            lost=lost,
            source=source,
            seconds=round(seconds, 6),
            step=worker.step,
        )
        self.metrics.replaced(source, seconds)
        how = "a spare" if worker.was_spare else "started after the loss"
        logger.info("worker %s (%s) trains in the place of %s, %.3f s after", worker.worker_id, how, lost, seconds)

    def failure(self, failure: Failure) -> None:
        self.ledger.append(
            "failure",
            rank=failure.rank,
            worker_id=failure.worker_id,
            step=failure.step,
            error_type=failure.error_type or failure.cause,
            message=failure.message or failure.describe(),
            traceback=failure.traceback,
        )
        rank = "?" if failure.rank is None else failure.rank
        step = "" if failure.step is None else f" at step {failure.step}"
        logger.warning("worker %s (rank %s) failed%s: %s", failure.worker_id, rank, step, failure.describe())

    # -- spares ----------------------------------------------------------------------------------------------------

    def spare_ready(self, spare: WorkerProcess, *, memory_bytes: int, seconds: float, num_waiting: int) -> None:
        """A spare waits in `init()`, with `memory_bytes` of its own, `seconds` after it was started."""
        self.ledger.append(
            "spare_ready",
            worker_id=spare.worker_id,
            pid=spare.pid,
            memory_bytes=memory_bytes,
            seconds=round(seconds, 6),
        )
        self.metrics.set_spares(num_waiting)
        logger.info("spare %s waits (pid %d, %.0f MiB)", spare.worker_id, spare.pid, memory_bytes / (1 << 20))

    def spare_lost(self, spare: WorkerProcess, *, reason: str) -> None:
        self.ledger.append("spare_lost", worker_id=spare.worker_id, pid=spare.pid, reason=reason)
        logger.warning("spare %s ended: %s", spare.worker_id, reason)

    def spares_off(self, reason: str) -> None:
        """This node starts no more spares."""
        self.ledger.append("spares_off", reason=reason)
        logger.info("no more spares: %s", reason)

    # -- rounds ----------------------------------------------------------------------------------------------------

    def broken(self, generation: int, *, cause: str, worker: WorkerProcess | None, detail: str) -> None:
        self.ledger.append(
            "broken",
            generation=generation,
            cause=cause,
            worker_id=worker.worker_id if worker else None,
            rank=worker.rank if worker else None,
            detail=detail,
        )

    def round(self, round_: Round) -> None:
        seats = [[seat.rank, seat.worker_id, seat.node_id] for seat in round_.seats]
        self.ledger.append(
            "round",
            generation=round_.generation,
            world_size=round_.world_size,
            seats=seats,
            reason=round_.reason,
            store=[round_.store_host, round_.store_port],
        )
        self._world_size = round_.world_size
        self._num_local = sum(seat.node_id == self._node_id for seat in round_.seats)
        self._flush_values(self.committed_step)  # who has left tells nothing more
        self.metrics.set_round(generation=round_.generation, world_size=round_.world_size)
        logger.info("generation %d: %d workers (%s)", round_.generation, round_.world_size, round_.reason)

    def recovered(self, generation: int, *, cause: str, seconds: Mapping[str, float], step: int) -> None:
        rounded = {stage: round(value, 6) for stage, value in seconds.items()}
        self.ledger.append("recovered", generation=generation, cause=cause, seconds_by_stage=rounded, step=step)
        self.metrics.recovered(cause, rounded)
        logger.info(
            "%s in %.3f s, going on at step %d (%s)",
            f"membership changed ({cause})" if cause in PLANNED_CAUSES else f"recovered from {cause}",
            sum(rounded.values()),
            step,
            ", ".join(f"{stage} {value * 1000:.1f} ms" for stage, value in rounded.items()),
        )

    # -- progress --------------------------------------------------------------------------------------------------

    def committed(self, message: Mapping[str, Any]) -> None:
        """One rank's word that a step is committed; the first word makes the run's record of it."""
        step, rank = int(message["step"]), int(message["rank"])
        seconds = {stage: float(value) for stage, value in message["seconds"].items()}
        if step > self.committed_step:
            self.committed_step = step
            self._values[step] = StepValues()
            fields = ("loop", "epoch", "start", "stop", "epoch_length", "batch_size", "world_size", "generation")
            self.ledger.append("commit", step=step, **{name: message[name] for name in fields})
            self._pass = (int(message["loop"]), int(message["epoch"]), int(message["stop"]))
            if message["stop"] == message["epoch_length"]:
                self.epoch_finished(*self._pass[:2])
        self.metrics.committed(
            rank, step=step, samples=int(message["share"]), seconds=sum(seconds.values()), stages=seconds
        )
        values = {str(name): float(value) for name, value in message["values"].items()}
        if values:
            self.metrics.user_values(rank, values)
        told = self._values.get(step)
        if told is not None:
            told.add(values, weight=float(message["share"]))
            if told.num_told >= self._num_local:  # and so of the steps before: a worker tells of them in order
                self._flush_values(step)

    def epoch_finished(self, loop: int, epoch: int) -> None:
        """A pass over the data is complete; told by every rank where only reading shows the end, recorded once."""
        if self._pass[:2] == (loop, epoch) and self._finished_pass != (loop, epoch):
            self._finished_pass = (loop, epoch)
            self.ledger.append("epoch_finished", loop=loop, epoch=epoch, samples=self._pass[2])
            logger.info("epoch %d done at step %d", epoch, self.committed_step)

    def epoch_left(self, loop: int, epoch: int) -> None:
        """The script ended a pass before its end; told by every rank, recorded once."""
        if self._pass[:2] == (loop, epoch) != self._finished_pass:
            self._finished_pass = (loop, epoch)
            self.ledger.append("epoch_left", loop=loop, epoch=epoch, samples=self._pass[2])

    def _flush_values(self, last_step: int) -> None:
        """Write the means of what the script logged up to `last_step`."""
        for step in [step for step in self._values if step <= last_step]:
            means = self._values.pop(step).means()
            if means:
                self.ledger.append("user_values", step=step, values=means)

    def resumed_from(self, message: Mapping[str, Any]) -> None:
        """The run goes on from a checkpoint, or from its beginning: later commits are undone."""
        for name, problem in message["rejected"]:
            logger.warning("checkpoint %s is not used: %s", name, problem)
        step = int(message["step"])
        if step == 0 and self.committed_step == 0 and not self._has_history:
            return
        self.ledger.append(
            "resumed", step=step, cursor=message["cursor"], path=message["path"], world_size=self._world_size
        )
        self.metrics.rewound(to_step=step)
        self._values = {}
        self._pass, self._finished_pass = (-1, -1, 0), (-1, -1)
        self.committed_step = step
        source = f"checkpoint {message['path']}" if message["path"] else "the beginning: there is no checkpoint"
        logger.info("resumed at step %d from %s", step, source)

    def set_history(self, committed_step: int) -> None:
        """The run directory's ledger has commits already, up to `committed_step`."""
        self.committed_step = committed_step
        self._has_history = committed_step > 0

    def evaluated(self, step: int, result: object) -> None:
        self.ledger.append("evaluated", step=step, result=result)

    def checkpointed(self, message: Mapping[str, Any]) -> None:
        fields = ("step", "path", "size_bytes", "seconds", "generation")
        self.ledger.append("checkpoint", **{name: message[name] for name in fields})
        seconds = float(message["seconds"])
        self.metrics.checkpointed(step=int(message["step"]), seconds=seconds, stall_seconds=seconds)

    def checkpoint_failed(self, step: int, error: str) -> None:
        self.ledger.append("checkpoint_failed", step=step, error=error)
        logger.error("checkpoint of step %d failed, training goes on with the last good one: %s", step, error)

    # -- the end ---------------------------------------------------------------------------------------------------

    def run_finished(self, exit_code: int) -> None:
        self._flush_values(self.committed_step)
        self.ledger.append("run_finished", step=self.committed_step, exit_code=exit_code)

    def run_stopped(self, exit_code: int, reason: str) -> None:
        self._flush_values(self.committed_step)
        self.ledger.append("run_stopped", step=self.committed_step, exit_code=exit_code, reason=reason)

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
        self.ledger.close()
