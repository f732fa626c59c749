"""`elastictrain resume`: what it says, what it leaves alone, from where it goes on, and when it refuses."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from support_runs import events, finish, one_line, read_ledger, run_words, standing_commits, started, wait_for

OPTIONS = ("--checkpoint-every", "4steps", "--keep", "9")


def contents(run_dir: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and its time of change, but for the lock, which each command takes for a moment."""
    return {
        str(path.relative_to(run_dir)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(run_dir.rglob("*"))
        if path.is_file() and path.name != "agent.lock"
    }


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was killed at step 15 or a little later; while it lived nobody else could have it."""
    folder = tmp_path_factory.mktemp("killed")
    with started(folder, *run_words(folder, "--epochs", "2", "--pause-s", "0.12", options=OPTIONS)) as job:
        wait_for(job, "commit", 1)
        second = finish(folder, "resume", folder / "run", leg="second")
        again = finish(folder, *run_words(folder), leg="again")
        wait_for(job, "commit", 15)
        job.kill_everything()
    assert not events(folder / "run", "run_finished"), "it was to be killed in the middle"
    assert second.process.returncode == 2
    assert f"in use by process {job.process.pid}" in one_line(second.err())
    assert again.process.returncode == 2
    assert "elastictrain resume" in one_line(again.err())
    return folder


@pytest.fixture
def folder(killed: Path, tmp_path: Path) -> Path:
    """A copy of the killed run, for a test that changes it."""
    shutil.copytree(killed / "run", tmp_path / "run")
    (tmp_path / "records").mkdir()
    return tmp_path


def newest_step(run_dir: Path) -> int:
    return max(int(path.parent.name[5:15]) for path in run_dir.glob("checkpoints/step-*/manifest.json"))


def test_dry_run_names_the_place_and_changes_nothing_when_a_run_was_killed(folder: Path) -> None:
    step = newest_step(folder / "run")
    before = contents(folder / "run")
    job = finish(folder, "resume", folder / "run", "--dry-run", leg="dry")
    assert job.process.returncode == 0, job.err()
    epoch, batch = divmod(step, 13)
    assert f"step {step}, epoch {epoch}, batch {batch}" in one_line(job.out())
    assert contents(folder / "run") == before


def test_resume_trains_again_from_an_older_step_when_asked_and_nothing_once_finished(folder: Path) -> None:
    run_dir = folder / "run"
    newer = sorted(path.name for path in run_dir.glob("checkpoints/step-*") if int(path.name[5:15]) > 8)
    with started(folder, "resume", run_dir, "--at-step", "8", "--nproc-per-node", "1", leg="at") as job:
        assert job.wait() == 0, job.err()
    assert "step 8, epoch 0, batch 8" in job.out()
    assert events(run_dir, "resumed")[-1]["step"] == 8
    commits = standing_commits(read_ledger(run_dir))
    assert [commit["step"] for commit in commits] == list(range(1, 27))
    assert {commit["world_size"] for commit in commits[8:]} == {1}
    assert finish(folder, "verify", run_dir, leg="verify").process.returncode == 0
    set_aside = [path.name for path in run_dir.glob("checkpoints/set-aside-*")]
    assert sorted(name.removeprefix("set-aside-") for name in set_aside) == newer, "nothing is lost"

    before = contents(run_dir)
    for leg, options in (("over", []), ("dry", ["--dry-run"])):
        job = finish(folder, "resume", run_dir, *options, leg=leg)
        assert job.process.returncode == 0, job.err()
        assert "finished at step 26" in one_line(job.out())
    assert contents(run_dir) == before, "a run that is over is not touched"


def test_resume_refuses_with_the_list_when_every_checkpoint_is_damaged(folder: Path) -> None:
    run_dir = folder / "run"
    names = []
    for number, path in enumerate(sorted(run_dir.glob("checkpoints/step-*/state.safetensors"))):
        content = bytearray(path.read_bytes())
        content[-5 - number] ^= 0x10
        path.write_bytes(content)
        names.append(path.parent.name)
    assert len(names) >= 3
    before = contents(run_dir)
    for options in ([], ["--dry-run"]):
        job = finish(folder, "resume", run_dir, *options)
        assert job.process.returncode == 1, job.err()
        assert "no intact checkpoint" in job.err()
        assert re.findall(r"step-\d{10}: state\.safetensors: chunk 0", job.err()), job.err()
        assert all(name in job.err() for name in names)
        assert contents(run_dir) == before, "nothing is trained, nothing is deleted"


def test_resume_takes_the_newest_intact_checkpoint_when_newer_ones_are_torn(folder: Path) -> None:
    """Torn folders of higher steps, as a kill in the middle of a save leaves them, and a damaged newest one."""
    run_dir = folder / "run"
    newest = newest_step(run_dir)
    damaged = run_dir / "checkpoints" / f"step-{newest:010d}" / "tree.json"
    damaged.write_bytes(b"\0" * damaged.stat().st_size)
    empty = run_dir / "checkpoints" / "step-0000000021"
    empty.mkdir()
    hollow = run_dir / "checkpoints" / "step-0000000022"
    hollow.mkdir()
    for name in ("manifest.json", "state.safetensors", "tree.json"):
        (hollow / name).touch()
    job = finish(folder, "resume", run_dir, leg="on")
    assert job.process.returncode == 0, job.err()
    assert events(run_dir, "resumed")[0]["step"] == newest - 4
    for name in (damaged.parent.name, empty.name, hollow.name):
        assert f"not used: {name}" in job.out()
    assert finish(folder, "verify", run_dir, leg="verify").process.returncode == 0
    assert (run_dir / "checkpoints" / "step-0000000026" / "manifest.json").exists()


def test_resume_begins_again_when_there_was_no_checkpoint_yet(tmp_path: Path) -> None:
    with started(tmp_path, *run_words(tmp_path, "--pause-s", "0.05"), leg="first") as job:
        wait_for(job, "commit", 3)
        job.kill_everything()
    job = finish(tmp_path, "resume", tmp_path / "run", leg="second")
    assert job.process.returncode == 0, job.err()
    assert "begins again at step 0" in job.out()
    assert [commit["step"] for commit in standing_commits(read_ledger(tmp_path / "run"))] == list(range(1, 14))
    assert finish(tmp_path, "verify", tmp_path / "run", leg="verify").process.returncode == 0


@pytest.mark.parametrize("what", ["step-*/manifest.json", "step-*"])
def test_resume_refuses_to_begin_again_when_the_checkpoints_that_the_ledger_tells_of_are_gone(
    folder: Path, what: str
) -> None:
    run_dir = folder / "run"
    newest = newest_step(run_dir)
    for path in run_dir.glob(f"checkpoints/{what}"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    before = contents(run_dir)
    for options in ([], ["--dry-run"]):
        job = finish(folder, "resume", run_dir, *options)
        assert job.process.returncode == 1, job.err()
        assert f"by the ledger the newest of step {newest}," in one_line(job.err())
        assert contents(run_dir) == before


def test_resume_refuses_when_a_checkpoint_holds_a_pickle(folder: Path, tmp_path: Path) -> None:
    """No byte of a checkpoint is unpickled, and no name in it leads out of its folder."""
    run_dir, sign = folder / "run", tmp_path / "executed"
    payload = b"cos\nsystem\n(S'touch " + os.fsencode(sign) + b"'\ntR."
    for path in run_dir.glob("checkpoints/step-*/*"):
        path.write_bytes(payload)
    job = finish(folder, "resume", run_dir)
    assert job.process.returncode == 1, job.err()
    assert "no intact checkpoint" in job.err()
    assert not sign.exists()
