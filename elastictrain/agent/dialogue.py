"""What the agent does with each message of a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastictrain.agent.membership import seated
from elastictrain.agent.supervisor import Phase, WorkerProcess
from elastictrain.channel import CHANNEL_VERSION
from elastictrain.log import get_logger
from elastictrain.rendezvous.events import LocalPosition

if TYPE_CHECKING:
    from elastictrain.agent.node_agent import NodeAgent

logger = get_logger(__name__)


class Dialogue:
    """The agent's half of the conversations with its workers; one method per kind of message."""

    def __init__(self, agent: NodeAgent) -> None:
        self._agent = agent

    def take(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        getattr(self, f"_{message['kind']}")(worker, message)  # kinds are a closed set, checked by the channel

    def _hello(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        agent = self._agent
        if message["version"] != CHANNEL_VERSION:
            logger.error(
                "worker %s speaks channel version %s, not %s", worker.worker_id, message["version"], CHANNEL_VERSION
            )
            agent.kill(worker)
            return
        worker.is_elastic = True
        agent.spares.worker_at_init(worker, message)
        self.welcome(worker, environment={}, streams=())

    def welcome(self, worker: WorkerProcess, *, environment: Mapping[str, str], streams: Sequence[int]) -> None:
        """Tell a worker what it needs to know; `environment` and `streams` (stdout, stderr) change with its place."""
        agent = self._agent
        round_ = agent.round
        has_others = any(other.holds_state for other in agent.supervisor.alive() if other is not worker)
        # A Round that this node has no part in is that of nodes which train; if they are dead, nobody holds the state,
        # and the workers find that out together.
        worker.is_newcomer = has_others or (round_ is not None and agent.node_id not in round_.node_ids)
        world_size = agent.config.world.nproc_per_node
        rank = worker.local_rank
        if worker.is_newcomer and round_ is not None:
            world_size = round_.world_size
            rank = world_size + worker.local_rank  # provisional: outside the world
        agent.recorder.worker_started(worker)
        worker.channel.send_welcome(
            streams,
            environment=dict(environment),
            oom_score=agent.spares.oom_score,
            run_id=agent.config.run_id,
            newcomer=worker.is_newcomer,
            rank=rank,
            local_rank=worker.local_rank,
            world_size=world_size,
            run_dir=str(agent.config.run_dir),
            keep=agent.config.checkpoints.keep,
            checkpoint_every={
                "kind": agent.config.checkpoints.every.kind,
                "value": agent.config.checkpoints.every.value,
            },
            resume_at_step=agent.resume_at_step,
        )

    def _ready(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        worker.phase = Phase.WAITING
        # One whose entry was cut short had a seat already: the generation is over for it too.
        worker.settled = max(worker.settled, int(message["generation"]))
        self._agent.recorder.worker_is(worker, "waiting")

    def _parked(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        worker.phase = Phase.PARKED
        worker.settled = int(message["generation"])
        worker.step = int(message["step"])
        worker.evaluating = bool(message["evaluating"])
        worker.holds_state = bool(message["holds_state"])

    def _position(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        agent = self._agent
        worker.position = (int(message["generation"]), int(message["step"]))
        members = [member for member in seated(agent.workers, agent.round) if member.phase is not Phase.PARKED]
        generation = worker.position[0]
        answers = [member.position for member in members]
        known = [answer[1] for answer in answers if answer is not None and answer[0] == generation]
        if known and len(known) == len(members):  # none is left where the answer crossed the end of the round
            if agent.departure.decides_alone:
                agent.departure.positions_known(generation, max(known))
            else:
                agent.driver.handle(LocalPosition(generation=generation, step=max(known)))

    def _suspect(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        self._agent.suspect(worker, int(message["generation"]), str(message["error"]))

    def _whereabouts(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        self._agent.hang.answered(worker, message)

    def _resumed(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        agent = self._agent
        agent.hang.entered(worker)
        worker.holds_state = True
        worker.step = int(message["step"])
        agent.places.taken(worker)
        agent.recorder.worker_is(worker, "productive")
        agent.recovery.resumed(worker, int(message["generation"]), message["seconds"], worker.step)
        worker.is_newcomer = False
        agent.resume_at_step = None

    def _commit(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        worker.step = int(message["step"])
        worker.has_committed = True
        self._agent.hang.committed(worker)
        self._agent.recorder.committed(message)
        for other in self._agent.workers:
            if other.has_finished and other.step < worker.step:
                self._agent.left_early(other)

    def _epoch_finished(self, _: WorkerProcess, message: Mapping[str, Any]) -> None:
        self._agent.recorder.epoch_finished(int(message["loop"]), int(message["epoch"]))

    def _epoch_left(self, _: WorkerProcess, message: Mapping[str, Any]) -> None:
        self._agent.recorder.epoch_left(int(message["loop"]), int(message["epoch"]))

    def _evaluated(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        self._agent.hang.evaluated(worker)
        if message["rank"] == 0:
            self._agent.recorder.evaluated(int(message["step"]), message["result"])

    def _saved(self, _: WorkerProcess, message: Mapping[str, Any]) -> None:
        self._agent.ending.has_failed_final_save = False
        self._agent.saved_step = int(message["step"])
        self._agent.recorder.checkpointed(message)

    def _save_failed(self, _: WorkerProcess, message: Mapping[str, Any]) -> None:
        self._agent.ending.has_failed_final_save = bool(message["final"])
        self._agent.recorder.checkpoint_failed(int(message["step"]), str(message["error"]))
        self._agent.departure.saved(str(message["error"]))

    def _resumed_from(self, _: WorkerProcess, message: Mapping[str, Any]) -> None:
        self._agent.saved_step = int(message["step"])
        self._agent.recorder.resumed_from(message)

    def _exception(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        """The worker is about to end with this exception: the others need not wait for its death."""
        worker.exception = dict(message)
        self._agent.recovery.detected(worker)
        if not worker.has_finished:
            self._agent.mark_broken(worker, "worker_exception", f"{message['error_type']}: {message['message']}")

    def _finished(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        worker.has_finished = bool(message["entered"])
        worker.step = int(message["step"])
        self._agent.recorder.worker_is(worker, "idle")
