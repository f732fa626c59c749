"""A run that is killed whole, again and again, goes on where its newest checkpoint is and ends as if nothing was."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from support_runs import (
    Job,
    events,
    finish,
    read_ledger,
    run_words,
    standing_commits,
    started,
    steps_by_records,
    wait_for,
)

SAMPLES, EPOCHS, STEPS_PER_EPOCH = 101, 9, 13
NUM_STEPS = EPOCHS * STEPS_PER_EPOCH
OPTIONS = ("--checkpoint-every", "3steps", "--keep", "1")
KILLS = 10


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(folder / "records" / "final.pt", weights_only=True))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = finish(folder, *run_words(folder, "--epochs", str(EPOCHS), options=OPTIONS))
    assert job.process.returncode == 0, job.err()
    return folder


def kill_at_a_random_moment(job: Job, chance: random.Random, num_before: int) -> None:
    """Let the run commit one to eight steps more, and a few milliseconds pass, before everything is killed."""
    wait_for(job, "commit", num_before + chance.randint(1, 8))
    threading.Event().wait(chance.uniform(0.0, 0.04))
    job.kill_everything()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_resume_ends_as_undisturbed_when_the_whole_run_is_killed_ten_times(tmp_path: Path, undisturbed: Path) -> None:
    chance = random.Random(20240607)
    legs = [f"leg-{number}" for number in range(KILLS + 1)]
    words = run_words(tmp_path, "--epochs", str(EPOCHS), "--pause-s", "0.02", options=OPTIONS)
    resume = ["resume", str(tmp_path / "run")]
    sizes = {4: "1", 5: "3", 6: "2"}
    for number, leg in enumerate(legs[:-1]):
        size = ["--nproc-per-node", sizes[number]] if number in sizes else []
        before = len(events(tmp_path / "run", "commit")) if number else 0
        with started(tmp_path, *(words if number == 0 else resume + size), leg=leg) as job:
            kill_at_a_random_moment(job, chance, before)
    assert not events(tmp_path / "run", "run_finished")
    job = finish(tmp_path, *resume, leg=legs[-1])
    assert job.process.returncode == 0, job.err()

    entries = read_ledger(tmp_path / "run")
    assert len([entry for entry in entries if entry["event"] == "run_started"]) == KILLS + 1
    assert {entry["world_size"] for entry in entries if entry["event"] == "commit"} == {1, 2, 3}
    assert finish(tmp_path, "verify", tmp_path / "run", leg="verify").process.returncode == 0
    check_lineage(tmp_path, legs)
    compare(tmp_path, legs, undisturbed)


def check_lineage(folder: Path, legs: list[str]) -> None:
    """By the workers' own records each epoch is the data set, each sample once; and the ledger says the same."""
    steps = steps_by_records(folder, legs)
    commits = standing_commits(read_ledger(folder / "run"))
    assert [commit["step"] for commit in commits] == list(range(1, NUM_STEPS + 1)) == sorted(steps)
    for epoch in range(EPOCHS):
        mine = [commit for commit in commits if commit["epoch"] == epoch]
        seen = Counter(number for commit in mine for number in steps[commit["step"]][0])
        assert seen == Counter(range(SAMPLES)), f"epoch {epoch}"
    for commit in commits:
        assert len(steps[commit["step"]][0]) == commit["stop"] - commit["start"], commit


def compare(folder: Path, legs: list[str], undisturbed: Path) -> None:
    """Weights and the loss of every single step equal those of a run that nothing happened to."""
    steps, expected = steps_by_records(folder, legs), steps_by_records(undisturbed, ["run"])
    for step, (ids, loss) in expected.items():
        assert steps[step][0] == ids
        assert steps[step][1] == pytest.approx(loss, abs=1e-9), f"step {step}"
    ours, theirs = weights(folder), weights(undisturbed)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-9)
