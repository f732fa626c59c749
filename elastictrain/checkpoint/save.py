"""The life of a checkpoint, from tensors that training is about to change to a folder that a restore will trust.

    1. capture      private contiguous copies on the CPU; from here on training may change anything
    2. stage        claim a folder that never existed before; lay the files out in memory
    3. persist      write each data file: temp, fsync, rename; then fsync the folder
    4. acknowledge  what is on the disk has the length that was written
    5. commit       manifest.json, last and atomically: now it is a checkpoint
    6. announce     read it back the way a restore does; only then may anybody be told
    7. prune        delete what retention no longer needs, manifest first

A process that dies in 1 to 4 leaves a torn folder, which no restore takes and a later prune sweeps. One that dies in 5
leaves a torn folder or a checkpoint, nothing between. One that dies in 6 or 7 leaves a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from elastictrain.checkpoint import restore, retention, storage, strict_json, tensor_file, tree
from elastictrain.checkpoint.layout import (
    MANIFEST_NAME,
    TENSORS_NAME,
    TREE_NAME,
    Condition,
    folder_name,
    parse_folder_name,
)
from elastictrain.checkpoint.manifest import FileRecord, Manifest
from elastictrain.clock import Clock
from elastictrain.errors import CheckpointError

STAGES = ("capture", "stage", "persist", "acknowledge", "commit", "announce", "prune")


@dataclass(frozen=True, slots=True)
class Pruned:
    """A checkpoint folder that retention let go, and why; `error` where it could not be deleted."""

    path: Path
    reason: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A committed, durable checkpoint. `size_bytes` counts its data files."""

    path: Path
    step: int
    size_bytes: int
    seconds_by_stage: Mapping[str, float] = field(default_factory=dict)
    pruned: tuple[Pruned, ...] = ()


@dataclass(frozen=True, slots=True)
class Staged:
    """A claimed folder and the content of its files."""

    folder: Path
    files: Mapping[str, list[bytes | memoryview]]

    @property
    def size_bytes(self) -> int:
        return sum(len(piece) for pieces in self.files.values() for piece in pieces)


def save_checkpoint(
    directory: Path,
    state: Mapping[str, object],
    *,
    step: int,
    generation: int,
    run_id: str,
    cursor: Mapping[str, object],
    world_size: int,
    keep: int = 3,
    clock: Clock,
) -> SavedCheckpoint:
    """Save `state` as the checkpoint of `step` below `directory`; returns when it is durable. Blocks on the disk.

    Needs memory for one more copy of the state. An older checkpoint is never touched before this one is committed.
    Raises CheckpointError where the state cannot be stored, or the disk is full or fails: then nothing was committed,
    unless the message says so, and what was written is removed. Raises ConfigError for a `keep` below 1.
    """
    policies = [retention.keep_latest(keep)]
    seconds: dict[str, float] = {}
    # Facts that the manifest would refuse are refused before anything is copied or written.
    manifest = Manifest(
        run_id=run_id,
        generation=generation,
        step=step,
        cursor=dict(cursor),
        created_wall_s=clock.wall_time_s(),
        world_size=world_size,
        files=(),
    )
    with _timed("capture", seconds, clock):
        captured = capture(state)
    with _timed("stage", seconds, clock), _disk_errors(directory, step):
        staged = stage(directory, captured, step=step)
    try:
        with _disk_errors(directory, step, staged.size_bytes):
            with _timed("persist", seconds, clock):
                records = persist(staged)
            with _timed("acknowledge", seconds, clock):
                acknowledge(staged, records)
            with _timed("commit", seconds, clock):
                manifest = commit(staged, replace(manifest, files=records))
    except BaseException:  # also an interrupt: an abandoned attempt only takes space
        with contextlib.suppress(OSError):
            storage.remove_folder(staged.folder, first=MANIFEST_NAME)
        raise
    with _timed("announce", seconds, clock):
        saved = announce(staged, manifest)
    with _timed("prune", seconds, clock):
        pruned = prune(directory, policies=policies, writing=staged.folder)
    return replace(saved, seconds_by_stage=seconds, pruned=pruned)


def capture(state: Mapping[str, object]) -> tree.Encoded:
    """Copy the state: afterwards nothing in it is shared with training. Dying here leaves nothing."""
    if not all(type(key) is str for key in state):
        raise CheckpointError(f"state: expected a string for the name of each part, saw {list(state)!r:.200}")
    encoded = tree.encode(dict(state))
    return tree.Encoded(encoded.tree, {name: _private_copy(name, each) for name, each in encoded.tensors.items()})


def stage(directory: Path, captured: tree.Encoded, *, step: int) -> Staged:
    """Claim a new folder and lay out the files' content. Dying here leaves an empty folder."""
    files: dict[str, list[bytes | memoryview]] = {
        TENSORS_NAME: tensor_file.to_pieces(captured.tensors),
        TREE_NAME: [strict_json.dump(captured.tree)],
    }
    storage.make_folder(directory)
    return Staged(_claim_folder(directory, step), files)


