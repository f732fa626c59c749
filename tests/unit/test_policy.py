"""The budget of failures: what is charged, and when the run ends."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastictrain.agent.policy import Action, Budget, Decision, Failure, decide


def failure(**fields: Any) -> Failure:
    return Failure(**{"worker_id": "w", "rank": 0, "exit_code": -9, **fields})


def charge(*failures: tuple[Failure, int], max_restarts: int | None = None) -> Decision:
    decision = Decision(budget=Budget(max_restarts=max_restarts), action=Action.RESTART, reason="")
    for one, step in failures:
        decision = decide(decision.budget, one, committed_step=step)
    return decision


def test_run_ends_when_three_failures_in_a_row_bring_no_step() -> None:
    assert charge((failure(), 5), (failure(), 5)).action is Action.RESTART
    decision = charge((failure(), 5), (failure(), 5), (failure(), 5))
    assert decision.action is Action.STOP
    assert "3 failures in a row" in decision.reason


def test_run_goes_on_when_steps_are_committed_between_failures() -> None:
    assert charge(*[(failure(), step) for step in range(50)]).action is Action.RESTART


def test_workers_that_end_together_are_charged_once_when_all_die_at_one_moment() -> None:
    together = [(failure(rank=rank, incident=(4, 0)), 7) for rank in range(8)]
    decision = charge(*together)
    assert decision.action is Action.RESTART
    assert decision.budget.num_failures == 1
    again = [(failure(rank=rank, incident=(generation, 0)), 7) for generation in (4, 5, 6) for rank in range(8)]
    assert charge(*again).action is Action.STOP
    assert charge(*together, max_restarts=1).action is Action.RESTART


def test_run_ends_when_the_same_exception_comes_twice_at_one_step() -> None:
    first = failure(exit_code=1, error_type="ValueError", step=3, incident=(1, 0))
    second = failure(exit_code=1, error_type="ValueError", step=3, incident=(2, 0))
    assert charge((first, 3), (first, 3)).action is Action.RESTART, "two ranks raise it at one moment"
    decision = charge((first, 3), (second, 3))
    assert decision.action is Action.STOP
    assert "at step 3" in decision.reason
    other = failure(exit_code=1, error_type="ValueError", step=4, incident=(2, 0))
    assert charge((first, 3), (other, 4)).action is Action.RESTART


def test_run_ends_at_once_when_the_program_is_used_wrongly() -> None:
    assert charge((failure(exit_code=1, error_type="ConfigError", is_config=True), 9)).action is Action.STOP


def test_run_ends_when_max_restarts_are_used_up_even_with_progress() -> None:
    failures = [(failure(), step) for step in range(3)]
    assert charge(*failures[:2], max_restarts=2).action is Action.RESTART
    assert charge(*failures, max_restarts=2).action is Action.STOP
    assert charge(failures[0], max_restarts=0).action is Action.STOP


def test_failure_says_how_it_ended_when_described() -> None:
    assert "SIGKILL" in failure().describe()
    assert failure().cause == "signal"
    assert failure(exit_code=3).describe() == "exit code 3"
    assert failure(exit_code=3).cause == "exit"
    assert failure(exit_code=-250).describe() == "ended by signal 250 (?)"
    told = failure(exit_code=1, error_type="KeyError", message="'x'")
    assert (told.cause, told.describe()) == ("exception", "KeyError: 'x'")


@given(
    st.lists(
        st.tuples(
            st.sampled_from([-9, 1, 0, -11]),
            st.sampled_from(["", "ValueError", "OSError"]),
            st.one_of(st.none(), st.integers(0, 3)),
            st.integers(0, 5),
            st.one_of(st.none(), st.tuples(st.integers(0, 2), st.integers(0, 1))),
        ),
        max_size=20,
    ),
    st.one_of(st.none(), st.integers(0, 3)),
)
def test_policy_has_an_answer_with_a_reason_when_anything_fails(
    failures: list[tuple[int, str, int | None, int, tuple[int, int] | None]], max_restarts: int | None
) -> None:
    budget = Budget(max_restarts=max_restarts)
    for code, kind, step, committed, incident in failures:
        one = failure(exit_code=code, error_type=kind, step=step, incident=incident)
        decision = decide(budget, one, committed_step=committed)
        assert decision.reason
        assert decision.budget.num_failures - budget.num_failures in (0, 1)
        if max_restarts is not None and decision.action is Action.RESTART:
            assert decision.budget.num_failures <= max_restarts
        budget = decision.budget
