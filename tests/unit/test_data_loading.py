"""Loader processes: none outlives an iteration or the trainer, however these end; a death is told at once."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset
from waiting import wait_until

from elastictrain.data.fetch import make_fetcher
from elastictrain.errors import DataError


class Numbers(Dataset[Any]):
    def __init__(self, length: int = 400) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.full(
            (64,), index
        ), f"{index}" * 4000  # the text fills the pipe: a killed process leaves half of it


class Stuck(Numbers):
    """Sample 100 and later never come."""

    def __getitem__(self, index: int) -> Any:
        if index >= 100:
            threading.Event().wait()
        return super().__getitem__(index)


def loaders() -> list[psutil.Process]:
    """Living child processes; Python's own tracker of shared memory is none of the loader's."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.pid != resource_tracker._resource_tracker._pid]


def open_things() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    me = psutil.Process()
    return me.num_fds(), me.num_threads()


def iterate(dataset: Any, **options: Any) -> Any:
    fetcher = make_fetcher(dataset, batch_size=10, shuffle=False, seed=0, num_workers=2, **options)
    return fetcher.iterate(epoch=0, batch_index=0, rank=0, world_size=1)


def warm_up() -> None:
    """Open what torch and multiprocessing open once and keep; drop batches that earlier tracebacks hold."""
    for _ in iterate(Numbers(20)):
        pass
    gc.collect()


def raise_in_the_loop() -> None:
    for _ in iterate(Numbers()):
        raise KeyError("the training code failed")


def leave_the_loop() -> None:
    for _ in iterate(Numbers()):
        break


def test_no_pipe_stays_open_when_the_error_is_kept() -> None:
    """A traceback that runs through torch's iterator would keep that, and with it every pipe."""
    warm_up()
    before = open_things()
    kept = []
    for _ in range(4):
        row = iterate(Stuck())
        next(row)
        loaders()[0].kill()
        with pytest.raises(DataError) as caught:
            list(row)
        kept.append(caught.value)
    wait_until(lambda: open_things() == before, 10.0, lambda: (open_things(), before))
    assert len(kept) == 4


def fail_in_collate(items: list[Any]) -> Any:
    raise ValueError("no")


def test_nothing_is_left_when_iterations_end_in_any_way() -> None:
    warm_up()
    before = open_things()
    for _ in range(3):
        list(iterate(Numbers(40)))
        partial = iterate(Numbers())
        next(partial)
        assert len(loaders()) == 2
        partial.close()
        assert loaders() == []
        with pytest.raises(KeyError):
            raise_in_the_loop()
        assert loaders() == []
        with pytest.raises(DataError):
            next(iterate(Numbers(), collate_fn=fail_in_collate))
        assert loaders() == []
        leave_the_loop()
        assert loaders() == []
    gc.collect()
    assert open_things() == before


def test_processes_end_when_the_fetcher_is_closed() -> None:
    fetcher = make_fetcher(Numbers(), batch_size=10, shuffle=False, seed=0, num_workers=2)
    rows = [fetcher.iterate(epoch=0, batch_index=0, rank=rank, world_size=2) for rank in range(2)]
    for row in rows:
        next(row)
    assert len(loaders()) == 4
    fetcher.close()
    assert loaders() == []
    assert next(rows[0], None) is None


def test_close_does_not_wait_when_a_process_is_stuck_in_the_data_set() -> None:
    stuck = iterate(Stuck())
    next(stuck)
    started_s = time.monotonic()
    stuck.close()
    assert time.monotonic() - started_s < 2
    assert loaders() == []


@pytest.mark.parametrize("dataset", [Numbers(), Stuck()])
def test_death_of_a_process_is_told_when_the_next_batch_is_asked_for(dataset: Any) -> None:
    row = iterate(dataset)
    next(row)
    victim = loaders()[0]
    victim.kill()
    with pytest.raises(DataError, match=rf"loader process {victim.pid} ended with SIGKILL"):
        list(row)
    assert loaders() == []


def test_death_of_a_process_is_told_at_once_when_the_trainer_waits_for_it() -> None:
    row = iterate(Stuck())
    for _ in range(10):
        next(row)
    victim = loaders()[0]
    killed_s: list[float] = []

    def kill() -> None:
        killed_s.append(time.monotonic())
        victim.kill()

    timer = threading.Timer(0.2, kill)
    timer.start()
    with pytest.raises(DataError, match="SIGKILL"):
        next(row)
    assert time.monotonic() - killed_s[0] < 1
    timer.join()


def test_training_code_is_not_interrupted_when_a_process_dies() -> None:
    """torch would raise RuntimeError from its signal handler, in the middle of whatever runs."""
    row = iterate(Numbers())
    next(row)
    victim = loaders()[0]
    descriptor = os.pidfd_open(victim.pid)
    victim.kill()
    assert select.select([descriptor], [], [], 10)[0]
    os.close(descriptor)
    assert sum(range(10_000)) == 49_995_000  # the handler would run here
    row.close()
    assert loaders() == []


TRAINER = """
import multiprocessing, sys, threading
import torch
from elastictrain.data.fetch import make_fetcher

if __name__ == "__main__":
    method = sys.argv[1]
    if method != "default":
        multiprocessing.set_start_method(method)
    rows = torch.arange(100)
    fetcher = make_fetcher(rows, batch_size=10, shuffle=True, seed=0, num_workers=2)
    row = fetcher.iterate(epoch=0, batch_index=0, rank=0, world_size=1)
    next(row)
    (loader,) = fetcher._open._loaders
    print(*loader.pids, flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("method", ["default", "spawn"])
def test_processes_die_when_the_trainer_is_killed(tmp_path: Path, method: str) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, str(script), method],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    ) as trainer:
        assert trainer.stdout is not None
        descriptors = [os.pidfd_open(int(pid)) for pid in trainer.stdout.readline().split()]
        assert len(descriptors) == 2
        trainer.send_signal(signal.SIGKILL)
        for descriptor in descriptors:
            assert select.select([descriptor], [], [], 3)[0], "a loader process outlived the trainer"
            os.close(descriptor)  # torch's own watchdog would take 5 s
