"""Which checkpoints may go: small rules that each answer with a reason, and floors that no rule can lower. Pure.

Only intact checkpoints count. A damaged one is never deleted here: it may be a newer version's, and people may want to
look at it. A torn one is garbage as soon as an intact one comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastictrain.checkpoint.layout import Condition
from elastictrain.errors import ConfigError

FLOOR = 2


@dataclass(frozen=True, slots=True)
class Kept:
    """One checkpoint folder; its `place` orders by age: step, then attempt at that step."""

    step: int
    attempt: int = 0
    condition: Condition = Condition.INTACT

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.attempt


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rule says about one checkpoint."""

    keep: bool
    reason: str


Policy = Callable[[Kept, int], Verdict]
"""(an intact checkpoint, how many intact ones are newer) -> Verdict. A checkpoint that any rule keeps is kept."""


def keep_latest(count: int) -> Policy:
    """Keep the newest `count` (at least 1). Raises ConfigError otherwise."""
    if type(count) is not int or count < 1:
        raise ConfigError(f"keep: expected a whole number from 1, saw {count!r}", field="keep", seen=count)

    def judge(kept: Kept, num_newer: int) -> Verdict:
        if num_newer < count:
            return Verdict(True, f"among the newest {count}")
        return Verdict(False, f"{num_newer} intact checkpoints are newer, {count} are kept")

    return judge


def keep_every(steps: int) -> Policy:
    """Keep those whose step is a multiple of `steps` (at least 1). Raises ConfigError otherwise."""
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"keep_every: expected a whole number from 1, saw {steps!r}", field="keep_every", seen=steps)

    def judge(kept: Kept, num_newer: int) -> Verdict:
        if kept.step % steps == 0:
            return Verdict(True, f"step is a multiple of {steps}")
        return Verdict(False, f"step is no multiple of {steps}")

    return judge


def plan_prune(
    found: Sequence[Kept], policies: Sequence[Policy], *, writing: tuple[int, int] | None = None
) -> list[tuple[Kept, str]]:
    """Return what may be deleted, oldest first, each with the reason.

    The two newest intact ones always stay, and so does `writing`, the (step, attempt) of a save under way or just done:
    it need not be the newest, after a run went back to an earlier step. A torn folder goes when it is older than the
    newest intact one. Without policies, no intact one goes.
    """
    intact = sorted((kept for kept in found if kept.condition is Condition.INTACT), key=_age, reverse=True)
    plan: list[tuple[Kept, str]] = []
    for num_newer, kept in enumerate(intact):
        verdicts = [judge(kept, num_newer) for judge in policies]
        if num_newer >= FLOOR and verdicts and not any(verdict.keep for verdict in verdicts):
            plan.append((kept, "; ".join(verdict.reason for verdict in verdicts)))
    for kept in found:
        if kept.condition is Condition.TORN and intact and kept.place < intact[0].place:
            plan.append((kept, f"torn, and step {intact[0].step} is intact"))
    plan = [entry for entry in plan if entry[0].place != writing]
    return sorted(plan, key=lambda entry: _age(entry[0]))


def _age(kept: Kept) -> tuple[int, int]:
    return kept.place
