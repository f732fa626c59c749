"""Fetching: exact whatever the world's history, the same augmentation everywhere, and errors that name a sample."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from elastictrain.data.fetch import Fetched, Fetcher, make_fetcher, split
from elastictrain.data.samples import LoaderTracebackError
from elastictrain.data.seeding import capture
from elastictrain.errors import ConfigError, DataError

WORLDS = (3, 2, 3, 1, 4)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    yield
    children = psutil.Process().children(recursive=True)
    assert [child for child in children if child.pid != resource_tracker._resource_tracker._pid] == []


class Noisy(Dataset[Any]):
    """Sample i is i and a number from each random stream."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        noise = [random.random(), float(np.random.random()), float(torch.rand(1, dtype=torch.float64))]
        return {"index": index, "noise": torch.tensor(noise, dtype=torch.float64)}


class NoisyStream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        samples = Noisy(self.length)
        for position in range(self.length):
            sample = samples[(position + self.epoch) % self.length]
            yield sample


def whole_epoch(
    fetcher: Fetcher, *, epoch: int, worlds: tuple[int, ...], steps_each: int = 0
) -> tuple[list[int], dict[int, list[float]]]:
    """Run an epoch while the world goes through `worlds`, giving up each iteration in the middle; indices and noise."""
    used: list[int] = []
    noise: dict[int, list[float]] = {}
    done = 0
    for number, world_size in enumerate(worlds):
        last = number == len(worlds) - 1
        ranks = [
            fetcher.iterate(epoch=epoch, batch_index=done, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        steps = 0
        while last or steps < steps_each:
            step = [next(rank, None) for rank in ranks]
            if step[0] is None:
                assert not any(step)
                break
            end = step[0].start
            for fetched in step:
                assert fetched is not None
                assert (fetched.start, fetched.stop, fetched.share_start) == (step[0].start, step[0].stop, end)
                end = fetched.share_stop
                if fetched.count:
                    found = fetched.batch["index"].tolist()
                    assert len(found) == fetched.count
                    used.extend(found)
                    noise.update(zip(found, fetched.batch["noise"].tolist(), strict=True))
            assert end == step[0].stop
            steps += 1
        done += steps
        for rank in ranks:
            rank.close()  # type: ignore[attr-defined]
    return used, noise


@pytest.mark.parametrize("dataset_class", [Noisy, NoisyStream])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("length", "batch_size", "steps_each"), [(101, 10, 2), (1009, 64, 3)])
def test_epoch_is_exact_and_augmented_alike_when_the_world_changes(
    dataset_class: Callable[[int], Any], num_workers: int, length: int, batch_size: int, steps_each: int
) -> None:
    dataset = dataset_class(length)
    quiet = make_fetcher(dataset, batch_size=batch_size, shuffle=True, seed=5)
    fetcher = make_fetcher(dataset, batch_size=batch_size, shuffle=True, seed=5, num_workers=num_workers)
    quiet_order, quiet_noise = whole_epoch(quiet, epoch=3, worlds=(1,), steps_each=0)
    order, noise = whole_epoch(fetcher, epoch=3, worlds=WORLDS, steps_each=steps_each)
    assert sorted(order) == list(range(length))
    assert order == quiet_order
    assert noise == quiet_noise
    assert len({value for values in noise.values() for value in values}) == 3 * length


def test_epochs_differ_in_order_and_augmentation_when_shuffled() -> None:
    fetcher = make_fetcher(Noisy(101), batch_size=10, shuffle=True, seed=5)
    first, second = (whole_epoch(fetcher, epoch=epoch, worlds=(1,), steps_each=0) for epoch in (0, 1))
    assert first[0] != second[0]
    assert all(first[1][index] != second[1][index] for index in range(101))


class Seldom(Noisy):
    """Draws for every ninth sample only, and counts how often it is asked."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.num_asked = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_asked += 1
        if index % 9 == 0:
            return super().__getitem__(index)
        return {"index": index, "noise": torch.zeros(3, dtype=torch.float64)}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("worlds", [(1,), WORLDS])
def test_augmentation_is_the_same_when_only_some_samples_draw(num_workers: int, worlds: tuple[int, ...]) -> None:
    """Reading begins without seeding; the first draw must be found, and the batch around it read again, seeded."""
    _, always = whole_epoch(make_fetcher(Noisy(101), batch_size=10, shuffle=True, seed=5), epoch=3, worlds=(1,))
    fetcher = make_fetcher(Seldom(101), batch_size=10, shuffle=True, seed=5, num_workers=num_workers)
    _, seldom = whole_epoch(fetcher, epoch=3, worlds=worlds, steps_each=2)
    assert {index: noise for index, noise in seldom.items() if index % 9 == 0} == {
        index: noise for index, noise in always.items() if index % 9 == 0
    }


def test_samples_are_asked_for_once_when_none_draws_or_the_first_does() -> None:
    quiet = Seldom(101)
    fetcher = make_fetcher(quiet, batch_size=8, shuffle=False, seed=5)
    for fetched in fetcher.iterate(epoch=0, batch_index=0, rank=0, world_size=1):
        if fetched.stop == 8:
            assert quiet.num_asked == 8 + 1, "sample 0 draws: it alone was read twice"
    assert quiet.num_asked == 101 + 1


def test_stream_is_told_the_epoch_when_iterated() -> None:
    fetcher = make_fetcher(NoisyStream(20), batch_size=20, shuffle=True, seed=0, num_workers=1)
    batches = list(fetcher.iterate(epoch=7, batch_index=0, rank=0, world_size=1))
    assert batches[0].batch["index"].tolist() == [(position + 7) % 20 for position in range(20)]


@pytest.mark.parametrize("dataset", [Noisy(30), NoisyStream(30)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_streams_are_untouched_when_batches_are_fetched(dataset: Any, num_workers: int) -> None:
    fetcher = make_fetcher(dataset, batch_size=10, shuffle=True, seed=0, num_workers=num_workers)
    before = capture()
    for _ in fetcher.iterate(epoch=0, batch_index=0, rank=0, world_size=2):
        after = capture()
        assert after.python_state == before.python_state
        assert torch.equal(after.torch_state, before.torch_state)
        assert np.array_equal(after.numpy_state["state"]["key"], before.numpy_state["state"]["key"])
        assert after.numpy_state["state"]["pos"] == before.numpy_state["state"]["pos"]


@pytest.mark.parametrize("dataset", [Noisy(2), NoisyStream(2)])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_idle_rank_holds_the_first_sample_with_count_zero_when_ranks_outnumber_samples(
    dataset: Any, num_workers: int
) -> None:
    fetcher = make_fetcher(dataset, batch_size=8, shuffle=False, seed=0, num_workers=num_workers)
    step = [next(fetcher.iterate(epoch=0, batch_index=0, rank=rank, world_size=3)) for rank in range(3)]
    assert [fetched.count for fetched in step] == [0, 1, 1]
    assert [fetched.batch["index"].tolist() for fetched in step] == [[0], [0], [1]]


@pytest.mark.parametrize("subset", [False, True])
def test_tensors_are_batched_as_default_collate_does_when_the_data_set_is_a_tensor_dataset(subset: bool) -> None:
    tensors = TensorDataset(torch.randn(50, 3, 2), torch.arange(50), torch.rand(50, dtype=torch.float64))
    dataset: Any = Subset(Subset(tensors, list(range(40, 0, -1))), [5, 3, 30, 8]) if subset else tensors
    fetcher = make_fetcher(dataset, batch_size=3, shuffle=True, seed=1)
    plan_order = fetcher.plan.indices(0, 0, len(dataset))  # type: ignore[attr-defined]
    for fetched in fetcher.iterate(epoch=0, batch_index=0, rank=0, world_size=1):
        expected = default_collate([dataset[index] for index in plan_order[fetched.start : fetched.stop]])
        assert type(fetched.batch) is type(expected)
        for ours, theirs in zip(fetched.batch, expected, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype == theirs.dtype


def test_batch_is_a_copy_when_it_comes_from_a_tensor_dataset() -> None:
    dataset = TensorDataset(torch.zeros(6, 2))
    for fetched in make_fetcher(dataset, batch_size=3, shuffle=False, seed=0).iterate(
        epoch=0, batch_index=0, rank=0, world_size=1
    ):
        fetched.batch[0].add_(1)
    assert dataset.tensors[0].sum() == 0


def drawing_collate(items: list[Any]) -> tuple[list[int], float]:
    return [item["index"] for item in items], random.random()


@pytest.mark.parametrize("dataset", [Noisy(40), NoisyStream(40)])
def test_collate_fn_draws_the_same_on_every_rank_when_it_draws(dataset: Any) -> None:
    drawn = set()
    for num_workers, world_size in ((0, 1), (0, 3), (2, 2)):
        fetcher = make_fetcher(
            dataset, batch_size=20, shuffle=True, seed=0, collate_fn=drawing_collate, num_workers=num_workers
        )
        for rank in range(world_size):
            both = list(fetcher.iterate(epoch=0, batch_index=0, rank=rank, world_size=world_size))
            drawn.add(tuple(fetched.batch[1] for fetched in both))
    assert len(drawn) == 1
    assert len(set(drawn.pop())) == 2


def test_resume_reads_nothing_when_the_epoch_is_complete() -> None:
    for dataset in (Noisy(25), NoisyStream(25)):
        fetcher = make_fetcher(dataset, batch_size=10, shuffle=True, seed=0)
        assert list(fetcher.iterate(epoch=0, batch_index=3, rank=0, world_size=2)) == []


def test_tail_is_dropped_when_asked_for() -> None:
    for dataset in (Noisy(25), NoisyStream(25)):
        fetcher = make_fetcher(dataset, batch_size=10, shuffle=True, seed=0, tail="drop")
        batches = list(fetcher.iterate(epoch=0, batch_index=0, rank=0, world_size=1))
        assert [(fetched.start, fetched.stop) for fetched in batches] == [(0, 10), (10, 20)]


def test_steps_in_epoch_is_known_when_the_data_set_has_a_length() -> None:
    assert make_fetcher(Noisy(25), batch_size=10, shuffle=True, seed=0).steps_in_epoch(0) == 3
    assert make_fetcher(NoisyStream(25), batch_size=10, shuffle=True, seed=0).steps_in_epoch(0) is None


class Torn(Noisy):
    """Leaves what torch leaves when its process is killed between making a shared tensor's file and removing it."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        Path(f"/dev/shm/torch_{os.getpid()}_1234_{index}").touch()
        return super().__getitem__(index)


def test_no_shared_memory_is_left_when_a_killed_loader_was_making_some() -> None:
    fetcher = make_fetcher(Torn(40), batch_size=10, shuffle=False, seed=0, num_workers=2)
    batches = fetcher.iterate(epoch=0, batch_index=0, rank=0, world_size=1)
    next(batches)
    pids = [child.pid for child in psutil.Process().children()]
    assert [name for pid in pids for name in os.listdir("/dev/shm") if name.startswith(f"torch_{pid}_")]
    fetcher.close()
    assert not [name for pid in pids for name in os.listdir("/dev/shm") if name.startswith(f"torch_{pid}_")]


class Stopping(Noisy):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 23:
            raise StopIteration
        return {"index": index}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sample_is_named_when_a_data_set_raises_stop_iteration(num_workers: int) -> None:
    fetcher = make_fetcher(Stopping(40), batch_size=10, shuffle=False, seed=0, num_workers=num_workers)
    with pytest.raises(DataError, match="the data set failed on sample 23"):
        list(fetcher.iterate(epoch=0, batch_index=0, rank=0, world_size=1))
    fetcher.close()


class PickyError(Exception):
    """Cannot be unpickled: its constructor wants more than its text."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class Broken(Noisy):
    def __init__(self, error: Exception) -> None:
        super().__init__(40)
        self.error = error

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 23:
            raise self.error
        return super().__getitem__(index)


class BrokenStream(IterableDataset[Any]):
    def __init__(self, error: Exception) -> None:
        self.samples = Broken(error)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[position] for position in range(40))


@pytest.mark.parametrize("dataset_class", [Broken, BrokenStream])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("error", [ValueError("bad pixel"), PickyError("bad", "pixel")])
def test_error_names_the_sample_and_keeps_its_cause_when_the_data_set_raises(
    dataset_class: Callable[[Exception], Any], num_workers: int, error: Exception
) -> None:
    fetcher = make_fetcher(dataset_class(error), batch_size=10, shuffle=False, seed=0, num_workers=num_workers)
    seen: list[Fetched] = []
    with pytest.raises(DataError, match=rf"23: {type(error).__name__}: bad pixel") as caught:
        seen.extend(fetcher.iterate(epoch=0, batch_index=0, rank=0, world_size=1))
    assert caught.value.index == 23
    cause = caught.value.__cause__
    if num_workers == 0:
        assert cause is error
        return
    if isinstance(error, ValueError):
        assert isinstance(cause, ValueError)
        assert str(cause) == "bad pixel"
        cause = cause.__cause__
    assert isinstance(cause, LoaderTracebackError)
    assert "raise self.error" in str(cause)


def refusing_collate(items: list[Any]) -> Any:
    raise TypeError("ragged")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_error_names_the_batch_when_collating_fails(num_workers: int) -> None:
    fetcher = make_fetcher(
        Noisy(40), batch_size=10, shuffle=False, seed=0, collate_fn=refusing_collate, num_workers=num_workers
    )
    with pytest.raises(DataError, match="collating 10 samples of the batch at position 20 of epoch 0"):
        list(fetcher.iterate(epoch=0, batch_index=2, rank=0, world_size=1))


def test_stream_is_refused_when_it_ends_before_what_was_used() -> None:
    fetcher = make_fetcher(NoisyStream(25), batch_size=10, shuffle=False, seed=0)
    with pytest.raises(DataError, match="ends after 25"):
        list(fetcher.iterate(epoch=0, batch_index=4, rank=0, world_size=1))


def test_stream_is_refused_when_it_gives_nothing() -> None:
    fetcher = make_fetcher(NoisyStream(0), batch_size=10, shuffle=False, seed=0)
    with pytest.raises(DataError, match="no item in epoch 0"):
        list(fetcher.iterate(epoch=0, batch_index=0, rank=0, world_size=1))


def test_iteration_is_refused_when_the_data_set_changed_its_length() -> None:
    dataset = Noisy(25)
    fetcher = make_fetcher(dataset, batch_size=10, shuffle=False, seed=0)
    dataset.length = 24
    with pytest.raises(DataError, match="had 25 samples when the run began and has 24 now"):
        fetcher.iterate(epoch=0, batch_index=0, rank=0, world_size=1)


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        (DataLoader(Noisy(3)), "not a DataLoader"),
        ("data/train", "not a str"),
        (Path("data"), "not a PosixPath"),
        ({"train": Noisy(3)}, "pick the split"),
        ((index for index in range(3)), "read only once"),
        (iter([1, 2]), "read only once"),
        (7, "has neither"),
    ],
)
def test_data_set_is_refused_when_it_is_none(dataset: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make_fetcher(dataset, batch_size=2, shuffle=True, seed=0)


@pytest.mark.parametrize("options", [{"num_workers": -1}, {"num_workers": 1.5}, {"collate_fn": 3}, {"tail": "stream"}])
def test_option_is_refused_when_it_is_wrong(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_fetcher(Noisy(3), **{"batch_size": 2, "shuffle": True, "seed": 0, **options})
    assert caught.value.field in options


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("dataset", [Noisy(7), NoisyStream(7), range(7)])
def test_split_gives_each_sample_once_when_read_by_any_world(dataset: Any, world_size: int) -> None:
    found: list[int] = []
    for rank in range(world_size):
        part = split(dataset, rank=rank, world_size=world_size)
        for batch in DataLoader(part, batch_size=2):
            found.extend((batch["index"] if isinstance(batch, dict) else batch).tolist())
    assert sorted(found) == list(range(7))


def test_split_gives_contiguous_parts_when_the_data_set_has_a_length() -> None:
    assert [list(split(range(7), rank=rank, world_size=3)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
