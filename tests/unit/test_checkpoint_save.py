"""Saving: what is committed is what was captured, a folder is never reused, old ones go in a safe order."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastictrain.checkpoint import restore, retention
from elastictrain.checkpoint.layout import Condition
from elastictrain.checkpoint.save import STAGES, SavedCheckpoint, prune, save_checkpoint
from elastictrain.clock import ManualClock, SystemClock
from elastictrain.errors import CheckpointError, ConfigError


def state_of(step: int, numel: int = 1000) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {"model": {"weight": torch.randn(numel, generator=generator)}, "epoch": step // 10, 5: "five"}


def save(directory: Path, step: int, **changes: Any) -> SavedCheckpoint:
    state = {"part": state_of(step)}
    facts: dict[str, Any] = {"generation": 2, "run_id": "digits", "cursor": {"samples": step * 32}, "world_size": 3}
    return save_checkpoint(directory, **{"state": state, "step": step, **facts, "clock": SystemClock(), **changes})


def assert_holds(found: restore.Found, step: int, numel: int = 1000) -> None:
    """The checkpoint loads to exactly what was saved at `step`."""
    loaded = restore.load_checkpoint(found)
    part, expected = loaded.state["part"], state_of(step, numel)
    assert isinstance(part, dict)
    assert torch.equal(part["model"]["weight"], expected["model"]["weight"])  # type: ignore[index]
    assert {**part, "model": 0} == {**expected, "model": 0}
    assert loaded.manifest.step == step
    assert loaded.manifest.cursor == {"samples": step * 32}


def test_save_is_found_verified_and_loaded_exactly_when_nothing_happens(tmp_path: Path) -> None:
    clock = ManualClock()
    saved = save(tmp_path / "run" / "checkpoints", 1200, clock=clock)
    assert saved.path == tmp_path / "run" / "checkpoints" / "step-0000001200"
    assert sorted(os.listdir(saved.path)) == ["manifest.json", "state.safetensors", "tree.json"]
    assert saved.size_bytes == sum((saved.path / name).stat().st_size for name in ("state.safetensors", "tree.json"))
    assert tuple(saved.seconds_by_stage) == STAGES
    (found,) = restore.find_checkpoints(saved.path.parent)
    assert (found.path, found.step, found.problem, found.condition) == (saved.path, 1200, None, Condition.INTACT)
    assert restore.verify_checkpoint(found) is None
    assert found.manifest is not None
    assert (found.manifest.generation, found.manifest.world_size, found.manifest.run_id) == (2, 3, "digits")
    assert found.manifest.created_wall_s == clock.wall
    assert_holds(found, 1200)


def test_save_never_writes_into_a_folder_when_one_of_that_step_is_there(tmp_path: Path) -> None:
    (tmp_path / "step-0000000007").mkdir()
    torn = tmp_path / "step-0000000007" / "state.safetensors"
    torn.write_bytes(b"half")
    (tmp_path / "step-0000000007-a4").mkdir()
    assert save(tmp_path, 7).path.name == "step-0000000007-a5"
    assert save(tmp_path, 7).path.name == "step-0000000007-a6"
    assert restore.choose_checkpoint(tmp_path).found.path.name == "step-0000000007-a6"


def test_save_keeps_private_content_when_tensors_change_afterwards(tmp_path: Path) -> None:
    weight = torch.zeros(4)
    save(tmp_path, 1, state={"tied": [weight, weight.view(2, 2)]})
    weight.fill_(9)
    tied = restore.load_checkpoint(restore.choose_checkpoint(tmp_path).found).state["tied"]
    assert isinstance(tied, list)
    assert [each.tolist() for each in tied] == [[0.0] * 4, [[0.0, 0.0], [0.0, 0.0]]]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"keep": 0}, ConfigError),
        ({"step": -1}, CheckpointError),
        ({"world_size": 0}, CheckpointError),
        ({"cursor": {1: 2}}, CheckpointError),
        ({"state": {"bad": object()}}, CheckpointError),
        ({"state": {1: 2}}, CheckpointError),
    ],
)
def test_save_writes_nothing_when_the_call_is_wrong(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        save(tmp_path / "checkpoints", **{"step": 1, **changes})
    assert os.listdir(tmp_path) == []


def test_save_says_what_to_do_when_the_directory_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    with pytest.raises(
        CheckpointError, match=r"step 3 could not be saved .* a file is in the place .*check that the run directory"
    ):
        save(tmp_path / "checkpoints", 3)


def test_save_prunes_the_oldest_and_sweeps_torn_ones_when_more_than_kept(tmp_path: Path) -> None:
    (tmp_path / "step-0000000005").mkdir()
    (tmp_path / "step-0000000099").mkdir()
    (tmp_path / "step-0000000001.backup").mkdir()
    for step in (10, 20, 30):
        saved = save(tmp_path, step, keep=2)
    assert [(pruned.path.name, pruned.reason, pruned.error) for pruned in saved.pruned] == [
        ("step-0000000010", "2 intact checkpoints are newer, 2 are kept", None)
    ]
    assert sorted(os.listdir(tmp_path)) == [
        "step-0000000001.backup",
        "step-0000000020",
        "step-0000000030",
        "step-0000000099",
    ]


def test_prune_keeps_older_ones_when_a_newer_one_has_a_flipped_bit(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep=9)
    flip(tmp_path / "step-0000000030" / "state.safetensors", -1)
    saved = save(tmp_path, 40, keep=1)
    assert [pruned.path.name for pruned in saved.pruned] == ["step-0000000010"]
    assert [found.step for found in restore.find_checkpoints(tmp_path)] == [40, 30, 20]
    saved = save(tmp_path, 50, keep=1)
    assert [found.step for found in restore.find_checkpoints(tmp_path)] == [50, 40]


def test_prune_deletes_nothing_when_only_two_are_left_intact(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=9)
    for step in (30, 40):
        flip(tmp_path / f"step-00000000{step}" / "tree.json", 0)
    assert prune(tmp_path, policies=[retention.keep_latest(1)]) == ()
    assert_holds(restore.choose_checkpoint(tmp_path).found, 20)


def test_prune_reports_and_goes_on_when_a_folder_cannot_be_deleted(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep=9)
    (tmp_path / "step-0000000010" / "notes").mkdir()
    saved = save(tmp_path, 40, keep=1)
    assert [(pruned.path.name, pruned.error is None) for pruned in saved.pruned] == [
        ("step-0000000010", False),
        ("step-0000000020", True),
    ]
    assert [(found.step, found.condition) for found in restore.find_checkpoints(tmp_path)] == [
        (40, Condition.INTACT),
        (30, Condition.INTACT),
        (10, Condition.TORN),
    ]


def test_prune_changes_nothing_when_it_is_a_dry_run(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep=9)
    plan = prune(tmp_path, policies=[retention.keep_latest(1)], dry_run=True)
    assert [pruned.path.name for pruned in plan] == ["step-0000000010"]
    assert len(restore.find_checkpoints(tmp_path)) == 3


def test_save_survives_when_the_run_went_back_to_an_earlier_step(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step)
    saved = save(tmp_path, 15, keep=1)
    assert saved.path.is_dir()
    assert_holds(restore.choose_checkpoint(tmp_path, at_step=15).found, 15)


def test_files_are_plain_json_and_safetensors_when_read_by_others(tmp_path: Path) -> None:
    saved = save(tmp_path, 1, state={"model": {"w": torch.ones(2)}, "lr": 0.5})
    assert json.loads((saved.path / "tree.json").read_text()) == {
        "model": {"w": {"$tensor": {"name": "model.w", "dtype": "float32", "shape": [2]}}},
        "lr": 0.5,
    }
    import safetensors.torch

    assert safetensors.torch.load_file(saved.path / "state.safetensors")["model.w"].tolist() == [1.0, 1.0]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "elastictrain-test", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root and the right to mount")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_save_leaves_the_old_one_and_no_remains_when_the_disk_is_full(small_disk: Path) -> None:
    save(small_disk, 10)
    free = os.statvfs(small_disk).f_bavail
    with pytest.raises(CheckpointError, match=r"step 20 .*No space left.* bytes needed, \d+ free; free space or keep"):
        save(small_disk, 20, state={"part": state_of(20, numel=1_000_000)})
    assert os.listdir(small_disk) == ["step-0000000010"]
    assert os.statvfs(small_disk).f_bavail == free
    assert_holds(restore.choose_checkpoint(small_disk).found, 10)
    save(small_disk, 30)
    assert_holds(restore.choose_checkpoint(small_disk).found, 30)


def test_save_commits_or_leaves_nothing_when_the_disk_fills_at_any_page(small_disk: Path) -> None:
    save(small_disk, 10)
    filler = small_disk / "filler"
    outcomes = []
    for num_pages in range(12):
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, (os.statvfs(small_disk).f_bavail - num_pages) * 4096)
        try:
            saved = save(small_disk, 20)
        except CheckpointError as error:
            cause = error.__cause__
            outcomes.append("full" if isinstance(cause, OSError) and cause.errno == errno.ENOSPC else repr(error))
            assert sorted(os.listdir(small_disk)) == ["filler", "step-0000000010"]
        else:
            outcomes.append("saved")
            assert_holds(restore.choose_checkpoint(small_disk).found, 20)
            for name in os.listdir(saved.path):
                (saved.path / name).unlink()
            saved.path.rmdir()
        filler.unlink()
        assert_holds(restore.choose_checkpoint(small_disk, at_step=10).found, 10)
    # Too little for any file, enough for some of the three files, enough for all.
    num_full = outcomes.count("full")
    assert 3 <= num_full < len(outcomes)
    assert outcomes == ["full"] * num_full + ["saved"] * (len(outcomes) - num_full)


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)
