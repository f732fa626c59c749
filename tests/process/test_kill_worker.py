"""A worker is killed at every point of a step: the survivors go on in their processes, nothing is lost or repeated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Job, assert_exactly_once, start_run

SAMPLES, EPOCHS = 1003, 2


def weights(job: Job) -> dict[str, torch.Tensor]:
    return torch.load(job.out / "final.pt", weights_only=True)


def assert_same_weights(one: Job, other: Job, *, tolerance: float) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = start_run(tmp_path_factory.mktemp("undisturbed"), "train_mnist.py", "--pause-s", "0", nproc=3)
    assert job.wait() == 0, job.output()
    assert_exactly_once(job, num_samples=SAMPLES, num_epochs=EPOCHS)
    return job


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("point", ["forward", "reduce", "optimizer", "between"])
def test_survivors_go_on_when_a_worker_is_killed(undisturbed: Job, tmp_path: Path, point: str, rank: int) -> None:
    # Without a spare, which may be there before the survivors stand still: the world is to shrink.
    words = ["--point", point, "--rank", str(rank)]
    job = start_run(tmp_path, "train_mnist.py", *words, nproc=3, options=["--spares", "0"])
    assert job.wait() == 0, job.output()

    started = {entry["worker_id"]: entry["pid"] for entry in job.find("worker_started")}
    exits = [entry for entry in job.find("worker_exited") if entry["signal"] == 9 and entry["cause"] == "signal"]
    assert len(exits) == 1
    assert exits[0]["rank"] == rank
    assert len(started) == 4, "three workers and one replacement, nobody else"
    survivors = set(started.values()) - {exits[0]["pid"]}
    ends = {int(path.name.removeprefix("end-")) for path in job.out.glob("end-*")}
    assert ends == survivors, "the survivors and the replacement reach the end in the processes they began in"

    steps = [entry["step"] for entry in job.find("commit")]
    assert steps == sorted(set(steps)), "the step counter never goes back"
    assert_exactly_once(job, num_samples=SAMPLES, num_epochs=EPOCHS)
    sizes = [entry["world_size"] for entry in job.find("round")]
    assert sizes == [3, 2, 3], "the world shrinks at once and is whole again"
    recovered = job.find("recovered")[0]
    assert recovered["cause"] == "worker_lost"
    assert list(recovered["seconds_by_stage"]) == [
        "detect",
        "fence",
        "abort",
        "park",
        "agree",
        "rebuild",
        "sync",
        "rewind",
        "resume",
    ]
    assert_same_weights(job, undisturbed, tolerance=1e-9)
