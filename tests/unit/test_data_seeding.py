"""Seeding: pinned, the same everywhere, different between streams, and without a trace where that is promised."""

from __future__ import annotations

import random
from timeit import repeat

import numpy as np
import torch

from elastictrain.data.seeding import batch_seed, capture, preserved, restore, sample_base, seed_all


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(1, dtype=torch.float64))


def test_seed_all_gives_pinned_numbers_when_called() -> None:
    with preserved():
        seed_all(0x0123456789ABCDEF)
        assert draw() == (0.8966868918276133, 0.16843019977650397, 0.07754505597277028)


def test_seed_all_uses_the_high_bits_when_the_low_ones_agree() -> None:
    with preserved():
        seed_all(5)
        low = draw()
        seed_all((1 << 40) + 5)
        assert all(left != right for left, right in zip(low, draw(), strict=True))


def test_seed_all_gives_numpy_and_torch_different_numbers_when_given_one_seed() -> None:
    """Both are MT19937: the raw words of one would be those of the other."""
    with preserved():
        seed_all(99)
        ours = np.random.randint(0, 2**32, size=8, dtype=np.uint64).tolist()
        theirs = [int(torch.empty((), dtype=torch.int64).random_(0, 2**32)) for _ in range(8)]
    assert not set(ours) & set(theirs)


def test_preserved_leaves_no_trace_when_the_block_draws_and_raises() -> None:
    np.random.standard_normal()  # an odd number: the second of the pair is kept back and must survive
    before = capture()
    expected = (draw(), float(np.random.standard_normal()), random.gauss(0, 1))
    restore(before)
    try:
        with preserved():
            seed_all(1)
            draw()
            raise KeyError("x")
    except KeyError:
        pass
    assert (draw(), float(np.random.standard_normal()), random.gauss(0, 1)) == expected


def test_sample_and_batch_seeds_differ_when_numbers_agree() -> None:
    assert len({sample_base(1, 2), sample_base(2, 1), batch_seed(1, 2, 0), batch_seed(1, 2, 1)}) == 4


def test_seed_all_is_cheap_enough_for_every_sample_when_measured() -> None:
    """About 7 microseconds; the bound leaves room for a busy machine and still catches torch.manual_seed."""
    with preserved():
        best_s = min(repeat(lambda: seed_all(0x0123456789ABCDEF), number=500, repeat=10)) / 500
    assert best_s < 60e-6
