"""Loops as people write them: what three workers train, one of them killed, is what one worker trains by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness import Job, start_run, verify

KINDS = [
    "accumulate_by_hand",
    "two_optimizers",
    "closure",
    "late_collective",
    "swallowed_error",
    "own_weight",
    "scaled",
    "unfrozen",
    "frozen_later",
]


def weights(job: Job) -> list[torch.Tensor]:
    assert job.wait() == 0, job.output()
    assert verify(job.run_dir).returncode == 0
    return [torch.tensor(value, dtype=torch.float64) for value in json.loads((job.out / "weights.json").read_text())]


@pytest.mark.parametrize("kind", KINDS)
def test_three_workers_train_what_one_does_when_one_of_them_is_killed(tmp_path: Path, kind: str) -> None:
    alone = weights(start_run(tmp_path, "train_loops.py", "--kind", kind, nproc=1, name="alone"))
    job = start_run(tmp_path, "train_loops.py", "--kind", kind, "--kill", "1", nproc=3, name="killed")
    for mine, theirs in zip(weights(job), alone, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    failures = [entry for entry in job.find("worker_exited") if entry["cause"] != "finished"]
    assert [entry["signal"] for entry in failures] == [9], "the others have not failed"
