"""Reading samples of one batch: their random streams, their errors, and how they become a batch."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from multiprocessing.reduction import ForkingPickler
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from elastictrain.data.order import Plan, Positions, extend, extend_each
from elastictrain.data.seeding import (
    batch_seed,
    capture,
    is_unchanged,
    preserved,
    restore,
    sample_base,
    seed_all,
)
from elastictrain.errors import DataError

Collate = Callable[[list[Any]], Any]


class LoaderTracebackError(Exception):
    """The text of a traceback from a loader process; the cause of the error that was raised there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclass(frozen=True, slots=True)
class Failure:
    """A DataError on its way out of a loader process: its text, and the original error where that can travel."""

    message: str
    index: int | None
    original: Exception | None
    traceback_text: str

    @classmethod
    def of(cls, error: DataError) -> Failure:
        original = error.__cause__
        text = "".join(traceback.format_exception(original if original is not None else error))
        travels = original if isinstance(original, Exception) and _can_travel(original) else None
        return cls(message=str(error), index=error.index, original=travels, traceback_text=text)

    def to_error(self) -> DataError:
        """The same DataError in this process, chained to the original and to the text of its traceback."""
        error = DataError(self.message, index=self.index)
        remote = LoaderTracebackError(self.traceback_text)
        if self.original is not None:
            self.original.__cause__ = remote
        error.__cause__ = self.original if self.original is not None else remote
        return error


def _can_travel(error: Exception) -> bool:
    """Whether an exception survives the queue between the loader processes and this one; one that does not hangs it."""
    try:
        return type(ForkingPickler.loads(ForkingPickler.dumps(error))) is type(error)
    except Exception:  # the pickling code of a user's exception class can raise anything
        return False


def _named(kind: str, number: int, error: Exception) -> DataError:
    return DataError(
        f"the data set failed on {kind} {number}: {type(error).__name__}: {error} "
        "(the traceback of the data set's own code is shown with this error)",
        index=number,
    )


def collate(items: list[Any], collate_fn: Collate | None, *, seed: int, epoch: int, start: int) -> Any:
    """Make the batch. What a user's collate_fn draws depends on the global batch only. Raises DataError, chained."""
    if collate_fn is None:
        collate_fn = default_collate
    else:
        seed_all(batch_seed(seed, epoch, start))
    try:
        return collate_fn(items)
    except Exception as error:  # user code: any error becomes one that names the batch
        raise DataError(
            f"collating {len(items)} samples of the batch at position {start} of epoch {epoch} failed: "
            f"{type(error).__name__}: {error}"
        ) from error


class MapReader:
    """Reads batches of a map-style data set, each sample in its own random stream."""

    def __init__(self, dataset: Any, plan: Plan, collate_fn: Collate | None) -> None:
        self.dataset = dataset
        self.plan = plan
        self.collate_fn = None if collate_fn is default_collate else collate_fn
        self._tensors, self._rows = _tensors_of(dataset) if self.collate_fn is None else (None, None)
        self._has_read = False
        self._has_drawn = False

    def read(self, *, epoch: int, start: int, stop: int, batch_start: int) -> Any:
        """The batch of positions start..stop (at least one), which is part of the global batch at `batch_start`.

        Leaves the global random streams as they were. Blocks for as long as the data set does. Raises DataError that
        names the sample, chained to the data set's own error.
        """
        rows = self.plan.index_array(epoch, start, stop)
        if self._tensors is not None:
            found = torch.from_numpy(rows if self._rows is None else self._rows[rows])
            return [tensor[found] for tensor in self._tensors]
        items = None if self._has_drawn else self._read_unseeded(rows)
        if items is not None and self.collate_fn is None:
            return collate(items, None, seed=self.plan.seed, epoch=epoch, start=batch_start)
        with preserved():
            if items is None:
                items = self._read_seeded(rows, epoch)
            return collate(items, self.collate_fn, seed=self.plan.seed, epoch=epoch, start=batch_start)

    def _read_unseeded(self, rows: Positions) -> list[Any] | None:
        """The samples without streams of their own: where none draws, seeding would be the larger part of the work.

        None when one has drawn after all: they are to be read again, and from now on seeded. The first sample of all is
        looked at alone, so that a data set that always draws is asked for one sample twice, and not for a whole batch.
        """
        indices = rows.tolist()
        before = capture()
        num_asked = len(indices) if self._has_read else 1
        items: list[Any] = []
        try:
            # The built-in loop: it costs a cheap data set half of what one in Python does.
            items.extend(map(getitem, repeat(self.dataset), indices[:num_asked]))
            if num_asked < len(indices) and is_unchanged(before):
                items.extend(map(getitem, repeat(self.dataset), indices[num_asked:]))
                num_asked = len(indices)
            if len(items) < num_asked:
                raise RuntimeError("__getitem__ raised StopIteration")  # which ends the built-in loop without an error
        except Exception as error:  # user code: any error becomes one that names the sample
            if is_unchanged(before):
                raise _named("sample", indices[len(items)], error) from error
        self._has_read, self._has_drawn = True, not is_unchanged(before)
        if not self._has_drawn:
            return items
        restore(before)
        return None

    def _read_seeded(self, rows: Positions, epoch: int) -> list[Any]:
        """Each sample in its own stream. Reseeds the global streams."""
        items: list[Any] = []
        index = -1
        try:
            for index, seed in zip(rows.tolist(), extend_each(sample_base(self.plan.seed, epoch), rows), strict=True):
                seed_all(seed)
                items.append(self.dataset[index])
        except Exception as error:  # user code: any error becomes one that names the sample
            raise _named("sample", index, error) from error
        return items


def _tensors_of(dataset: Any) -> tuple[Sequence[torch.Tensor] | None, Positions | None]:
    """The tensors of a TensorDataset, or of a Subset of one with its rows; such data sets draw no random numbers."""
    rows: Positions | None = None
    while type(dataset) is Subset:
        picked = np.asarray(dataset.indices, dtype=np.int64)
        rows = picked if rows is None else picked[rows]
        dataset = dataset.dataset
    # The exact type: a subclass may have its own __getitem__. default_collate treats only dense tensors this way.
    if type(dataset) is TensorDataset and all(tensor.layout is torch.strided for tensor in dataset.tensors):
        return dataset.tensors, rows
    return None, None


class StreamReader:
    """Reads global batches of an iterable data set from its beginning, each item in its own random stream."""

    def __init__(
        self, dataset: Any, *, batch_size: int, seed: int, drop_tail: bool, collate_fn: Collate | None
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.drop_tail = drop_tail
        self.collate_fn = None if collate_fn is default_collate else collate_fn

    def items(self, epoch: int) -> Iterator[Any]:
        """Items of an epoch in the order of the stream. Raises DataError that names the position."""
        base = sample_base(self.seed, epoch)
        position = 0
        try:
            seed_all(extend(base, position))
            source = iter(self.dataset)
            while True:
                seed_all(extend(base, position))
                try:
                    item = next(source)
                except StopIteration:
                    return
                yield item
                position += 1
        except Exception as error:  # user code: any error becomes one that names the position
            raise _named("item", position, error) from error
