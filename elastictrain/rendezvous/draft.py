"""A transition in the making: what the steps of a decision change, emit and want to be woken for. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from elastictrain.rendezvous.events import Effect
from elastictrain.rendezvous.state import State

_NAMES = tuple(one.name for one in fields(State))


@dataclass(slots=True)
class Draft:
    """Lives only inside one call of `advance`.

    The first change makes a copy of the state, which is this draft's own: the next ones are made in it.
    """

    state: State
    now_s: float
    effects: list[Effect] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    deadlines_s: list[float] = field(default_factory=list)
    is_own: bool = False

    def change(self, **values: Any) -> None:
        # A copy of the state is what a transition costs most, and most steps find nothing new.
        if all(getattr(self.state, name) == value for name, value in values.items()):
            return
        if not self.is_own:
            self.state, self.is_own = _copy(self.state), True
        for name, value in values.items():
            object.__setattr__(self.state, name, value)

    def emit(self, *effects: Effect, reason: str) -> None:
        self.effects.extend(effects)
        self.reasons.append(reason)


def _copy(state: State) -> State:
    """As `dataclasses.replace`, which takes three times as long for so many fields."""
    copy = object.__new__(State)
    for name in _NAMES:
        object.__setattr__(copy, name, getattr(state, name))
    return copy
