"""How long a worker may be silent, by where it says it is."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elastictrain.agent.hang import BUSY_FACTOR, FIRST_STEP_FACTOR, patience


def answer(place: str = "step", **values: Any) -> dict[str, Any]:
    return {"place": place, "waits": False, "compiles": False, "stack": "", **values}


@pytest.mark.parametrize(
    ("told", "learned", "given"),
    [
        (answer(), 1.0, 1.0),
        (answer(waits=True), math.inf, math.inf),
        (answer("evaluation"), math.inf, math.inf),
        (answer("between"), math.inf, 1.0),
        (answer("draw"), BUSY_FACTOR, 1.0),
        (answer("save"), BUSY_FACTOR, BUSY_FACTOR),
        (answer(compiles=True), BUSY_FACTOR, BUSY_FACTOR),
        (None, BUSY_FACTOR, BUSY_FACTOR),
    ],
)
def test_patience_follows_from_what_the_worker_does(told: dict[str, Any] | None, learned: float, given: float) -> None:
    assert patience(told, has_committed=True, is_learned=True) == learned
    assert patience(told, has_committed=True, is_learned=False) == given


def test_first_step_may_take_longer_than_others() -> None:
    assert patience(answer(), has_committed=False, is_learned=True) == FIRST_STEP_FACTOR
