"""Fetching: this rank's part of each global batch, from any data set, in this process or read ahead by others.

Positions count samples within an epoch's order. What a Fetched covers is a function of the epoch, the batch number, the
rank and the world size; what a sample is, random augmentation included, depends on the first of these alone.
"""

from __future__ import annotations

import types
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from typing import Any, Protocol, cast

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from elastictrain.data.loading import Loader
from elastictrain.data.order import Plan, Tail, check_batching, share
from elastictrain.data.samples import Collate, Failure, MapReader, StreamReader, collate
from elastictrain.data.seeding import preserved
from elastictrain.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Fetched:
    """One global batch as a rank sees it: positions start..stop, of which it holds share_start..share_stop.

    A rank that has no share (more ranks than samples) holds the batch's first sample all the same, so that it can take
    part in the collectives; its count is 0, and that is its weight.
    """

    batch: Any
    start: int
    stop: int
    share_start: int
    share_stop: int

    @property
    def count(self) -> int:
        return self.share_stop - self.share_start


class Fetcher(Protocol):
    """P1: `iterate` yields the epoch's batches from `batch_index` on, in order, and every position once over all ranks.
    P2: nothing read ahead is counted: another `iterate`, with another world, starts wherever it is told to.
    P3: closing the iterator, or the fetcher, ends every process it started. P4: the global random streams are as before
    after every batch. Errors of the data set are DataErrors, chained to the original.
    """

    @property
    def epoch_length(self) -> int | None:
        """Samples of an epoch, or None where only reading can tell."""
        ...

    def steps_in_epoch(self, epoch: int) -> int | None:
        """Batches in an epoch, or None where only reading can tell."""
        ...

    def iterate(
        self, *, epoch: int, batch_index: int, rank: int, world_size: int
    ) -> Generator[Fetched, None, None]: ...

    def identity(self) -> dict[str, Any]:
        """What must be equal for a stored (epoch, batch_index) to mean the same samples; JSON values."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _View:
    """Where in the run and the world an iteration stands; travels to the loader processes."""

    epoch: int
    batch_index: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        share(0, 0, rank=self.rank, world_size=self.world_size)
        if self.epoch < 0 or self.batch_index < 0:
            raise DataError(f"epoch and batch_index must be 0 or more, not {self.epoch} and {self.batch_index}")


class _OpenLoaders:
    """The loaders of iterations that are under way."""

    def __init__(self) -> None:
        self._loaders: set[Loader] = set()

    def drain(
        self, dataset: Dataset[Any], *, requests: range | None, num_workers: int
    ) -> Generator[Fetched, None, None]:
        loader = Loader(dataset, requests=requests, num_workers=num_workers)
        self._loaders.add(loader)
        try:
            yield from loader
        finally:
            loader.close()
            self._loaders.discard(loader)

    def close(self) -> None:
        for loader in tuple(self._loaders):
            loader.close()


class _MapBatches(Dataset[Any]):
    """What a loader process of a map-style data set runs: batch number in, Fetched or Failure out."""

    def __init__(self, reader: MapReader, view: _View) -> None:
        self.reader = reader
        self.view = view

    def __getitem__(self, number: int) -> Fetched | Failure:
        try:
            return _fetch(self.reader, self.view, number)
        except DataError as error:
            return Failure.of(error)


def _fetch(reader: MapReader, view: _View, number: int) -> Fetched:
    start, stop = reader.plan.batch_range(number)
    first, last = share(start, stop, rank=view.rank, world_size=view.world_size)
    read_start, read_stop = (first, last) if first < last else (start, start + 1)
    batch = reader.read(epoch=view.epoch, start=read_start, stop=read_stop, batch_start=start)
    return Fetched(batch, start, stop, first, last)


class MapFetcher:
    """Fetches from a data set with `__len__` and `__getitem__`; only this rank's samples are read."""

    def __init__(self, dataset: Any, plan: Plan, *, collate_fn: Collate | None, num_workers: int) -> None:
        self.plan = plan
        self._dataset = dataset
        self._reader = MapReader(dataset, plan, collate_fn)
        self._num_workers = num_workers
        self._open = _OpenLoaders()

    @property
    def epoch_length(self) -> int | None:
        return self.plan.epoch_length

    def steps_in_epoch(self, epoch: int) -> int | None:
        return self.plan.steps_per_epoch

    def identity(self) -> dict[str, Any]:
        return {"kind": "map", **self.plan.identity()}

    def iterate(self, *, epoch: int, batch_index: int, rank: int, world_size: int) -> Generator[Fetched, None, None]:
        view = _View(epoch, batch_index, rank, world_size)
        steps = self.plan.steps_per_epoch
        if batch_index > steps:
            raise DataError(f"an epoch has {steps} batches, so none to start from at {batch_index}")
        if len(self._dataset) != self.plan.length:
            raise DataError(
                f"the data set had {self.plan.length} samples when the run began and has {len(self._dataset)} now"
            )
        _set_epoch(self._dataset, epoch)
        numbers = range(batch_index, steps)
        if self._num_workers and numbers:
            batches = _MapBatches(self._reader, view)
            return self._open.drain(batches, requests=numbers, num_workers=self._num_workers)
        return self._read_here(view, numbers)

    def _read_here(self, view: _View, numbers: range) -> Generator[Fetched, None, None]:
        for number in numbers:
            yield _fetch(self._reader, view, number)

    def close(self) -> None:
        self._open.close()