def persist(staged: Staged) -> tuple[FileRecord, ...]:
    """Write the data files durably. Dying here leaves a torn folder."""
    records = tuple(
        storage.write_durably(staged.folder / name, pieces).finish(name) for name, pieces in staged.files.items()
    )
    storage.fsync_folder(staged.folder)
    return records


def acknowledge(staged: Staged, records: tuple[FileRecord, ...]) -> None:
    """Compare the files with what was written, by kind and length. Raises CheckpointError."""
    problems = [problem for record in records if (problem := storage.size_problem(staged.folder, record))]
    if problems:
        raise CheckpointError(
            f"{staged.folder.name} changed while it was written: {'; '.join(problems)}; does another process write "
            "into this run directory?",
            path=str(staged.folder),
        )


def commit(staged: Staged, manifest: Manifest) -> Manifest:
    """Write the manifest. Dying before its rename leaves a torn folder, after it a checkpoint."""
    # The folder's own name must be durable before anything in it claims to be a checkpoint.
    storage.fsync_folder(staged.folder.parent)
    storage.write_durably(staged.folder / MANIFEST_NAME, [manifest.to_json_bytes()])
    storage.fsync_folder(staged.folder)
    return manifest


def announce(staged: Staged, manifest: Manifest) -> SavedCheckpoint:
    """Look at the checkpoint with the eyes of a restore, and return what may be told to others."""
    found = restore.inspect_folder(staged.folder)
    if found is None or found.problem is not None or found.manifest != manifest:
        seen = found.problem if found is not None else "no folder"
        raise CheckpointError(
            f"{staged.folder.name} was committed, and does not read back: {seen or 'another manifest'}; check the disk",
            path=str(staged.folder),
        )
    return SavedCheckpoint(staged.folder, manifest.step, manifest.size_bytes)


def prune(
    directory: Path, *, policies: list[retention.Policy], writing: Path | None = None, dry_run: bool = False
) -> tuple[Pruned, ...]:
    """Delete what no policy keeps, and torn folders that an intact checkpoint has overtaken; never `writing`.

    The two newest checkpoints that pass full verification always stay; they are read for that, but only when there is
    something to delete. Of older ones, the cheap look decides whether they count. A folder that cannot be
    deleted is reported, not raised: the checkpoints are safe either way.
    """
    found = {(each.step, each.attempt): each for each in restore.find_checkpoints(directory)}
    kept = {place: retention.Kept(*place, each.condition) for place, each in found.items()}
    exempt = parse_folder_name(writing.name) if writing is not None else None
    if not retention.plan_prune(list(kept.values()), policies, writing=exempt):
        return ()
    num_verified = 0
    for place, each in found.items():
        if each.condition is Condition.INTACT and num_verified < retention.FLOOR:
            if restore.verify_checkpoint(each) is None:
                num_verified += 1
            else:
                kept[place] = replace(kept[place], condition=Condition.DAMAGED)
    plan = retention.plan_prune(list(kept.values()), policies, writing=exempt)
    return tuple(_delete(found[item.place].path, reason, dry_run=dry_run) for item, reason in plan)


def _delete(folder: Path, reason: str, *, dry_run: bool) -> Pruned:
    if dry_run:
        return Pruned(folder, reason)
    try:
        storage.remove_folder(folder, first=MANIFEST_NAME)
    except OSError as error:
        return Pruned(folder, reason, f"{error.strerror or error}; delete the folder by hand")
    return Pruned(folder, reason)


def _claim_folder(directory: Path, step: int) -> Path:
    """Create the folder of a new attempt: one that exists, committed or torn, is never written into again."""
    places = [place for name in os.listdir(directory) if (place := parse_folder_name(name)) is not None]
    attempt = max((attempt + 1 for at_step, attempt in places if at_step == step), default=0)
    while True:
        folder = directory / folder_name(step, attempt)
        try:
            folder.mkdir()
        except FileExistsError:
            attempt += 1
        else:
            return folder


def _private_copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
    try:
        # Into new memory, whatever the strides, device, or lazy conjugation of the source.
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
    except (RuntimeError, NotImplementedError) as error:
        raise CheckpointError(f"state at {name}: cannot copy a {tensor.dtype} on {tensor.device} ({error})") from None


@contextlib.contextmanager
def _timed(name: str, seconds: dict[str, float], clock: Clock) -> Iterator[None]:
    start_s = clock.now_s()
    yield
    seconds[name] = clock.now_s() - start_s


@contextlib.contextmanager
def _disk_errors(directory: Path, step: int, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"the disk is full: {_space(directory, needed_bytes)}; free space or keep fewer checkpoints"
        else:
            advice = "check that the run directory is there, writable and healthy"
        raise CheckpointError(
            f"step {step} could not be saved below {directory}: {error.strerror or error} ({advice}); "
            "earlier checkpoints are untouched",
            path=str(error.filename or directory),
        ) from error


def _space(directory: Path, needed_bytes: int | None) -> str:
    needed = "" if needed_bytes is None else f"{needed_bytes} bytes needed, "
    with contextlib.suppress(OSError):
        return f"{needed}{shutil.disk_usage(directory).free} free"
    return f"{needed}free space unknown"
