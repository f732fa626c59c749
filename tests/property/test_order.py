"""Properties of the sample order: one-to-one, exact over any history of worlds, and shuffled well."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastictrain.data.order import SORTED_LENGTH, Plan, permute, share

seeds = st.integers(-(2**63), 2**64 - 1)
epochs = st.integers(0, 10**6)


@given(length=st.integers(1, 3000), seed=seeds, epoch=epochs)
def test_permute_is_one_to_one_when_epoch_is_short(length: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(length), length=length, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(length))


@settings(max_examples=25, deadline=None)
@given(length=st.integers(SORTED_LENGTH - 2, 4 * SORTED_LENGTH), seed=seeds, epoch=epochs)
def test_permute_is_one_to_one_when_epoch_is_long(length: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(length), length=length, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(length))


@given(length=st.integers(1, 2**62), seed=seeds, epoch=epochs, data=st.data())
def test_permute_gives_one_sample_the_same_index_when_asked_alone(
    length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    if length <= SORTED_LENGTH:
        length += SORTED_LENGTH
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True))
    together = permute(np.array(positions), length=length, seed=seed, epoch=epoch).tolist()
    alone = [int(permute(np.array(position), length=length, seed=seed, epoch=epoch)) for position in positions]
    assert together == alone
    assert len(set(together)) == len(positions)
    assert all(0 <= index < length for index in together)


@given(start=st.integers(0, 10**9), count=st.integers(0, 10**4), world_size=st.integers(1, 300))
def test_shares_tile_the_batch_when_world_has_any_size(start: int, count: int, world_size: int) -> None:
    parts = [share(start, start + count, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert parts[0][0] == start
    assert parts[-1][1] == start + count
    assert all(left[1] == right[0] for left, right in pairwise(parts))
    sizes = [stop - first for first, stop in parts]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(
    length=st.integers(1, 400),
    batch_size=st.integers(1, 60),
    shuffle=st.booleans(),
    seed=seeds,
    epoch=epochs,
    tail=st.sampled_from(["short", "drop"]),
    data=st.data(),
)
def test_epoch_uses_each_sample_once_when_world_changes_at_any_step(
    length: int, batch_size: int, shuffle: bool, seed: int, epoch: int, tail: str, data: st.DataObject
) -> None:
    if tail == "drop":
        length = max(length, batch_size)
    plan = Plan(length, batch_size, shuffle=shuffle, seed=seed, tail=tail)  # type: ignore[arg-type]
    used: Counter[int] = Counter()
    for number in range(plan.steps_per_epoch):
        world_size = data.draw(st.integers(1, 7))
        start, stop = plan.batch_range(number)
        resumed = Plan(**{key: value for key, value in plan.identity().items() if key != "order"})
        for rank in range(world_size):
            used.update(resumed.indices(epoch, *share(start, stop, rank=rank, world_size=world_size)))
    assert set(used.values()) == {1}
    assert len(used) == plan.epoch_length == (length if tail == "short" else length // batch_size * batch_size)
    assert set(used) <= set(range(length))


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def test_permute_draws_all_orders_alike_when_length_is_tiny() -> None:
    """All 120 orders of 5 samples over 12000 epochs; chi-square of 119 degrees, 5 standard deviations."""
    seen = Counter(tuple(permute(np.arange(5), length=5, seed=7, epoch=epoch).tolist()) for epoch in range(12_000))
    assert len(seen) == 120
    assert abs(chi_square(np.array(list(seen.values()))) - 119) < 5 * np.sqrt(2 * 119)


def test_permute_puts_samples_anywhere_alike_when_epochs_pass() -> None:
    counts = np.zeros((48, 48))
    for epoch in range(2000):
        counts[np.arange(48), permute(np.arange(48), length=48, seed=1, epoch=epoch)] += 1
    degrees = 47 * 47
    assert abs(chi_square(counts) - degrees) < 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("length", [5000, SORTED_LENGTH, SORTED_LENGTH + 1, 100_003, 263_169])
def test_order_shows_no_pattern_when_looked_at_by_lag_and_region(length: int) -> None:
    """Serial correlation, correlation with the position and with the next epoch, and a 32 x 32 table of regions."""
    positions = np.arange(length)
    order, following = (permute(positions, length=length, seed=3, epoch=epoch).astype(float) for epoch in (4, 5))
    side = int(np.sqrt(length))
    for lag in (1, 2, 3, 64, side, side + 1, 4096):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) * np.sqrt(length) < 4, lag
    assert abs(np.corrcoef(order, positions)[0, 1]) * np.sqrt(length) < 4
    assert abs(np.corrcoef(order, following)[0, 1]) * np.sqrt(length) < 4
    table, _, _ = np.histogram2d(positions, order, bins=32)
    steps = np.bincount(((order[1:] - order[:-1]) % length * 64 // length).astype(int), minlength=64)
    assert abs(chi_square(table) - 31 * 31) < 5 * np.sqrt(2 * 31 * 31)
    assert abs(chi_square(steps) - 63) < 5 * np.sqrt(2 * 63)