class _StreamBatches(IterableDataset[Any]):
    """What the loader process of an iterable data set runs."""

    def __init__(self, reader: StreamReader, view: _View) -> None:
        self.reader = reader
        self.view = view

    def __iter__(self) -> Iterator[Fetched | Failure]:
        try:
            yield from _cut(self.reader, self.view)
        except DataError as error:
            yield Failure.of(error)


def _cut(reader: StreamReader, view: _View) -> Iterator[Fetched]:
    """Cut a stream into global batches and keep this rank's share of each."""
    items = reader.items(view.epoch)
    size = reader.batch_size
    start = view.batch_index * size
    skipped = sum(1 for _ in islice(items, start))
    # The batch before this one may have been the short one at the end.
    used = start if reader.drop_tail or start == 0 else start - size + 1
    if skipped < used:
        raise DataError(
            f"the run has used {used} or more items of epoch {view.epoch}, but the data set now ends after "
            f"{skipped}: it must give the same items in the same order every time it is iterated"
        )
    while skipped == start:
        whole = list(islice(items, size))
        if not whole and start == 0:
            raise DataError(
                f"the data set gave no item in epoch {view.epoch}: it is empty, or it can be iterated only once; pass "
                "an object whose __iter__ starts anew each time"
            )
        if not whole or (reader.drop_tail and len(whole) < size):
            return
        stop = start + len(whole)
        first, last = share(start, stop, rank=view.rank, world_size=view.world_size)
        mine = whole[first - start : last - start] or whole[:1]
        batch = collate(mine, reader.collate_fn, seed=reader.seed, epoch=view.epoch, start=start)
        yield Fetched(batch, start, stop, first, last)
        if len(whole) < size:
            return
        start = skipped = stop


class StreamFetcher:
    """Fetches from an iterable data set: every rank reads the whole stream and keeps its part.

    The data set must not divide itself among ranks. Resuming reads again what was used, and drops it. `num_workers`
    above 0 means one loader process, since a stream is read in one order.
    """

    def __init__(self, dataset: Any, reader: StreamReader, *, num_workers: int) -> None:
        self._dataset = dataset
        self._reader = reader
        self._num_workers = num_workers
        self._open = _OpenLoaders()

    @property
    def epoch_length(self) -> int | None:
        return None

    def steps_in_epoch(self, epoch: int) -> int | None:
        return None

    def identity(self) -> dict[str, Any]:
        reader = self._reader
        tail = "drop" if reader.drop_tail else "short"
        return {"kind": "stream", "batch_size": reader.batch_size, "seed": reader.seed, "tail": tail}

    def iterate(self, *, epoch: int, batch_index: int, rank: int, world_size: int) -> Generator[Fetched, None, None]:
        view = _View(epoch, batch_index, rank, world_size)
        _set_epoch(self._dataset, epoch)
        if self._num_workers:
            return self._open.drain(_StreamBatches(self._reader, view), requests=None, num_workers=1)
        return self._read_here(view)

    def _read_here(self, view: _View) -> Generator[Fetched, None, None]:
        batches = _cut(self._reader, view)
        while True:
            with preserved():
                fetched = next(batches, None)
            if fetched is None:
                return
            yield fetched

    def close(self) -> None:
        self._open.close()


