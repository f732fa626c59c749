"""The order of samples: arithmetic on (seed, epoch, length), never on the world size. Pure; memory is O(1).

An epoch is a row of *positions* 0..length-1. `permute` says which sample stands at a position, `Plan.batch_range` which
positions a global batch covers, `share` which of those a rank computes. So the world may change between any two steps,
and still every position is used once.

Two permutations, chosen by length alone and pinned by golden values in the tests (`ORDER_VERSION` names them):

* up to `SORTED_LENGTH` samples: the order in which a keyed 64-bit hash of the index sorts, as good as a drawn shuffle;
* above: a Feistel network on pairs (left, right) of Z_a x Z_b with a*b >= length. Values past the end walk on along
  their cycle until they fall inside, which keeps it one-to-one. Any position can be asked for alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from elastictrain.errors import ConfigError, DataError

ORDER_VERSION = 1
SORTED_LENGTH = 1 << 16
MAX_LENGTH = 1 << 62

_BLOCK = 4096  # positions computed at once when a batch is asked for: a call into numpy costs more than its work
_ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_ORDER_DOMAIN = 0x6F72646572  # "order": keeps these keys apart from every other use of the same seed

Tail = Literal["short", "drop"]
Positions = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


def extend(state: int, value: int) -> int:
    """Take one more integer into a mixed state: `extend(mix(a, b), c) == mix(a, b, c)`. Value is read modulo 2**64."""
    word = ((state + _GOLDEN) & _MASK) ^ (value & _MASK)
    word = ((word ^ (word >> 30)) * _FIRST) & _MASK
    word = ((word ^ (word >> 27)) * _SECOND) & _MASK
    return word ^ (word >> 31)


def mix(*values: int) -> int:
    """Mix integers (each modulo 2**64, order matters) into one of 64 bits, for seeds. Pinned: never changes."""
    state = 0
    for value in values:
        state = extend(state, value)
    return state


def _mixed(words: _Words) -> _Words:
    """Mix each word; one-to-one on 64 bits."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    return words ^ (words >> np.uint64(31))


def extend_each(state: int, values: Positions) -> list[int]:
    """`[extend(state, value) for value in values]`, for many values at once."""
    words = values.astype(np.uint64) ^ np.uint64((state + _GOLDEN) & _MASK)
    found: list[int] = _mixed(words).tolist()
    return found


