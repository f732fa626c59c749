"""What to do about a failed worker: start it again or give up. Pure: budget and failure in, decision and reason out."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

MAX_FAILURES_WITHOUT_PROGRESS: Final = 3


class Action(Enum):
    RESTART = "restart"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a worker ended. `step` is the step it was trying, None before its first.

    `incident` is equal for workers that ended together: the generation in which they trained, or for those that had not
    entered one, 0 and the number of the attempt at starting. None: an incident of its own.
    """

    worker_id: str
    rank: int | None
    exit_code: int
    step: int | None = None
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    is_config: bool = False
    hang: str = ""
    """How the agent found that it hung, where that is why it was killed."""
    incident: tuple[int, int] | None = None

    @property
    def cause(self) -> str:
        """One word of a closed set, for metrics and the ledger."""
        if self.error_type:
            return "exception"
        if self.hang:
            return "hang"
        return "signal" if self.exit_code < 0 else "exit"

    def describe(self) -> str:
        """How it ended, in words."""
        if self.error_type:
            return f"{self.error_type}: {self.message}" if self.message else self.error_type
        if self.hang:
            return f"hung: {self.hang}"
        if self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name if -self.exit_code in signal.valid_signals() else "?"
            hint = ", possibly out of memory" if name == "SIGKILL" else ""
            return f"ended by signal {-self.exit_code} ({name}{hint})"
        if self.exit_code == 0:
            return "exit code 0 while the others train on"
        return f"exit code {self.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What is left to fail. `max_restarts` None: no total, but MAX_FAILURES_WITHOUT_PROGRESS in a row end the run."""

    max_restarts: int | None
    num_failures: int = 0
    without_progress: int = 0
    last_progress_step: int = -1
    last_exception: tuple[str, int | None] | None = None
    last_incident: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    budget: Budget
    action: Action
    reason: str


def decide(budget: Budget, failure: Failure, *, committed_step: int) -> Decision:
    """Charge `failure` to the budget. `committed_step` is the newest committed step of the run, 0 before the first.

    Workers that end together are charged once: what kills them all at one moment would be the end of the run otherwise.
    """
    is_charged = failure.incident is not None and failure.incident == budget.last_incident
    if not is_charged:
        has_progress = committed_step > budget.last_progress_step
        budget = replace(
            budget,
            num_failures=budget.num_failures + 1,
            without_progress=1 if has_progress else budget.without_progress + 1,
            last_progress_step=max(committed_step, budget.last_progress_step),
            last_incident=failure.incident,
        )
    if failure.is_config:
        return Decision(budget=budget, action=Action.STOP, reason="wrong use does not get better by trying again")
    if failure.error_type:
        exception = (failure.error_type, failure.step)
        is_repeated = budget.last_exception == exception and not is_charged
        budget = replace(budget, last_exception=exception)
        if is_repeated:
            where = "before the first step" if failure.step is None else f"at step {failure.step}"
            return Decision(
                budget=budget, action=Action.STOP, reason=f"the same exception came twice {where}: it would come again"
            )
    if budget.max_restarts is not None:
        if budget.num_failures > budget.max_restarts:
            return Decision(
                budget=budget,
                action=Action.STOP,
                reason=f"all {budget.max_restarts} restarts (--max-restarts) are used up",
            )
        reason = f"restart {budget.num_failures} of {budget.max_restarts}"
        return Decision(budget=budget, action=Action.RESTART, reason=reason)
    if budget.without_progress >= MAX_FAILURES_WITHOUT_PROGRESS:
        return Decision(
            budget=budget,
            action=Action.STOP,
            reason=f"{budget.without_progress} failures in a row without a newly committed step",
        )
    return Decision(budget=budget, action=Action.RESTART, reason=f"restart {budget.num_failures}")
