"""The sample order, pinned: a change here changes what a stored cursor means, and needs a new ORDER_VERSION."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elastictrain.data.order import Plan, extend, extend_each, mix, permute, share
from elastictrain.errors import ConfigError, DataError


def test_mix_gives_pinned_values_when_called() -> None:
    assert mix() == 0
    assert mix(0) == 16294208416658607535
    assert mix(1, 2, 3) == 16914669369030367833
    assert mix(-1) == mix(2**64 - 1) == 15999695513772384452
    assert extend(mix(1, 2), 3) == mix(1, 2, 3) != mix(3, 2, 1)


def test_extend_each_equals_extend_when_given_many_values() -> None:
    values = np.array([0, 1, 2, 5000, 2**62], dtype=np.int64)
    assert extend_each(mix(9), values) == [extend(mix(9), int(value)) for value in values]


@pytest.mark.parametrize(
    ("length", "seed", "epoch", "positions", "expected"),
    [
        (7, 0, 0, range(7), [3, 4, 5, 0, 1, 2, 6]),
        (7, 0, 1, range(7), [6, 2, 3, 5, 4, 0, 1]),
        (5000, 12, 3, range(6), [3031, 2796, 2083, 4334, 3156, 3052]),
        (65536, 12, 3, range(6), [21808, 55417, 23456, 41634, 42827, 48913]),
        (65537, 12, 3, range(6), [8062, 19990, 33746, 64179, 53315, 55681]),
        (10**9, 12, 3, (0, 1, 2, 10**9 - 1), [218574056, 415939001, 583426677, 121242968]),
    ],
)
def test_permute_gives_pinned_order_when_called(
    length: int, seed: int, epoch: int, positions: range, expected: list[int]
) -> None:
    assert permute(np.array(positions), length=length, seed=seed, epoch=epoch).tolist() == expected


def test_permute_keeps_the_shape_when_positions_are_empty_or_two_dimensional() -> None:
    assert permute(np.empty(0, dtype=np.int64), length=3, seed=0, epoch=0).shape == (0,)
    assert permute(np.arange(6).reshape(2, 3), length=100_000, seed=0, epoch=0).shape == (2, 3)


@pytest.mark.parametrize("position", [-1, 10])
def test_permute_refuses_when_a_position_is_outside(position: int) -> None:
    with pytest.raises(DataError, match=r"0\.\.9"):
        permute(np.array([0, position]), length=10, seed=0, epoch=0)


def test_plan_cuts_batches_when_the_length_does_not_divide() -> None:
    short, drop = Plan(10, 4), Plan(10, 4, tail="drop")
    assert (short.steps_per_epoch, short.epoch_length) == (3, 10)
    assert [short.batch_range(number) for number in range(3)] == [(0, 4), (4, 8), (8, 10)]
    assert (drop.steps_per_epoch, drop.epoch_length) == (2, 8)
    assert Plan(3, 10).batch_range(0) == (0, 3)
    with pytest.raises(DataError, match=r"0\.\.2"):
        short.batch_range(3)


def test_plan_gives_indices_in_place_when_not_shuffled() -> None:
    assert Plan(10, 4, shuffle=False).indices(5, 8, 10) == [8, 9]


def test_plan_indices_equal_permute_when_a_batch_spans_blocks() -> None:
    for length in (10_000, 70_000):
        plan = Plan(length, 9000, seed=4)
        assert plan.indices(2, 100, 9100) == permute(np.arange(100, 9100), length=length, seed=4, epoch=2).tolist()


def test_plan_refuses_when_positions_or_epoch_are_outside() -> None:
    for arguments in ((0, 5, 11), (0, 6, 5), (-1, 0, 5), (0, -1, 5)):
        with pytest.raises(DataError):
            Plan(10, 4).indices(*arguments)


def test_plan_identity_names_everything_the_order_depends_on_when_stored() -> None:
    assert Plan(10, 4, seed=3).identity() == {
        "order": 1,
        "length": 10,
        "batch_size": 4,
        "shuffle": True,
        "seed": 3,
        "tail": "short",
    }


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"tail": "stream"}, "tail"),
        ({"tail": "pad"}, "tail"),
    ],
)
def test_plan_names_the_option_when_it_is_wrong(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Plan(**{"length": 10, "batch_size": 4, **options})
    assert caught.value.field == field
    assert field in str(caught.value)


def test_plan_refuses_when_no_batch_can_be_formed() -> None:
    with pytest.raises(DataError, match="has 0 samples"):
        Plan(0, 4)
    with pytest.raises(DataError, match="less than one batch of 4"):
        Plan(3, 4, tail="drop")


def test_share_is_empty_when_there_are_more_ranks_than_samples() -> None:
    assert [share(10, 12, rank=rank, world_size=3) for rank in range(3)] == [(10, 10), (10, 11), (11, 12)]


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_share_refuses_when_rank_is_outside_the_world(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        share(0, 10, rank=rank, world_size=world_size)
    assert caught.value.field == "rank"