@lru_cache(maxsize=4)
def _sorted_order(length: int, key: int) -> Positions:
    """Order of a short epoch, whole. The hashes are all different, so the sort has no ties to settle."""
    words = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key)
    order = np.argsort(_mixed(words), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def _feistel(values: _Words, left_size: int, right_size: int, key: int) -> _Words:
    """One-to-one on 0..left_size*right_size-1. Each round moves one half by a keyed hash of the other."""
    left, right = values // np.uint64(right_size), values % np.uint64(right_size)
    for number in range(_ROUNDS):
        round_key = np.uint64(mix(key, number))
        if number % 2 == 0:
            left = (left + _mixed(right * np.uint64(_GOLDEN) + round_key) % np.uint64(left_size)) % np.uint64(left_size)
        else:
            right = (right + _mixed(left * np.uint64(_GOLDEN) + round_key) % np.uint64(right_size)) % np.uint64(
                right_size
            )
    return left * np.uint64(right_size) + right


def _walked_order(positions: _Words, length: int, key: int) -> Positions:
    """Order of a long epoch at the given positions (one dimension)."""
    left_size = isqrt(length - 1) + 1
    right_size = -(-length // left_size)
    values = _feistel(positions, left_size, right_size, key)
    while True:
        # At most left_size - 1 values lie past the end, about one in sqrt(length): a second turn is rare and short.
        outside = values >= np.uint64(length)
        if not outside.any():
            return values.astype(np.int64)
        values[outside] = _feistel(values[outside], left_size, right_size, key)


def permute(positions: npt.NDArray[Any], *, length: int, seed: int, epoch: int) -> Positions:
    """Sample index at each position of a shuffled epoch; same shape as `positions`, int64.

    One-to-one on 0..length-1 for every (seed, epoch). Raises DataError on a position outside the epoch.
    """
    if not 1 <= length <= MAX_LENGTH:
        raise DataError(f"the number of samples must be 1 to 2**62, not {length}")
    asked = np.asarray(positions, dtype=np.int64)
    flat = asked.reshape(-1)
    if flat.size and (int(flat.min()) < 0 or int(flat.max()) >= length):
        raise DataError(f"positions must lie in 0..{length - 1}, not {int(flat.min())}..{int(flat.max())}")
    key = mix(_ORDER_DOMAIN, seed, epoch)
    if length <= SORTED_LENGTH:
        return _sorted_order(length, key)[flat].reshape(asked.shape)
    return _walked_order(flat.astype(np.uint64), length, key).reshape(asked.shape)


@lru_cache(maxsize=8)
def _block_order(length: int, seed: int, epoch: int, block: int) -> Positions:
    positions = np.arange(block * _BLOCK, min(length, (block + 1) * _BLOCK), dtype=np.int64)
    order = permute(positions, length=length, seed=seed, epoch=epoch)
    order.flags.writeable = False
    return order


def share(start: int, stop: int, *, rank: int, world_size: int) -> tuple[int, int]:
    """The part of positions start..stop that a rank computes: contiguous, sizes differ by one at most, may be empty.

    Raises ConfigError when rank is not in 0..world_size-1.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in 0..{world_size - 1} for a world of {world_size}, not {rank}", field="rank")
    count = stop - start
    return start + count * rank // world_size, start + count * (rank + 1) // world_size


def _whole(value: object, *, field: str, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(
            f"{field} must be a whole number from {least} to {most}, not {value!r}", field=field, seen=value
        )


def check_batching(*, batch_size: int, seed: int, tail: str) -> None:
    """Raise ConfigError when a global batch cannot be cut this way."""
    _whole(batch_size, field="batch_size", least=1, most=MAX_LENGTH)
    _whole(seed, field="seed", least=-(1 << 63), most=(1 << 64) - 1)
    if tail == "stream":
        raise ConfigError(
            "tail='stream' (a batch that spans two epochs) is not built yet: use 'short' or 'drop'",
            field="tail",
            seen=tail,
        )
    if tail not in ("short", "drop"):
        raise ConfigError(f"tail must be 'short' or 'drop', not {tail!r}", field="tail", seen=tail)


@dataclass(frozen=True, slots=True)
class Plan:
    """How a data set of known length is cut into global batches, epoch by epoch, whatever the world size.

    `tail` says what happens to the samples behind the last full batch: "short" gives them a smaller batch of their own,
    "drop" leaves them out of this epoch. Raises ConfigError on a wrong option, DataError when no batch can be formed.
    """

    length: int
    batch_size: int
    shuffle: bool = True
    seed: int = 0
    tail: Tail = "short"

    def __post_init__(self) -> None:
        check_batching(batch_size=self.batch_size, seed=self.seed, tail=self.tail)
        if not 1 <= self.length <= MAX_LENGTH:
            raise DataError(f"the data set has {self.length} samples: training needs at least one")
        if self.steps_per_epoch == 0:
            raise DataError(
                f"the data set has {self.length} samples, less than one batch of {self.batch_size}, and tail='drop' "
                "drops them all: use a smaller batch_size or tail='short'"
            )

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.length, self.batch_size)
        return full + (1 if rest and self.tail == "short" else 0)

    @property
    def epoch_length(self) -> int:
        """Samples used in an epoch."""
        return min(self.length, self.steps_per_epoch * self.batch_size)

    def batch_range(self, index: int) -> tuple[int, int]:
        """Positions (start, stop) of a global batch, by its number in the epoch. Raises DataError on a wrong number."""
        if not 0 <= index < self.steps_per_epoch:
            raise DataError(f"an epoch has batches 0..{self.steps_per_epoch - 1}, not {index}")
        start = index * self.batch_size
        return start, min(start + self.batch_size, self.epoch_length)

    def index_array(self, epoch: int, start: int, stop: int) -> Positions:
        """Sample indices at positions start..stop of an epoch: shape (stop - start,), a copy. Raises DataError."""
        if epoch < 0 or not 0 <= start <= stop <= self.epoch_length:
            raise DataError(
                f"positions must lie in 0..{self.epoch_length} of an epoch >= 0, not {start}..{stop} of epoch {epoch}"
            )
        if not self.shuffle or start == stop:
            return np.arange(start, stop, dtype=np.int64)
        first, last = start // _BLOCK, (stop - 1) // _BLOCK
        blocks = [_block_order(self.length, self.seed, epoch, block) for block in range(first, last + 1)]
        row = blocks[0] if first == last else np.concatenate(blocks)
        return row[start - first * _BLOCK : stop - first * _BLOCK].copy()

    def indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """As `index_array`, as Python integers."""
        found: list[int] = self.index_array(epoch, start, stop).tolist()
        return found

    def identity(self) -> dict[str, Any]:
        """What must be equal for a checkpoint's cursor to mean the same samples; JSON values."""
        return {
            "order": ORDER_VERSION,
            "length": self.length,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "tail": self.tail,
        }
