"""The agent of one node: one event-driven loop over workers, rendezvous and signals.

It waits in one place for everything: pidfds and sockets of the workers, the store's watch, signals, and the nearest
deadline. Nothing is polled: a death is handled as soon as the kernel tells of it.
"""

from __future__ import annotations

import selectors
import signal
from collections.abc import Mapping
from typing import Any, Final

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from elastictrain.agent.departure import Departure
from elastictrain.agent.dialogue import Dialogue
from elastictrain.agent.ending import EXIT_FAILED, EXIT_USAGE, Ending
from elastictrain.agent.hang import HangWatch
from elastictrain.agent.meeting import Meeting
from elastictrain.agent.membership import failure_of, local_view, seated
from elastictrain.agent.places import Places
from elastictrain.agent.policy import Action, Budget, Failure, decide
from elastictrain.agent.recorder import Recorder
from elastictrain.agent.recovery_record import RecoveryRecord
from elastictrain.agent.spares import Spares
from elastictrain.agent.supervisor import Phase, Supervisor, WorkerProcess
from elastictrain.clock import Clock, Deadline
from elastictrain.config import RunConfig
from elastictrain.errors import ElasticTrainError
from elastictrain.log import ChangeLog, get_logger
from elastictrain.rendezvous import events as ev
from elastictrain.topology import Round

logger = get_logger(__name__)

# A dying process closes its connections a moment before the kernel tells of its death: the true cause may come first.
SUSPICION_S: Final = 0.02


