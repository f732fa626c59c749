"""Workers that live and do nothing: found by the time since their last commit, and by asking them where they are.

Nothing is looked at while steps come. When a worker has committed none for longer than its limit, the agent asks it
(`where`); its control thread answers, whatever the main thread does. Whoever waits for other ranks does not hang: the
one they wait for does. A stopped process is told by the kernel, through the fork server that is its parent.

The limit is `--hang-timeout`, or learned: LEARNED_FACTOR times the longest time between two commits so far, at least
SHORTEST_LIMIT_S. What takes long by its nature has more time, or all the time: see `patience`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from elastictrain.agent.supervisor import Phase, WorkerProcess
from elastictrain.log import get_logger

if TYPE_CHECKING:
    from elastictrain.agent.node_agent import NodeAgent

logger = get_logger(__name__)

LEARNED_FACTOR: Final = 20.0
SHORTEST_LIMIT_S: Final = 120.0
STOPPED_LIMIT_S: Final = 30.0
ANSWER_TIMEOUT_S: Final = 5.0
# A later answer tells of a thread that could not run: a call held the interpreter's lock until a moment ago.
PROMPT_S: Final = 0.5
# Beyond this the agent itself did not run (it was stopped with everything else): nothing is known of the workers.
LATE_S: Final = 2.0
FIRST_STEP_FACTOR: Final = 4.0
BUSY_FACTOR: Final = 10.0


@dataclass(slots=True)
class Watched:
    """What is known of one worker. Times are monotonic seconds of the agent."""

    progress_s: float
    due_s: float
    asked_s: float | None = None
    has_committed: bool = False
    stopped_s: float | None = None


def patience(answer: Mapping[str, Any] | None, *, has_committed: bool, is_learned: bool) -> float:
    """How many times the limit a worker may take, by where it is; infinite where it cannot be the one that hangs.

    `answer` None: none came, so something keeps all its threads from running, such as a long call that holds the
    interpreter's lock. With a learned limit, code between steps has all the time: nothing tells how long it takes.
    """
    if answer is None:
        return BUSY_FACTOR
    if answer["waits"] or answer["place"] == "evaluation" or (is_learned and answer["place"] == "between"):
        return math.inf
    if answer["compiles"] or answer["place"] == "save" or (is_learned and answer["place"] == "draw"):
        return BUSY_FACTOR
    return 1.0 if has_committed else FIRST_STEP_FACTOR


class HangWatch:
    """Watches the workers of one node that train; all calls come from the agent's loop."""

    def __init__(self, agent: NodeAgent, limit_s: float | None) -> None:
        self._agent = agent
        self._given_s = limit_s
        self._longest_s = 0.0
        self._watched: dict[str, Watched] = {}

    @property
    def limit_s(self) -> float:
        """How long a worker may go without a commit; infinite where nobody looks."""
        if self._given_s is None:
            return max(SHORTEST_LIMIT_S, LEARNED_FACTOR * self._longest_s)
        return self._given_s or math.inf

    def entered(self, worker: WorkerProcess) -> None:
        """The worker trains, from now on or again."""
        now_s = self._agent.clock.now_s()
        known = self._watched.get(worker.worker_id)
        has_committed = known is not None and known.has_committed
        self._watched[worker.worker_id] = Watched(now_s, now_s + self.limit_s, has_committed=has_committed)

    def committed(self, worker: WorkerProcess) -> None:
        known = self._watched.get(worker.worker_id)
        if known is None:
            return
        now_s = self._agent.clock.now_s()
        if known.has_committed:
            self._longest_s = max(self._longest_s, now_s - known.progress_s)
        known.has_committed, known.progress_s, known.asked_s = True, now_s, None
        known.due_s = now_s + self.limit_s

    def evaluated(self, worker: WorkerProcess) -> None:
        """The worker has done something that is no step and says nothing of how long steps take."""
        known = self._watched.get(worker.worker_id)
        if known is not None:
            known.progress_s, known.asked_s = self._agent.clock.now_s(), None
            known.due_s = known.progress_s + self.limit_s

    def stood_still(self, worker: WorkerProcess, *, is_stopped: bool) -> None:
        """The kernel says that the process was stopped, or that it goes on."""
        known = self._watched.get(worker.worker_id)
        if known is None:
            return
        now_s = self._agent.clock.now_s()
        known.asked_s = None
        if is_stopped:
            known.stopped_s, known.due_s = now_s, now_s + min(self.limit_s, STOPPED_LIMIT_S)
        else:
            known.stopped_s, known.progress_s, known.due_s = None, now_s, now_s + self.limit_s

    def deadline_s(self) -> float | None:
        """When `advance` has something to do, None when nobody trains here."""
        times = [known.due_s for _, known in self._training()]
        nearest = min(times, default=math.inf)
        return None if nearest == math.inf else nearest

    def advance(self) -> None:
        """Look after those that are due."""
        now_s = self._agent.clock.now_s()
        due = [(worker, known) for worker, known in self._training() if now_s >= known.due_s]
        if not due:
            return
        self._agent.supervisor.read_quiet()  # commits may lie there unread
        if any(now_s > known.due_s + LATE_S for _, known in due):
            for _, known in self._training():
                known.progress_s, known.asked_s, known.due_s = now_s, None, now_s + self.limit_s
            return
        for worker, known in due:
            if now_s < known.due_s:
                continue  # it has committed after all
            if known.stopped_s is not None:
                self._end(worker, f"stopped by a signal for {now_s - known.stopped_s:.0f} s", "")
            elif known.asked_s is None:
                known.asked_s, known.due_s = now_s, now_s + ANSWER_TIMEOUT_S
                self._agent.supervisor.send(worker, "where")
            else:
                self._judge(worker, known, None)

    def answered(self, worker: WorkerProcess, answer: Mapping[str, Any]) -> None:
        known = self._watched.get(worker.worker_id)
        if known is not None and known.asked_s is not None and worker.phase is Phase.TRAINING:
            is_prompt = self._agent.clock.now_s() - known.asked_s <= PROMPT_S
            self._judge(worker, known, answer if is_prompt else None)

    def _judge(self, worker: WorkerProcess, known: Watched, answer: Mapping[str, Any] | None) -> None:
        now_s = self._agent.clock.now_s()
        known.asked_s = None
        times = patience(answer, has_committed=known.has_committed, is_learned=self._given_s is None)
        ends_s = known.progress_s + self.limit_s * times
        if now_s < ends_s:
            known.due_s = min(ends_s, now_s + self.limit_s)
            return
        idle_s = now_s - known.progress_s
        if answer is None:
            self._end(worker, f"no commit for {idle_s:.0f} s, and none of its threads answers", "")
        else:
            where = {"draw": "while it drew a batch", "between": "between two steps"}.get(answer["place"], "in a step")
            self._end(worker, f"no commit for {idle_s:.0f} s, {where}, waiting for nobody", str(answer["stack"]))

    def _end(self, worker: WorkerProcess, why: str, stack: str) -> None:
        """Fence first: the others need not wait until the process is gone."""
        logger.error("worker %s (rank %s) hangs: %s; it is killed", worker.worker_id, worker.rank, why)
        worker.hang, worker.hang_stack = why, stack
        del self._watched[worker.worker_id]
        self._agent.recovery.detected(worker)
        self._agent.mark_broken(worker, "worker_hung", why)
        self._agent.kill_hung(worker)

    def _training(self) -> list[tuple[WorkerProcess, Watched]]:
        found = []
        for worker in self._agent.workers:
            known = self._watched.get(worker.worker_id)
            if known is None:
                continue
            if not worker.is_alive or worker.has_finished:
                del self._watched[worker.worker_id]
            elif worker.phase is Phase.TRAINING:
                found.append((worker, known))
        return found
