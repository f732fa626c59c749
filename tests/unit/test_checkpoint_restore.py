"""Restoring: any damage is found and named, nothing is executed, nothing is read from outside the folder."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from elastictrain.checkpoint import restore
from elastictrain.checkpoint.layout import Condition
from elastictrain.checkpoint.manifest import MAX_CHUNK_BYTES, FileRecord, digest
from elastictrain.checkpoint.save import save_checkpoint
from elastictrain.clock import ManualClock
from elastictrain.errors import CheckpointError

FILES = ("manifest.json", "state.safetensors", "tree.json")


def save(directory: Path, step: int, numel: int = 200) -> Path:
    state = {"model": {"weight": torch.full((numel,), float(step))}, "rng": tuple(range(20)), "step": step}
    facts: dict[str, Any] = {"generation": 1, "run_id": "r", "cursor": {}, "world_size": 1, "keep": 9}
    return save_checkpoint(directory, state, step=step, clock=ManualClock(), **facts).path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Step 20, the newest; step 10 is intact before it."""
    save(tmp_path, 10)
    return save(tmp_path, 20)


def look(folder: Path) -> restore.Found:
    found = restore.inspect_folder(folder)
    assert found is not None
    return found


def assert_passed_over(folder: Path, *named: str) -> str:
    """The damage to step 20 is named by verify, choose and load, and step 10 is taken in its place."""
    choice = restore.choose_checkpoint(folder.parent)
    assert choice.found.step == 10
    ((path, problem),) = choice.rejected
    assert path == folder
    assert restore.verify_checkpoint(look(folder)) == problem
    for text in named:
        assert text in problem
    with pytest.raises(CheckpointError) as caught:
        restore.load_checkpoint(look(folder))
    for text in named:
        assert text in str(caught.value)
    with pytest.raises(CheckpointError, match="no intact checkpoint of step 20"):
        restore.choose_checkpoint(folder.parent, at_step=20)
    return problem


@pytest.mark.parametrize("name", FILES)
def test_restore_passes_over_a_checkpoint_when_one_bit_of_a_file_is_flipped(folder: Path, name: str) -> None:
    path = folder / name
    good = path.read_bytes()
    for position in sorted({0, 7, 8, len(good) // 2, len(good) - 1, *range(0, len(good), 1 + len(good) // 25)}):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        path.write_bytes(bad)
        assert_passed_over(folder, name)
    path.write_bytes(good)
    assert restore.choose_checkpoint(folder.parent).found.step == 20


def test_verify_names_the_chunk_when_a_file_has_many(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, numel=(2 * MAX_CHUNK_BYTES + 100_000) // 4)
    path = folder / "state.safetensors"
    for chunk, position in enumerate([MAX_CHUNK_BYTES - 1, MAX_CHUNK_BYTES, path.stat().st_size - 1]):
        with path.open("r+b") as file:
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ 16]))
        problem = restore.verify_checkpoint(look(folder))
        assert problem is not None
        assert f"state.safetensors: chunk {chunk} (bytes {chunk * MAX_CHUNK_BYTES} to" in problem
        with pytest.raises(CheckpointError, match=rf"step-0000000001/state\.safetensors: chunk {chunk} "):
            restore.load_checkpoint(look(folder))
        with path.open("r+b") as file:
            file.seek(position)
            file.write(bytes([byte]))
    assert restore.verify_checkpoint(look(folder)) is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_restore_passes_over_a_checkpoint_when_a_file_is_cut(folder: Path, name: str, kept: float) -> None:
    os.truncate(folder / name, int((folder / name).stat().st_size * kept))
    assert_passed_over(folder, name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"\0", b"\xff\xfe garbage ", b"{}"])
def test_restore_passes_over_a_checkpoint_when_a_file_is_nonsense_of_the_same_length(
    folder: Path, name: str, content: bytes
) -> None:
    size = (folder / name).stat().st_size
    (folder / name).write_bytes((content * size)[:size])
    assert_passed_over(folder, name)


@pytest.mark.parametrize("name", FILES)
def test_restore_passes_over_a_checkpoint_when_a_file_grew_or_is_missing(folder: Path, name: str) -> None:
    with (folder / name).open("ab") as file:
        file.write(b" ")
    assert_passed_over(folder, name)
    (folder / name).unlink()
    problem = assert_passed_over(folder, name)
    assert ("torn" in problem) == (name == "manifest.json")


@pytest.mark.parametrize("name", FILES)
def test_restore_passes_over_a_checkpoint_when_a_file_is_of_another_step(folder: Path, name: str) -> None:
    other = folder.parent / "step-0000000010" / name
    assert other.stat().st_size == (folder / name).stat().st_size, "else the length alone would tell"
    shutil.copy(other, folder / name)
    assert_passed_over(folder, name)


