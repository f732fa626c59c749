"""What is written to the store comes back, and nonsense is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastictrain.errors import ConfigError, StoreError
from elastictrain.rendezvous.records import Broken, Closed, Keys, Member, Plan, Position, Settings
from elastictrain.topology import Candidate

MEMBER = Member(
    node_id="a",
    host="10.0.0.1",
    store_port=29500,
    incarnation=2,
    candidates=(Candidate(worker_id="a0", node_id="a", local_rank=0),),
    settled=3,
    position=Position(generation=3, step=41),
    wants_in=True,
    expected=1,
)


@pytest.mark.parametrize(
    "record",
    [
        MEMBER,
        Member(node_id="b", host="b", store_port=1),
        Broken(generation=1, cause="worker_died", node_id="a", worker_id="a0", detail="SIGKILL", planned=True),
        Plan(generation=4, kind="leave", node_id="a"),
        Closed(reason="done", node_id="a"),
    ],
)
def test_record_comes_back_as_it_was_when_it_went_through_json(record: Any) -> None:
    assert type(record).from_json(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"node_id": 7},
        {"settled": -1},
        {"settled": True},
        {"store_port": "29500"},
        {"candidates": None},
        {"candidates": ["a0"]},
        {"candidates": [{"worker_id": "a0"}]},
        {"position": 5},
        {"position": {"generation": 1}},
    ],
)
def test_member_is_refused_when_it_is_malformed(change: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="malformed member in the store: expected") as caught:
        Member.from_json({**MEMBER.to_json(), **change})
    assert not caught.value.retryable


@pytest.mark.parametrize("kind", [Broken, Plan, Closed])
def test_record_is_refused_when_a_field_is_missing(kind: Any) -> None:
    with pytest.raises(StoreError, match="malformed"):
        kind.from_json({"version": 1})


@pytest.mark.parametrize(
    "values",
    [
        {"run_id": ""},
        {"run_id": "a/b"},
        {"min_nodes": 0},
        {"min_nodes": 3, "max_nodes": 2},
        {"min_world_size": 0},
        {"ttl_s": 0.0},
        {"takeover_s": -1.0},
        {"join_timeout_s": float("nan")},
    ],
)
def test_settings_are_refused_when_they_make_no_sense(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Settings(**{"run_id": "run", **values})


def test_keys_lie_under_the_run() -> None:
    keys = Keys("mnist")
    assert keys.member("a") == "/elastictrain/mnist/members/a"
    assert keys.round(3) == "/elastictrain/mnist/round/3"
    with pytest.raises(ConfigError):
        keys.member("a/b")
