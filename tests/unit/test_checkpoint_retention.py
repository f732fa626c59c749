"""Retention: rules with reasons, and floors that no rule can lower."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint.layout import Condition
from elastictrain.checkpoint.retention import Kept, keep_every, keep_latest, plan_prune
from elastictrain.errors import ConfigError

TORN, DAMAGED = Condition.TORN, Condition.DAMAGED


def steps(plan: list[tuple[Kept, str]]) -> list[int]:
    return [kept.step for kept, _ in plan]


def test_plan_removes_the_oldest_first_with_reasons_when_more_than_kept() -> None:
    plan = plan_prune([Kept(step) for step in (30, 10, 50, 20, 40)], [keep_latest(3)])
    assert plan == [
        (Kept(10), "4 intact checkpoints are newer, 3 are kept"),
        (Kept(20), "3 intact checkpoints are newer, 3 are kept"),
    ]


def test_plan_keeps_two_intact_when_the_rule_asks_for_one() -> None:
    assert steps(plan_prune([Kept(10), Kept(20), Kept(30)], [keep_latest(1)])) == [10]
    assert plan_prune([Kept(10), Kept(20)], [keep_latest(1)]) == []


def test_plan_counts_only_intact_ones_when_newer_folders_are_bad() -> None:
    found = [Kept(10), Kept(20), Kept(30, condition=DAMAGED), Kept(40, condition=TORN), Kept(50, condition=DAMAGED)]
    assert plan_prune(found, [keep_latest(1)]) == []


def test_plan_keeps_what_any_rule_keeps_when_rules_are_many() -> None:
    found = [Kept(step) for step in (100, 150, 200, 250, 300)]
    plan = plan_prune(found, [keep_latest(1), keep_every(100)])
    assert steps(plan) == [150]
    assert plan[0][1] == "3 intact checkpoints are newer, 1 are kept; step is no multiple of 100"


def test_plan_sweeps_torn_folders_when_an_intact_one_is_newer() -> None:
    found = [Kept(10, condition=TORN), Kept(20, condition=TORN), Kept(20, attempt=1), Kept(30, condition=TORN)]
    assert plan_prune(found, [keep_latest(3)]) == [
        (Kept(10, condition=TORN), "torn, and step 20 is intact"),
        (Kept(20, condition=TORN), "torn, and step 20 is intact"),
    ]
    assert steps(plan_prune(found, [keep_latest(3)], writing=(10, 0))) == [20]


def test_plan_spares_the_checkpoint_just_written_when_the_run_went_back() -> None:
    found = [Kept(150), Kept(200), Kept(300)]
    assert steps(plan_prune(found, [keep_latest(1)])) == [150]
    assert plan_prune(found, [keep_latest(1)], writing=(150, 0)) == []


@pytest.mark.parametrize("rule", [keep_latest, keep_every])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "3", None])
def test_rule_is_refused_when_it_would_keep_nothing(rule: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match="whole number from 1"):
        rule(value)


kept = st.builds(Kept, st.integers(0, 12), st.integers(0, 2), st.sampled_from(Condition))


@settings(deadline=None, database=None)
@given(
    st.lists(kept, unique_by=lambda each: each.place),
    st.lists(st.builds(keep_latest, st.integers(1, 4)) | st.builds(keep_every, st.integers(1, 5)), max_size=3),
)
def test_plan_never_touches_the_newest_two_or_a_damaged_one_when_anything_is_found(found: Any, policies: Any) -> None:
    plan = plan_prune(found, policies)
    gone = {each.place for each, _ in plan}
    intact = sorted(each.place for each in found if each.condition is Condition.INTACT)
    assert not gone & set(intact[-2:])
    assert not any(each.condition is DAMAGED for each, _ in plan)
    assert all(reason for _, reason in plan)
    assert not any(each.condition is TORN and (not intact or each.place > intact[-1]) for each, _ in plan)
    assert not plan_prune([each for each in found if each.place not in gone], policies), "a plan is complete in one go"