def test_restore_passes_over_a_folder_when_it_was_renamed_to_a_higher_step(tmp_path: Path) -> None:
    save(tmp_path, 10)
    copy = tmp_path / "step-0000000099"
    shutil.copytree(tmp_path / "step-0000000010", copy)
    choice = restore.choose_checkpoint(tmp_path)
    assert choice.found.step == 10
    assert "is of step 10" in choice.rejected[0][1]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_restore_refuses_a_file_when_it_is_not_a_regular_one(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    elsewhere = folder.parent / "elsewhere"
    path.rename(elsewhere)
    if kind == "link":
        path.symlink_to(elsewhere)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    problem = assert_passed_over(folder, name)
    assert ("symbolic link" if kind == "link" else "regular file") in problem


def test_restore_refuses_a_folder_when_it_is_a_link_or_a_file(folder: Path) -> None:
    moved = folder.rename(folder.parent / "moved")
    folder.symlink_to(moved)
    (folder.parent / "step-0000000030").write_text("a file")
    choice = restore.choose_checkpoint(folder.parent)
    assert choice.found.step == 10
    assert [(path.name, "not a folder" in problem) for path, problem in choice.rejected] == [
        ("step-0000000030", True),
        ("step-0000000020", True),
    ]


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def reseal(folder: Path, name: str, data: bytes) -> None:
    """Replace a file, and make a manifest that agrees with it: only the parsers are left to refuse it."""
    old = look(folder).manifest
    assert old is not None
    sealed = FileRecord(name=name, size_bytes=len(data), chunk_bytes=MAX_CHUNK_BYTES, digests=(digest(data),))
    files = tuple(sealed if record.name == name else record for record in old.files)
    (folder / name).write_bytes(data)
    (folder / "manifest.json").write_bytes(replace(old, files=files).to_json_bytes())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("maker", ["pickle", "torch"])
def test_pickle_is_never_executed_when_it_stands_in_place_of_a_file(folder: Path, name: str, maker: str) -> None:
    mark = folder.parent / "executed"
    if maker == "pickle":
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save(Bomb(mark), folder / name)
    assert_passed_over(folder, name)
    assert not mark.exists()
    pickle_works = folder.parent / "control"
    pickle.loads(pickle.dumps(Bomb(pickle_works)))
    assert pickle_works.exists(), "the bomb is live"


@pytest.mark.parametrize("name", ["state.safetensors", "tree.json"])
def test_pickle_is_never_executed_when_even_the_digests_fit(folder: Path, name: str) -> None:
    mark = folder.parent / "executed"
    reseal(folder, name, pickle.dumps(Bomb(mark)))
    found = restore.choose_checkpoint(folder.parent).found
    assert found.step == 20
    with pytest.raises(CheckpointError, match=r"step-0000000020 cannot be loaded: .*expected (a safetensors|strict)"):
        restore.load_checkpoint(found)
    assert not mark.exists()


@pytest.mark.parametrize("content", [b"[]", b"5", b'{"$dict": [[1, 2]]}', b'{"w": {"$new": 1}}', b'{"a": NaN}'])
def test_load_answers_with_a_checkpoint_error_when_the_tree_is_sealed_nonsense(folder: Path, content: bytes) -> None:
    reseal(folder, "tree.json", content)
    assert restore.verify_checkpoint(look(folder)) is None
    with pytest.raises(CheckpointError, match="step-0000000020 cannot be loaded: "):
        restore.load_checkpoint(look(folder))


def test_find_lists_newest_first_and_ignores_strangers_when_the_folder_is_mixed(folder: Path) -> None:
    directory = folder.parent
    save(directory, 10)
    (directory / "step-0000000015").mkdir()
    (directory / "step-0000000099.backup").mkdir()
    (directory / "notes.txt").write_text("mine")
    assert [(found.path.name, found.condition) for found in restore.find_checkpoints(directory)] == [
        ("step-0000000020", Condition.INTACT),
        ("step-0000000015", Condition.TORN),
        ("step-0000000010-a1", Condition.INTACT),
        ("step-0000000010", Condition.INTACT),
    ]


def test_choose_skips_higher_steps_with_reasons_when_they_hold_nothing(folder: Path) -> None:
    for step, content in ((30, None), (40, b""), (50, b"\0" * 500), (60, os.urandom(500)), (70, pickle.dumps([1]))):
        junk = folder.parent / f"step-00000000{step}"
        junk.mkdir()
        if content is not None:
            for name in FILES:
                (junk / name).write_bytes(content)
    choice = restore.choose_checkpoint(folder.parent)
    assert choice.found.step == 20
    assert [path.name[-2:] for path, _ in choice.rejected] == ["70", "60", "50", "40", "30"]
    assert all("manifest.json" in problem for _, problem in choice.rejected)


def test_choose_takes_exactly_the_step_asked_for_or_names_those_there_are(folder: Path) -> None:
    assert restore.choose_checkpoint(folder.parent, at_step=10).found.step == 10
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 15 .* there are steps 10, 20; name one"):
        restore.choose_checkpoint(folder.parent, at_step=15)


def test_choose_says_what_it_saw_when_there_is_nothing_to_choose(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        assert restore.find_checkpoints(directory) == []
        with pytest.raises(CheckpointError, match="no checkpoint in"):
            restore.choose_checkpoint(directory)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected a readable folder"):
        restore.find_checkpoints(tmp_path / "file")


def test_choose_lists_every_reject_when_none_is_intact(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder.parent / "step-0000000010" / "tree.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)step-0000000020: torn.*step-0000000010: tree\.json: missing"):
        restore.choose_checkpoint(folder.parent)


def test_tensors_have_memory_of_their_own_when_loaded(folder: Path) -> None:
    model = restore.load_checkpoint(look(folder)).state["model"]
    assert isinstance(model, dict)
    assert model["weight"].untyped_storage().nbytes() == 200 * 4
    model["weight"].fill_(0)
    assert restore.verify_checkpoint(look(folder)) is None


def test_find_choose_and_verify_run_without_torch_when_only_listing(folder: Path) -> None:
    program = (
        "import sys, pathlib; from elastictrain.checkpoint import restore\n"
        "choice = restore.choose_checkpoint(pathlib.Path(sys.argv[1]))\n"
        "heavy = {'torch', 'numpy', 'safetensors'} & set(sys.modules)\n"
        "print(choice.found.step, sorted(heavy))"
    )
    command = [sys.executable, "-c", program, str(folder.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "20 []\n"