def _set_epoch(dataset: Any, epoch: int) -> None:
    """Tell data sets that reorder themselves by epoch (the convention of Hugging Face's and of torch's samplers)."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _is_stream(dataset: Any) -> bool:
    """Whether a data set can only be iterated. Raises ConfigError when it is no data set."""
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "expected a data set, not a DataLoader: pass the loader's data set, and batch_size, collate_fn and "
            "num_workers beside it",
            field="dataset",
        )
    if isinstance(dataset, str | bytes | PathLike | Mapping):
        raise ConfigError(
            f"expected a data set, not a {type(dataset).__name__}: load it, or pick the split to train on",
            field="dataset",
        )
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    # The built-in iterators and generators return themselves; a class of the user's may well start anew in __iter__.
    if isinstance(dataset, Iterator) and not isinstance(type(dataset).__iter__, types.FunctionType):
        raise ConfigError(
            f"a {type(dataset).__name__} can be read only once, and a resumed epoch reads again: pass an object whose "
            "__iter__ starts anew, such as a torch IterableDataset",
            field="dataset",
        )
    if hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        return True
    raise ConfigError(
        f"expected a data set with __len__ and __getitem__, or one with __iter__; {type(dataset).__name__} has neither",
        field="dataset",
    )


def make_fetcher(
    dataset: Any,
    *,
    batch_size: int,
    shuffle: bool,
    seed: int,
    collate_fn: Collate | None = None,
    num_workers: int = 0,
    tail: str = "short",
) -> Fetcher:
    """A Fetcher for any data set; `batch_size` is the global one. Reads and starts nothing yet.

    A stream comes in its own order: `shuffle` has no effect on it. Raises ConfigError on a wrong option or something
    that is no data set, DataError when the data set holds no batch.
    """
    check_batching(batch_size=batch_size, seed=seed, tail=tail)
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0:
        raise ConfigError(f"num_workers must be 0 or more, not {num_workers!r}", field="num_workers", seen=num_workers)
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"collate_fn must be callable, not {collate_fn!r}", field="collate_fn", seen=collate_fn)
    if _is_stream(dataset):
        reader = StreamReader(
            dataset, batch_size=batch_size, seed=seed, drop_tail=tail == "drop", collate_fn=collate_fn
        )
        return StreamFetcher(dataset, reader, num_workers=num_workers)
    plan = Plan(len(dataset), batch_size, shuffle=shuffle, seed=seed, tail=cast(Tail, tail))
    return MapFetcher(dataset, plan, collate_fn=collate_fn, num_workers=num_workers)


class _StreamPart(IterableDataset[Any]):
    """Every world_size-th item of a stream, from the rank-th on."""

    def __init__(self, dataset: Any, *, rank: int, world_size: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.rank, None, self.world_size)


def split(dataset: Any, *, rank: int, world_size: int) -> Dataset[Any]:
    """This rank's part of a data set, for evaluation: over all ranks each sample once, no padding, parts may be empty.

    Map-style: a contiguous Subset. Iterable: every world_size-th item, as an IterableDataset; read it in this process
    or in one loader process, since several would each read the whole. Raises ConfigError.
    """
    share(0, 0, rank=rank, world_size=world_size)
    if _is_stream(dataset):
        return _StreamPart(dataset, rank=rank, world_size=world_size)
    return Subset(dataset, range(*share(0, len(dataset), rank=rank, world_size=world_size)))
