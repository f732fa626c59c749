"""Seats and Rounds: the cases that the property tests do not name."""

from __future__ import annotations

import json

import pytest

from elastictrain.errors import ConfigError
from elastictrain.topology import Candidate, Round, assign_seats

ROUND = {
    "version": 2,
    "generation": 1,
    "store_host": "h",
    "store_port": 1,
    "nodes": ["n"],
    "workers": ["w"],
    "at": [0],
    "local_ranks": [0],
    "streams": [0],
}


def workers(*names: str) -> list[Candidate]:
    return [Candidate(worker_id=name, node_id=name[0], local_rank=0) for name in names]


def test_places_close_up_when_nobody_fills_them() -> None:
    after = assign_seats(assign_seats((), workers("a", "b", "c")), workers("a", "c"))
    assert [(s.worker_id, s.rank, s.stream) for s in after] == [("a", 0, 0), ("c", 1, 2)]


def test_second_newcomer_takes_the_lowest_free_stream_when_only_one_place_is_vacant() -> None:
    after = assign_seats(assign_seats((), workers("a", "b")), workers("b", "x", "y"))
    assert [(s.worker_id, s.rank, s.stream) for s in after] == [("x", 0, 0), ("b", 1, 1), ("y", 2, 2)]


def test_seats_are_refused_when_a_worker_is_named_twice() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        assign_seats((), workers("a", "a"))


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"version": 1},
        {"version": 2},
        {**ROUND, "workers": ["w", "w2"]},
        {**ROUND, "at": [1]},
        {**ROUND, "streams": 3},
        {**ROUND, "generation": "x"},
    ],
)
def test_round_is_refused_when_its_json_is_of_another_version_or_malformed(value: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="round"):
        Round.from_json(value)


def test_round_names_nodes_by_lowest_rank_and_finds_seats_when_asked() -> None:
    made = Round(generation=1, seats=assign_seats((), workers("b1", "a1", "b2")), store_host="h", store_port=1)
    assert made.node_ids == ("b", "a")
    assert made.world_size == 3
    seat = made.seat_of("a1")
    assert seat is not None
    assert seat.rank == 1
    assert made.seat_of("zz") is None
    assert Round.from_json(json.loads(json.dumps(made.to_json()))) == made
