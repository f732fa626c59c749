"""Everything that trains comes through a recovery: the same on all ranks, and the same as without the failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Job, start_run, verify


def ends(job: Job) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in job.out.glob("end-*.json")]
    return sorted(found, key=lambda end: end["rank"])


def assert_same(mine: Any, theirs: Any, where: str = "state") -> None:
    """Equal to rounding: a rebuilt gradient bucket adds the three ranks' numbers in another order."""
    if isinstance(mine, torch.Tensor):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, msg=where)
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), where
        for key in mine:
            assert_same(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(mine, list | tuple):
        assert len(mine) == len(theirs), where
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert mine == theirs, where


def assert_undisturbed(job: Job, undisturbed: Job) -> None:
    """Weights, buffers, Adam's moments, schedule, EMA and metric are those of the run without a failure."""
    assert_same(*(torch.load(each.out / "final.pt", weights_only=True) for each in (job, undisturbed)))
    assert [end["total"] for end in ends(job)] == [end["total"] for end in ends(undisturbed)]


def finished(job: Job) -> list[dict[str, Any]]:
    assert job.wait() == 0, job.output()
    assert verify(job.run_dir).returncode == 0
    result = ends(job)
    assert [end["rank"] for end in result] == [0, 1, 2]
    assert len({end["digest"] for end in result}) == 1, "all ranks hold the same state"
    return result


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = start_run(tmp_path_factory.mktemp("undisturbed"), "train_everything.py", nproc=3)
    finished(job)
    return job


@pytest.mark.parametrize("rank", [0, 2])
def test_state_is_the_undisturbed_one_when_a_killed_worker_is_replaced(
    undisturbed: Job, tmp_path: Path, rank: int
) -> None:
    """With --min-world-size the step is tried again by three workers: it is as if nothing had happened."""
    job = start_run(
        tmp_path, "train_everything.py", "--fault", "kill", "--rank", str(rank), options=["--min-world-size", "3"]
    )
    finished(job)
    assert [entry["world_size"] for entry in job.find("round")] == [3, 3]
    assert_undisturbed(job, undisturbed)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_state_is_the_undisturbed_one_when_a_connection_breaks(
    undisturbed: Job, tmp_path: Path, num_workers: int
) -> None:
    """Nobody died: the same workers try the same step again, from exactly the state it had begun with."""
    job = start_run(
        tmp_path, "train_everything.py", "--fault", "disconnect", "--rank", "1", "--num-workers", str(num_workers)
    )
    finished(job)
    assert [entry["cause"] for entry in job.find("broken")] == ["collective_failed"]
    assert len(job.find("worker_exited")) == 3
    assert_undisturbed(job, undisturbed)


def test_ranks_hold_one_state_when_the_world_shrinks_and_grows(tmp_path: Path) -> None:
    """Dropout and BatchNorm see other shares then, so the bits differ from the undisturbed run, but not among ranks."""
    job = start_run(tmp_path, "train_everything.py", "--fault", "kill", "--rank", "1", options=["--spares", "0"])
    finished(job)
    assert [entry["world_size"] for entry in job.find("round")] == [3, 2, 3]
