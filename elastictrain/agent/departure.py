"""Leaving on a signal: workers stop behind the same committed step, one of them saves it, and the agent ends resumable.

    hold      every worker in the round says which step it has begun, and begins no other
    stop_at   all commit the furthest of these, then stand still; those of a broken round stand still anyway
    save      one that holds the newest step saves it, if that is not done yet

With other nodes in the round the agents agree on the step (a plan in the store), the others train on without this node,
and it saves what it holds all the same: they may be leaving too.

The first signal asks; `--grace-period-s` is how long that may take. A second signal ends everything at once. A script
that does not join gets the signal itself and `--shutdown-timeout` seconds.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from elastictrain.agent.membership import seated
from elastictrain.agent.supervisor import Phase, WorkerProcess
from elastictrain.clock import Deadline
from elastictrain.log import get_logger
from elastictrain.rendezvous import events as ev

if TYPE_CHECKING:
    from elastictrain.agent.node_agent import NodeAgent

logger = get_logger(__name__)

EXIT_PREEMPTED: Final = 75


class Departure:
    """What happens between a signal to the agent and its end."""

    def __init__(self, agent: NodeAgent) -> None:
        self._agent = agent
        self._deadline: Deadline | None = None
        self._signal: signal.Signals | None = None
        self._held_generation = 0
        self._by_plan = False
        self._saver: WorkerProcess | None = None

    @property
    def is_leaving(self) -> bool:
        return self._signal is not None

    @property
    def decides_alone(self) -> bool:
        """Whether the step to stop at is this node's own affair: no other node trains with it."""
        return self._signal is not None and not self._by_plan

    @property
    def publishes(self) -> bool:
        """Whether the other nodes are still told of the workers here: they wait for these to park."""
        return not self.decides_alone

    @contextlib.contextmanager
    def watching_signals(self, selector: selectors.BaseSelector) -> Iterator[None]:
        """Take the configured signals into the loop while the block runs; only in a process's main thread."""
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        handled = [signal.Signals[name] for name in self._agent.config.signals_to_handle]
        previous: dict[signal.Signals, object] = {}
        old_wakeup = -1
        try:
            try:
                old_wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
                for number in handled:
                    previous[number] = signal.signal(number, lambda *_: None)
            except ValueError:
                logger.info("not the main thread: signals keep their meaning for the calling program")
            selector.register(read_end, selectors.EVENT_READ, lambda: self._take_signals(read_end, set(handled)))
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            if previous:
                signal.set_wakeup_fd(old_wakeup)
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(read_end)
            os.close(read_end)
            os.close(write_end)

    def _take_signals(self, read_end: int, handled: set[signal.Signals]) -> None:
        with contextlib.suppress(BlockingIOError):
            for byte in os.read(read_end, 64):
                if byte in handled:
                    self.begin(signal.Signals(byte))

    def begin(self, number: signal.Signals) -> None:
        """The node leaves. A second call ends it at once."""
        agent = self._agent
        if self._signal is not None:
            logger.warning("%s again: ending at once", number.name)
            agent.ending.end(128 + number, f"ended by a second {number.name}")
            return
        self._signal = number
        agent.spares.stop()
        members = seated(agent.workers, agent.round)
        if not members:
            limit_s = agent.config.shutdown_timeout_s
            self._deadline = Deadline.after("--shutdown-timeout", limit_s, agent.clock)
            logger.info("%s: passed on to the workers, which have %.0f s to end", number.name, limit_s)
            for worker in agent.workers:
                if worker.is_alive:
                    agent.kill(worker, number)
            return
        assert agent.round is not None
        self._by_plan = len(agent.round.node_ids) > 1
        if self._by_plan:
            agent.driver.handle(ev.LeaveRun(reason=f"{number.name} to the agent"))
        limit_s = agent.config.grace_period_s
        self._deadline = Deadline.after("--grace-period-s", limit_s, agent.clock)
        logger.info("%s: stopping at a step and saving it, %.0f s at most", number.name, limit_s)

    def positions_known(self, generation: int, step: int) -> None:
        """Every worker has said how far it is: all commit `step`, then stand still."""
        agent = self._agent
        for worker in seated(agent.workers, agent.round):
            agent.supervisor.send(worker, "stop_at", generation=generation, step=step)

    def advance(self) -> None:
        """Do what comes next, if it is time for it; called in every turn of the loop."""
        if self._signal is None or self._deadline is None:
            return
        agent = self._agent
        if self._deadline.has_passed(agent.clock):
            logger.warning("%s is over: ending now, the newest checkpoint is what stays", self._deadline.name)
            self._finish(128 + self._signal, f"ended by {self._signal.name}")
        elif not agent.supervisor.alive():
            agent.ending.end_if_done()  # the signal came when training was over
            self._finish(self._exit_code, f"ended by {self._signal.name}")
        elif members := self._members():
            if not self._by_plan:
                self._hold(members)
            if all(worker.phase is Phase.PARKED for worker in members):
                self._save(members)

    def _members(self) -> list[WorkerProcess]:
        """The workers that are to stand still: those in the round, or that were in it when the others went on."""
        agent = self._agent
        members = seated(agent.workers, agent.round)
        if not members and self._by_plan:
            return [worker for worker in agent.supervisor.alive() if worker.phase is Phase.PARKED]
        return members

    @property
    def _exit_code(self) -> int:
        assert self._signal is not None
        return EXIT_PREEMPTED if self._signal is signal.SIGTERM else 128 + self._signal

    def _hold(self, members: list[WorkerProcess]) -> None:
        """Ask the workers of the round where they are; again when a round came that was agreed on before the signal."""
        agent = self._agent
        generation = agent.round.generation if agent.round is not None else 0
        if generation == self._held_generation:
            return
        self._held_generation = generation
        for worker in members:
            worker.position = None
            agent.supervisor.send(worker, "hold", generation=generation)

    def _save(self, members: list[WorkerProcess]) -> None:
        """All stand still: what is the newest step that one of them holds, and is it saved?"""
        holders = [worker for worker in members if worker.holds_state]
        best = max(holders, key=lambda worker: worker.step, default=None)
        if best is None or best.step in (0, self._agent.saved_step):
            self.saved()
        elif self._saver is None or not self._saver.is_alive:
            self._saver = best
            self._agent.supervisor.send(best, "save")

    def saved(self, error: str = "") -> None:
        """The last step is saved, or cannot be."""
        if self._signal is None or (self._saver is None and error):
            return
        step = self._agent.recorder.committed_step
        lost = f", which could not be saved ({error})" if error else ""
        others = "the other nodes go on" if self._by_plan else "`elastictrain resume` continues the run"
        reason = f"stopped by {self._signal.name} at step {step}{lost}; {others}"
        self._finish(self._exit_code, reason)

    def _finish(self, exit_code: int, reason: str) -> None:
        self._deadline = None
        self._agent.ending.end(exit_code, reason)

    def deadline_s(self) -> float | None:
        return self._deadline.at_s if self._deadline is not None else None
