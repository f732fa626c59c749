"""The end of a run: ranks that finish at different times, and one that is lost when the others have finished."""

from __future__ import annotations

from pathlib import Path

import pytest
from support_runs import Job, events, finish

SCRIPT = """\
import os, signal, sys, threading
import torch
from torch.utils.data import TensorDataset
import elastictrain

run = elastictrain.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = run.prepare(model, optimizer)
for step in run.steps(TensorDataset(torch.ones(12, 2)), batch_size=4):
    with step as (x,):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
rank, slow_rank, act = run.rank, int(sys.argv[1]), sys.argv[2]
if rank == slow_rank or run.world_size == 1:
    threading.Event().wait(1.0)
    if act == "kill" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "raise":
        raise OSError("the upload failed")
    open(f"after-{slow_rank}", "w").close()
"""


def end_run(folder: Path, slow_rank: int, act: str) -> Job:
    (folder / "script.py").write_text(SCRIPT)
    words = ["run", "--nproc-per-node", "2", "--run-dir", "run", "--checkpoint-every", "2steps"]
    return finish(folder, *words, "script.py", str(slow_rank), act)


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_run_ends_well_without_a_trace_when_one_rank_has_work_after_the_loop(tmp_path: Path, slow_rank: int) -> None:
    job = end_run(tmp_path, slow_rank, "wait")
    assert job.process.returncode == 0, job.err()
    assert (tmp_path / f"after-{slow_rank}").exists()
    assert len(events(tmp_path / "run", "worker_started")) == 2
    assert not events(tmp_path / "run", "broken")
    assert "Traceback" not in job.err()
    assert "WARNING" not in job.err()


def test_work_after_the_loop_is_done_by_another_when_its_worker_is_killed(tmp_path: Path) -> None:
    """Exit code 0 must mean that somebody did it, from the newest checkpoint on."""
    job = end_run(tmp_path, 0, "kill")
    assert job.process.returncode == 0, job.err()
    assert (tmp_path / "after-0").exists()
    assert len(events(tmp_path / "run", "worker_started")) == 3
    assert events(tmp_path / "run", "run_finished")[0]["step"] == 3
    assert finish(tmp_path, "verify", "run", leg="verify").process.returncode == 0


def test_run_fails_with_the_traceback_when_work_after_the_loop_raises(tmp_path: Path) -> None:
    job = end_run(tmp_path, 0, "raise")
    assert job.process.returncode == 1
    assert job.err().splitlines()[-1].endswith("OSError: the upload failed")
    assert not (tmp_path / "after-0").exists()
