"""`elastictrain checkpoints list|verify`: which checkpoints a run has, and whether each is intact."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from elastictrain.errors import ConfigError


class FoundCheckpoint(Protocol):
    """What is read here of `elastictrain.checkpoint.restore.Found`."""

    @property
    def path(self) -> Path: ...

    @property
    def step(self) -> int: ...

    @property
    def manifest(self) -> Any: ...

    @property
    def problem(self) -> str | None: ...


class _Restore(Protocol):
    def find_checkpoints(self, directory: Path) -> Sequence[FoundCheckpoint]: ...

    def verify_checkpoint(self, found: FoundCheckpoint) -> str | None: ...


def _restore() -> _Restore:
    # Loaded on use: `status` and `verify` must start without it.
    return cast(_Restore, importlib.import_module("elastictrain.checkpoint.restore"))


def checkpoints_command(action: str, run_dir: Path) -> int:
    """Print the checkpoints of a run, newest first. Exit code 1 where one has a problem. `verify` reads every byte.

    Raises ConfigError where `run_dir` is no run directory, or on an unknown action.
    """
    if not (run_dir / "run.json").is_file():
        raise ConfigError(f"{run_dir} is no run directory: expected run.json in it: check the path", field="run_dir")
    if action not in ("list", "verify"):
        raise ConfigError(f"unknown action {action!r}: use list or verify", field="action", seen=action)
    restore = _restore()
    found = restore.find_checkpoints(run_dir / "checkpoints")
    if not found:
        print(f"{run_dir} has no checkpoint yet")
        return 0
    num_problems = 0
    for checkpoint in found:
        problem = checkpoint.problem
        if action == "verify" and problem is None:
            problem = restore.verify_checkpoint(checkpoint)
        print(_line(checkpoint, problem, good="intact" if action == "verify" else "complete"))
        num_problems += problem is not None
    if action == "verify":
        print(f"{len(found) - num_problems} of {len(found)} checkpoints intact")
    return 1 if num_problems else 0


def _line(checkpoint: FoundCheckpoint, problem: str | None, *, good: str) -> str:
    facts = f"step {checkpoint.step:>10}  {checkpoint.path.name:<20}"
    if checkpoint.manifest is not None:
        size_mib = sum(file.size_bytes for file in checkpoint.manifest.files) / (1 << 20)
        facts += f"  {size_mib:>10.1f} MiB  generation {checkpoint.manifest.generation}"
    return f"{facts}  {good if problem is None else f'BAD: {problem}'}"
