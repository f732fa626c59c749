"""Seeding of the global random streams, cheap enough to do once per sample.

The streams are Python's `random`, numpy's legacy global generator, torch's CPU generator and, once CUDA is in use, the
generator of every CUDA device. All of them belong to the process: seed them from the thread that draws from them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy.random  # also where user code has not used it yet: its first draw would come from a fresh, unseeded stream
import torch

from elastictrain.data.order import mix

_SAMPLE_DOMAIN = 0x73616D706C65  # "sample": a sample's stream never equals another stream of the same seed
_BATCH_DOMAIN = 0x6261746368  # "batch": what a user's collate_fn draws

_cuda: Any = torch.cuda  # partly untyped
_seed_torch = torch.default_generator.manual_seed  # torch.manual_seed does the same and more, a hundred times slower
_seed_numpy = numpy.random.seed
_seed_python = random.seed


def sample_base(seed: int, epoch: int) -> int:
    """State that `extend` turns into the seed of a sample: `extend(sample_base(seed, epoch), index)`."""
    return mix(_SAMPLE_DOMAIN, seed, epoch)


def batch_seed(seed: int, epoch: int, start: int) -> int:
    """Seed for what is drawn once per global batch; `start` is the batch's first position in its epoch."""
    return mix(_BATCH_DOMAIN, seed, epoch, start)


def seed_all(seed64: int) -> None:
    """Seed every stream from 64 bits. Does not block; about 7 microseconds, and 1 more for each CUDA device."""
    # torch's and numpy's generators keep 32 bits of a seed (torch the low ones, silently): fold, do not cut. They are
    # the same algorithm, so one seed would give both the same numbers: numpy gets the complement.
    folded = (seed64 ^ (seed64 >> 32)) & 0xFFFFFFFF
    _seed_python(seed64)
    _seed_numpy(folded ^ 0xFFFFFFFF)
    _seed_torch(folded)
    if _cuda.is_initialized():
        for generator in _cuda.default_generators:
            generator.manual_seed(seed64)


@dataclass(frozen=True, slots=True)
class Streams:
    """The state of every stream at one moment."""

    python_state: tuple[Any, ...]
    numpy_state: Any
    torch_state: torch.Tensor
    cuda_states: tuple[torch.Tensor, ...]


def capture() -> Streams:
    """Copy the state of every stream. Does not block; about 50 microseconds."""
    generators = _cuda.default_generators if _cuda.is_initialized() else ()
    return Streams(
        python_state=random.getstate(),
        numpy_state=numpy.random.get_state(legacy=False),
        torch_state=torch.default_generator.get_state(),
        cuda_states=tuple(generator.get_state() for generator in generators),
    )


def is_unchanged(streams: Streams) -> bool:
    """Whether nothing was drawn, and nothing seeded otherwise, since the capture. About 50 microseconds."""
    now = capture()
    return (
        torch.equal(now.torch_state, streams.torch_state)
        and now.python_state == streams.python_state
        and _is_equal(now.numpy_state, streams.numpy_state)
        and len(now.cuda_states) == len(streams.cuda_states)
        and all(map(torch.equal, now.cuda_states, streams.cuda_states))
    )


def _is_equal(left: Any, right: Any) -> bool:
    """Compare numpy's states: nested dicts with arrays."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_is_equal(value, right[key]) for key, value in left.items())
    return bool(numpy.array_equal(left, right))


def restore(streams: Streams) -> None:
    """Set every stream to a captured state. CUDA generators that did not exist at the capture keep theirs."""
    random.setstate(streams.python_state)
    numpy.random.set_state(streams.numpy_state)
    torch.default_generator.set_state(streams.torch_state)
    if streams.cuda_states:
        for generator, state in zip(_cuda.default_generators, streams.cuda_states, strict=True):
            generator.set_state(state)


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn or seeded inside the block leaves no trace in the streams."""
    before = capture()
    try:
        yield
    finally:
        restore(before)
