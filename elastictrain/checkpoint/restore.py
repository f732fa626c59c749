"""Find, check, choose and load checkpoints. Everything but `load_checkpoint` works without importing torch.

A folder counts when its manifest says so and the bytes agree. Nothing is trusted for its name or its age, nothing is
unpickled, no link is followed out of the folder.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from elastictrain.checkpoint import storage, strict_json
from elastictrain.checkpoint.layout import (
    MANIFEST_NAME,
    TENSORS_NAME,
    TREE_NAME,
    Condition,
    parse_folder_name,
)
from elastictrain.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from elastictrain.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint folder as a cheap look shows it; `problem` is None where it looks intact."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: str | None
    attempt: int = 0
    condition: Condition = Condition.INTACT


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoint to continue from, fully verified, and the newer folders that were passed over, each with why."""

    found: Found
    rejected: list[tuple[Path, str]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint's content; tensors are on the CPU, each with memory of its own."""

    state: dict[str, object]
    manifest: Manifest


def find_checkpoints(directory: Path) -> list[Found]:
    """List the checkpoint folders below `directory`, newest first; other entries are nobody's business.

    Cheap: reads manifests, and looks at the files' lengths. Returns [] where `directory` does not exist. Raises
    CheckpointError where it cannot be listed.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"{directory}: expected a readable folder of checkpoints: {error.strerror or error}", path=str(directory)
        ) from None
    found = [each for name in names if (each := inspect_folder(directory / name)) is not None]
    return sorted(found, key=lambda each: (each.step, each.attempt), reverse=True)


def find_unfinished(directory: Path) -> list[Found] | None:
    """The folders there, newest first, when no save among them has ever finished; None when one has.

    A run that ended in its very first save has nothing to go on from, and nothing that was promised is lost.
    """
    found = find_checkpoints(directory)
    return found if all(each.condition is Condition.TORN for each in found) else None


def inspect_folder(folder: Path) -> Found | None:
    """Take a cheap look at one folder. Returns None where its name is no checkpoint's, or it has just gone."""
    place = parse_folder_name(folder.name)
    if place is None:
        return None
    step, attempt = place
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return Found(folder, step, None, "not a folder (links are not followed)", attempt, Condition.DAMAGED)
        manifest = Manifest.from_json_bytes(storage.read_file(folder, MANIFEST_NAME, limit_bytes=MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        # Also where a prune in another process takes the folder away between the two looks.
        if not os.path.lexists(folder):
            return None
        problem = f"torn: no {MANIFEST_NAME}, so its save did not finish (or is under way)"
        return Found(folder, step, None, problem, attempt, Condition.TORN)
    except (OSError, CheckpointError) as error:
        return Found(folder, step, None, storage.describe(error, MANIFEST_NAME), attempt, Condition.DAMAGED)
    contradiction = _contradiction(folder, step, manifest)
    condition = Condition.DAMAGED if contradiction else Condition.INTACT
    return Found(folder, step, manifest, contradiction, attempt, condition)


def verify_checkpoint(found: Found) -> str | None:
    """Read every byte and check every digest. Returns the first problem, naming file and chunk, or None."""
    if found.problem is not None or found.manifest is None:
        return found.problem or f"no {MANIFEST_NAME}"
    for record in found.manifest.files:
        problem = storage.digest_problem(found.path, record)
        if problem is not None:
            return problem
    return None


def choose_checkpoint(directory: Path, *, at_step: int | None = None) -> Choice:
    """Return the newest checkpoint that passes full verification, or that of exactly `at_step`. Reads it whole.

    Raises CheckpointError where there is none, none at `at_step`, or none intact; the message names what was seen.
    """
    found = find_checkpoints(directory)
    if not found:
        raise CheckpointError(
            f"no checkpoint in {directory}: expected a folder like step-0000001200; was the run directory given, and "
            "did the run reach its first save?",
            path=str(directory),
        )
    candidates = found if at_step is None else [each for each in found if each.step == at_step]
    if not candidates:
        raise CheckpointError(
            f"no checkpoint of step {at_step} in {directory}: there are {_steps(found)}; name one of these",
            path=str(directory),
        )
    rejected: list[tuple[Path, str]] = []
    for each in candidates:
        problem = verify_checkpoint(each)
        if problem is None:
            return Choice(each, rejected)
        rejected.append((each.path, problem))
    of_step = "" if at_step is None else f" of step {at_step}"
    listing = "".join(f"\n  {path.name}: {problem}" for path, problem in rejected)
    raise CheckpointError(f"no intact checkpoint{of_step} in {directory}; rejected:{listing}", path=str(directory))


def load_checkpoint(found: Found) -> Loaded:
    """Load the state, checking each digest on the very bytes that are used. Imports torch.

    Needs twice the state's size in memory for a while. Raises CheckpointError naming file and chunk, or the place in
    the state; then nothing is returned.
    """
    # Here, not above: `status` and `checkpoints list` start fast and work where torch is broken.
    from elastictrain.checkpoint import tensor_file, tree

    if found.manifest is None or found.problem is not None:
        raise CheckpointError(f"{found.path.name}: {verify_checkpoint(found)}", path=str(found.path))
    try:
        structure = strict_json.parse(_content(found, TREE_NAME), what=TREE_NAME)
        state = tree.decode(structure, tensor_file.from_bytes(_content(found, TENSORS_NAME)))
        if type(state) is not dict or not all(type(key) is str for key in state):
            raise CheckpointError(f"expected a dict of named parts, saw a {type(state).__name__}")
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpoint {found.path.name} cannot be loaded: {error}", path=error.path or str(found.path)
        ) from None
    return Loaded(state, found.manifest)


def _content(found: Found, name: str) -> bytes:
    record = found.manifest.file(name) if found.manifest is not None else None
    if record is None:
        raise CheckpointError(f"{MANIFEST_NAME} lists no {name}", path=str(found.path))
    return storage.read_verified(found.path, record)


def _contradiction(folder: Path, step: int, manifest: Manifest) -> str | None:
    if manifest.step != step:
        return f"{MANIFEST_NAME} is of step {manifest.step}: the folder was renamed, or the file swapped"
    for name in (TENSORS_NAME, TREE_NAME):
        if manifest.file(name) is None:
            return f"{MANIFEST_NAME} lists no {name}"
    problems = (storage.size_problem(folder, record) for record in manifest.files)
    return next((problem for problem in problems if problem is not None), None)


def _steps(found: list[Found]) -> str:
    intact = sorted({each.step for each in found if each.condition is Condition.INTACT})
    return f"steps {', '.join(map(str, intact))}" if intact else "only damaged or unfinished ones"
