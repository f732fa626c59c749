"""Spares: processes that have run the script up to `init()` and wait there for the place of a lost worker.

They are started when training is under way and all places are taken, one at a time, at low priority. Until one gets a
place it is no worker: it has no rank, is no candidate for a Round, and its end is no failure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from elastictrain.agent.membership import failure_of
from elastictrain.agent.memory import find_shortage, list_rooms, private_bytes, resident_bytes
from elastictrain.agent.streams import is_readable
from elastictrain.agent.supervisor import Phase, WorkerProcess
from elastictrain.channel import CHANNEL_VERSION
from elastictrain.log import get_logger
from elastictrain.priority import RETRY_S, can_take_back_nice, own_nice, own_oom_score, step_forward

if TYPE_CHECKING:
    from elastictrain.agent.node_agent import NodeAgent

logger = get_logger(__name__)

SETTLED_S: Final = 1.0
"""How long all places must have been taken before a spare is started: a run that is over by then needs none."""
START_TIMEOUT_S: Final = 600.0
"""How long a spare may take to reach `init()`."""
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 300.0
"""The pause before the next spare after one was lost; it doubles with each."""
MAX_FAILED_STARTS: Final = 2
AUTOMATIC: Final = 1


class Spares:
    """The spares of one node; all calls come from the agent's loop."""

    def __init__(self, agent: NodeAgent) -> None:
        world = agent.config.world
        self._agent = agent
        self._is_automatic = world.spares is None
        # A process that sees only its own GPU must know its place before it starts.
        self._wanted = 0 if agent.config.virtual_local_rank else AUTOMATIC if world.spares is None else world.spares
        self._size = world.nproc_per_node
        self._nice = own_nice()
        self.oom_score = own_oom_score()
        self._lowers_nice: bool | None = None
        self._init_bytes = 0
        self._whole_since_s: float | None = None
        self._not_before_s = 0.0
        self._pause_s = 0.0
        self._failed_starts = 0
        self._started_s = 0.0
        self._due_s: float | None = None
        self._held_back: list[WorkerProcess] = []
        self._retry_s: float | None = None

    # -- what the agent tells --------------------------------------------------------------------------------------

    def worker_at_init(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        """A worker has reached `init()`: a spare will need about as much memory."""
        if self._wanted and self._is_automatic:
            self._init_bytes = max(self._init_bytes, resident_bytes(_pid_in(worker, message)))

    def take(self, worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        """A message of a spare. It is asked to wait; why it fails is known from what it says."""
        if message["kind"] == "hello":
            if message["version"] != CHANNEL_VERSION:
                worker.hang = f"it speaks channel version {message['version']}, not {CHANNEL_VERSION}"
                self._agent.kill_hung(worker)
                return
            worker.is_elastic = True
            self._agent.supervisor.send(worker, "wait")
            self._agent.recorder.spare_ready(
                worker,
                memory_bytes=private_bytes(_pid_in(worker, message)),
                seconds=self._agent.clock.now_s() - self._started_s,
                num_waiting=len(self._waiting()),
            )
        elif message["kind"] == "exception":
            worker.exception = dict(message)

    def pick(self) -> WorkerProcess | None:
        """A spare that waits, at normal priority from now on; None when there is none."""
        for spare in self._waiting():
            if is_readable(spare.pidfd):
                continue  # it is dead, and the news lies in the same turn
            self._pause_s, self._failed_starts = 0.0, 0
            self._held_back.append(spare)
            self._let_go()
            return spare
        return None

    def changed(self) -> None:
        """Who waits has changed."""
        self._agent.recorder.metrics.set_spares(len(self._waiting()))

    def ended(self, spare: WorkerProcess) -> None:
        """A spare has ended and is replaced, later with each that does; if it ended by itself, that would go on."""
        agent = self._agent
        agent.supervisor.forget(spare)
        if spare.killed_by_agent or agent.ending.is_over or agent.departure.is_leaving:
            return
        failure = failure_of(spare)
        reason = spare.hang or (failure.describe() if failure is not None else "exit code 0")
        agent.recorder.spare_lost(spare, reason=reason)
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._not_before_s = agent.clock.now_s() + self._pause_s
        if not spare.is_elastic or (spare.exit_code or 0) >= 0:
            self._failed_starts += 1
            if self._failed_starts >= MAX_FAILED_STARTS:
                log = agent.places.streams.spares_log
                self._give_up(f"{self._failed_starts} ended without a place ({reason}); their output is in {log}")

    def stop(self) -> None:
        """No spare from now on, and none is left waiting."""
        self._wanted = 0
        for spare in self._all():
            self._agent.kill(spare)

    # -- in every turn of the loop ---------------------------------------------------------------------------------

    def advance(self) -> None:
        """Start a spare when one is missing and it is time; see after one that does not come to `init()`."""
        now_s = self._agent.clock.now_s()
        self._due_s = None
        if self._retry_s is not None and now_s >= self._retry_s:
            self._let_go()
        starting = next((spare for spare in self._all() if not spare.is_elastic), None)
        if starting is not None:
            self._due_s = None if starting.hang else self._started_s + START_TIMEOUT_S
            if self._due_s is not None and now_s >= self._due_s:
                starting.hang = f"it did not reach init() within {START_TIMEOUT_S:.0f} s"
                self._agent.kill_hung(starting)
        elif len(self._waiting()) < self._wanted and self._is_whole():
            if self._whole_since_s is None:
                self._whole_since_s = now_s
            self._due_s = max(self._whole_since_s + SETTLED_S, self._not_before_s)
            if now_s >= self._due_s:
                self._start(now_s)
        else:
            self._whole_since_s = None

    def deadline_s(self) -> float | None:
        """When `advance` has something to do."""
        times = [time_s for time_s in (self._due_s, self._retry_s) if time_s is not None]
        return min(times, default=None)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _all(self) -> list[WorkerProcess]:
        return [worker for worker in self._agent.supervisor.alive() if worker.is_spare]

    def _waiting(self) -> list[WorkerProcess]:
        return [spare for spare in self._all() if spare.is_elastic]

    def _is_whole(self) -> bool:
        """Whether every place of this node has a worker that commits steps, and training goes on."""
        agent = self._agent
        if agent.ending.is_over or agent.ending.is_closed or agent.departure.is_leaving:
            return False
        training = {
            worker.local_rank
            for worker in agent.workers
            if worker.phase is Phase.TRAINING and worker.has_committed and not worker.has_finished
        }
        return len(training) == self._size

    def _start(self, now_s: float) -> None:
        if self._is_automatic:
            shortage = find_shortage(self._init_bytes, list_rooms())
            if shortage is not None:
                self._give_up(f"{shortage}; --spares 1 starts one all the same")
                return
        if self._lowers_nice is None:
            self._lowers_nice = can_take_back_nice()
        self._started_s, self._whole_since_s = now_s, None
        self._due_s = now_s + START_TIMEOUT_S
        self._agent.places.start_spare(lowers_nice=self._lowers_nice)

    def _give_up(self, reason: str) -> None:
        self._wanted, self._due_s = 0, None
        self._agent.recorder.spares_off(reason)

    def _let_go(self) -> None:
        """Give those that have a place now their processor time back."""
        self._held_back = [
            worker for worker in self._held_back if worker.is_alive and not step_forward(worker.pid, self._nice)
        ]
        self._retry_s = self._agent.clock.now_s() + RETRY_S if self._held_back else None


def _pid_in(worker: WorkerProcess, message: Mapping[str, Any]) -> int:
    """The process that called `init()`: the worker itself, or one that a wrapper around the script has started."""
    pid = int(message["pid"])
    try:
        return pid if os.getsid(pid) == worker.pid else worker.pid
    except OSError:
        return worker.pid