class NodeAgent(SimpleElasticAgent):
    """Supervises the workers of this node and speaks for them in the rendezvous.

    `run()` blocks until the run is over on this node; `ending` tells how it ended. All its methods run
    in the thread that called `run`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        config: RunConfig,
        meeting: Meeting,
        fork_server: Any,
        recorder: Recorder,
        clock: Clock,
        uses_agent_store: bool,
        resume_at_step: int | None,
    ) -> None:
        super().__init__(spec)
        self.config, self.recorder, self.driver = config, recorder, meeting.driver
        self.clock, self.node_id, self.resume_at_step = clock, meeting.node_id, resume_at_step
        self.ending = Ending(self)
        self._selector = selectors.DefaultSelector()
        self.supervisor = Supervisor(
            fork_server=fork_server,
            selector=self._selector,
            clock=clock,
            on_message=self._on_message,
            on_death=self._on_death,
            on_exit=self._on_exit,
            on_fork_server_lost=lambda: self.ending.end(
                EXIT_FAILED, "the fork server was killed, and the workers with it"
            ),
            on_stop=lambda worker, is_stopped: self.hang.stood_still(worker, is_stopped=is_stopped),
        )
        self.places = Places(self, self._selector, meeting.store_host, uses_agent_store=uses_agent_store)
        self.dialogue = Dialogue(self)
        self.recovery = RecoveryRecord(recorder, clock, self.node_id)
        self.departure = Departure(self)
        self.hang = HangWatch(self, config.hang_timeout_s)
        self.spares = Spares(self)
        self._budget = Budget(max_restarts=config.max_restarts)
        self._view: ev.LocalChanged | None = None
        self._changes = ChangeLog(logger)
        self._is_restarting = False
        self.saved_step = -1
        self._suspicion: tuple[Deadline, int, WorkerProcess, str] | None = None

    # -- what the base class asks for ------------------------------------------------------------------------------

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        size = self.config.world.nproc_per_node
        ids = {local_rank: self.places.start(local_rank).worker_id for local_rank in range(size)}
        for worker in worker_group.workers:
            worker.id, worker.global_rank, worker.world_size = ids[worker.local_rank], worker.local_rank, size
        worker_group.state = WorkerState.HEALTHY
        return ids

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        for worker in self.supervisor.alive():
            self.kill(worker)
        worker_group.state = WorkerState.STOPPED

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return RunResult(state=worker_group.state)

    def _shutdown(self, *_: Any, **__: Any) -> None:
        """Leave nothing behind: workers, descriptors, the store, the record."""
        self._stop_workers(self._worker_group)
        self.supervisor.close()
        self.places.close()
        self.driver.close()
        self._selector.close()

    def _invoke_run(self, role: str = "default") -> RunResult:
        self.supervisor.start()
        self._selector.register(self.driver, selectors.EVENT_READ, lambda: None)
        self.driver.handle(ev.NodeReady(expected=self.config.world.nproc_per_node))
        self._start_workers(self._worker_group)
        with self.departure.watching_signals(self._selector):
            while not self.ending.is_over or self.supervisor.alive():
                self._turn()
        return self._result()

    def _result(self) -> RunResult:
        """The outcome in the base class's terms: by the ranks that the workers began with."""
        if self.ending.exit_code:
            return RunResult(state=WorkerState.FAILED)
        ranks = [worker.global_rank for worker in self._worker_group.workers]
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    # -- the loop --------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for the next event or deadline and handle all that is there."""
        for key, _ in self._selector.select(self._timeout_s()):
            key.data()
        self.supervisor.read_due()
        self.publish()
        for output in self._poll():
            self._take_output(output)
        if self._suspicion is not None and self._suspicion[0].has_passed(self.clock):
            _, generation, worker, error = self._suspicion
            self._suspicion = None
            if self.round is not None and self.round.generation == generation:
                self.mark_broken(worker, "collective_failed", error)
        self.hang.advance()
        self.spares.advance()
        self.departure.advance()

    def _timeout_s(self) -> float | None:
        ends = [
            self.driver.next_deadline_s(),
            self.departure.deadline_s(),
            self.supervisor.next_read_s(),
            self.hang.deadline_s(),
            self.spares.deadline_s(),
        ]
        if self._suspicion is not None:
            ends.append(self._suspicion[0].at_s)
        nearest = min((end for end in ends if end is not None), default=None)
        return None if nearest is None else max(0.0, nearest - self.clock.now_s())

    @property
    def round(self) -> Round | None:
        return self.driver.state.round

    @property
    def workers(self) -> list[WorkerProcess]:
        """The processes that have a place here or had one: all but the spares."""
        return [worker for worker in self.supervisor.workers.values() if not worker.is_spare]

    def publish(self) -> None:
        """Tell the rendezvous what has changed on this node."""
        if self.ending.is_over or not self.departure.publishes:
            return
        view = local_view(self.workers, self.round, node_id=self.node_id)
        if view != self._view:
            self._view = view
            self.driver.handle(view)

    def _take_output(self, output: ev.Output) -> None:
        match output:
            case ev.Fence():
                self._fence(output)
            case ev.ReportPosition(generation=generation):
                for worker in seated(self.workers, self.round):
                    worker.position = None
                    self.supervisor.send(worker, "hold", generation=generation)
            case ev.StopAt(generation=generation, step=step):
                for worker in seated(self.workers, self.round):
                    self.supervisor.send(worker, "stop_at", generation=generation, step=step)
            case ev.EnterRound(round=round_):
                self._enter_round(round_)
            case ev.Waiting(reason=reason):
                is_first_start = self.round is None and self.config.world.max_nodes == 1
                is_ending = any(worker.has_finished for worker in self.workers)
                if not is_first_start and not is_ending:  # neither is a wait for somebody
                    self._changes.note("waiting", reason)
            case ev.Refused(message=message):
                self.ending.end(EXIT_USAGE if output.kind == "config" else EXIT_FAILED, message)
            case ev.RunClosed(reason=reason):
                self.ending.closed_by_another(reason)
            case ev.Left(reason=reason):
                self._changes.note("closed", reason)

    def _fence(self, fence: ev.Fence) -> None:
        self._suspicion = None
        worker = self.supervisor.workers.get(fence.worker_id)
        # By the generation that they are in: the newest Round may be one without this node.
        members = [one for one in self.supervisor.alive() if one.generation == fence.generation]
        for member in (one for one in members if not one.has_finished):
            self.supervisor.send(member, "fence", generation=fence.generation, cause=fence.cause)
            self.recorder.worker_is(member, "recovering")
        self.recovery.fenced(fence.generation, fence.cause)
        self.recorder.broken(fence.generation, cause=fence.cause, worker=worker, detail=fence.detail)

    def _enter_round(self, round_: Round) -> None:
        self.recorder.round(round_)
        self._changes.forget("waiting")
        self.recovery.entered(round_)
        left = {worker.rank for worker in self.workers if worker.rank is not None}
        for seat in round_.seats:
            worker = self.supervisor.workers.get(seat.worker_id)
            if worker is None:
                continue
            if not worker.is_alive:  # it died between the proposal and now: nobody else can tell the others
                self.mark_broken(worker, "worker_lost", "")
                continue
            worker.rank, worker.phase, worker.evaluating, worker.position = seat.rank, Phase.TRAINING, False, None
            worker.settled = max(worker.settled, round_.generation - 1)
            worker.generation = round_.generation
            self.hang.entered(worker)
            left.discard(seat.rank)
            self.recorder.metrics.worker_entered(seat.rank)
            self.recorder.worker_is(worker, "recovering")
            self.supervisor.send(worker, "round", round=round_.to_json())
        for rank in left:
            self.recorder.metrics.worker_left(rank)

    # -- workers ---------------------------------------------------------------------------------------------------

    def kill(self, worker: WorkerProcess, number: signal.Signals = signal.SIGKILL) -> None:
        worker.killed_by_agent = True
        self.supervisor.signal(worker, number)

    def kill_hung(self, worker: WorkerProcess) -> None:
        """End a worker that hangs; its failure counts, and somebody takes its place."""
        self.supervisor.signal(worker, signal.SIGKILL)

    def _on_message(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        (self.spares if worker.is_spare else self.dialogue).take(worker, message)

    def mark_broken(self, worker: WorkerProcess, cause: str, detail: str) -> None:
        """The current generation cannot go on, and this worker is why (or knows why)."""
        round_ = self.round
        if round_ is not None and round_.seat_of(worker.worker_id) is not None and not self.ending.is_over:
            self.driver.handle(
                ev.LocalBroken(
                    generation=round_.generation, cause=cause, worker_id=worker.worker_id, detail=detail[:2000]
                )
            )

    def suspect(self, worker: WorkerProcess, generation: int, error: str) -> None:
        """A collective failed at `worker`: the generation is broken, if nothing that explains it is heard at once."""
        is_news = self.round is not None and self.round.generation == generation and not self.driver.state.is_broken
        if is_news and self._suspicion is None:
            self.recovery.detected(worker)
            deadline = Deadline.after("suspicion", SUSPICION_S, self.clock)
            self._suspicion = (deadline, generation, worker, error)

    def _on_death(self, worker: WorkerProcess) -> None:
        """A worker is dead; its exit code follows. The fence must not wait for it."""
        if worker.is_spare:
            self.spares.changed()
            return
        self.recovery.detected(worker)
        self.recorder.worker_gone(worker)
        if not worker.has_finished:
            self.places.lost(worker)
            self.mark_broken(worker, "worker_exception" if worker.exception else "worker_lost", "")
            self.publish()
            for output in self._poll():  # at once: nothing else in this turn comes before the fence
                self._take_output(output)

    def _on_exit(self, worker: WorkerProcess) -> None:
        """A worker's exit code is known: is the run done, does somebody take its place, or is it the end?"""
        if worker.is_spare:
            self.spares.ended(worker)
            return
        self.supervisor.read_quiet()  # the budget counts what the others have committed
        failure = failure_of(worker)
        cause = "stopped" if worker.killed_by_agent else failure.cause if failure else "finished"
        self.recorder.worker_exited(worker, cause=cause)
        worker.rank = None
        if self.ending.is_over or self.departure.is_leaving:
            return
        if failure is None or worker.killed_by_agent:
            self._start_again() if self._is_restarting else self.ending.end_if_done()
            return
        self.recorder.failure(failure)
        if self.ending.is_closed or any(other.has_finished for other in self.workers):
            if worker.has_finished:
                logger.warning("worker %s ended after its training was over: %s", worker.worker_id, failure.describe())
                self.ending.end_if_done()
                return
            if failure.error_type or failure.exit_code > 0:
                self.ending.give_up(failure, "the other workers have finished already")
                return
        self._replace(worker, failure)

    def left_early(self, worker: WorkerProcess) -> None:
        """A worker that said it had finished has not: the others train on."""
        worker.has_finished, worker.left_early = False, True
        failure = failure_of(worker)
        if worker.phase is Phase.ENDED and failure is not None and not self.departure.is_leaving:
            self.recorder.failure(failure)
            self._replace(worker, failure)

    def _replace(self, worker: WorkerProcess, failure: Failure) -> None:
        """Let somebody take a failed worker's place, or give up."""
        decision = decide(self._budget, failure, committed_step=self.recorder.committed_step)
        self._budget = decision.budget
        if decision.action is Action.STOP:
            self.ending.give_up(failure, decision.reason)
        elif not any(other.is_elastic for other in self.workers):
            self._restart_all(decision.reason)
        else:
            is_late = any(other.has_finished for other in self.workers)
            spare = self.spares.pick()
            if spare is not None:
                logger.info("spare %s replaces worker %s (%s)", spare.worker_id, worker.worker_id, decision.reason)
                self.places.give(spare, worker.local_rank).is_late = is_late
            else:
                logger.info("starting a replacement for worker %s (%s)", worker.worker_id, decision.reason)
                self.places.start(worker.local_rank).is_late = is_late

    def _restart_all(self, reason: str) -> None:
        """Restart-based recovery: every worker ends, then all start anew with a store of their own."""
        logger.info("restarting all workers: the script does not call elastictrain.init() (%s)", reason)
        self._is_restarting = True
        for worker in self.workers:
            self.kill(worker)
        self._start_again()

    def _start_again(self) -> None:
        """Start all workers anew when the last of the old ones is gone, which may hold a port or a file until then."""
        if any(worker.phase is not Phase.ENDED for worker in self.workers):
            return
        self._is_restarting = False
        self.places.renew_store()
        for local_rank in range(self.config.world.nproc_per_node):
            self.places.start(local_rank)

    def _poll(self) -> list[ev.Output]:
        """What the rendezvous wants done. A store that fails for good ends the run on this node."""
        try:
            return self.driver.poll()
        except ElasticTrainError as error:
            self.ending.end(error.exit_code, str(error))
            return []
