"""The same loss and replacement of a worker with NCCL: needs two CUDA devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import assert_exactly_once, start_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, for a group over NCCL"),
]


@pytest.mark.parametrize("point", ["forward", "reduce", "optimizer", "between"])
def test_survivor_goes_on_when_a_worker_is_killed_on_cuda(tmp_path: Path, point: str) -> None:
    job = start_run(tmp_path, "train_mnist.py", "--point", point, "--rank", "1", nproc=2)
    assert job.wait() == 0, job.output()
    assert [entry["world_size"] for entry in job.find("round")] == [2, 1, 2]
    assert_exactly_once(job, num_samples=1003, num_epochs=2)
