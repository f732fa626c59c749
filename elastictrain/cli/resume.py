"""`elastictrain resume RUN_DIR`: name the checkpoint, step and position a run will go on from, and go on."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from elastictrain.agent.contact import reach_store
from elastictrain.checkpoint.restore import Choice, choose_checkpoint, find_checkpoints, find_unfinished
from elastictrain.cli.main import prepare
from elastictrain.cli.status import read_status
from elastictrain.errors import CheckpointError
from elastictrain.launching import run_command_line
from elastictrain.log import get_logger
from elastictrain.resolve import resolve_resume
from elastictrain.run_directory import claim_run_dir, read_spec

logger = get_logger(__name__)


def resume_command(namespace: argparse.Namespace) -> int:
    """Continue the run of a run directory; one that has finished is left as it is.

    Raises ConfigError for a path that is none, CheckpointError when there are checkpoints but none is intact.
    """
    run_dir = Path(namespace.run_dir).absolute()
    config = resolve_resume(read_spec(run_dir), run_dir, namespace, os.environ)
    at_step: int | None = getattr(namespace, "at_step", None)
    is_dry = getattr(namespace, "dry_run", False)
    prepare(config)
    if is_dry:
        if not _is_finished(run_dir, at_step):
            _say_choice(_choose(run_dir, at_step))
        return 0
    reach_store(config, os.environ)
    claim = claim_run_dir(config, resume=True)
    try:
        if _is_finished(run_dir, at_step):
            claim.close()
            return 0
        choice = _choose(run_dir, at_step)
        _say_choice(choice)
        if at_step is not None:
            _set_aside(run_dir / "checkpoints", at_step)
    except BaseException:
        claim.close()
        raise
    return run_command_line(config, claim, resume_at_step=at_step, committed_step=read_status(run_dir).step or 0)


def _is_finished(run_dir: Path, at_step: int | None) -> bool:
    """Whether there is nothing left to do, which is said. `--at-step` trains again from an older step on purpose."""
    status = read_status(run_dir)
    if at_step is not None or status.state != "finished":
        return False
    sys.stdout.write(
        f"run {status.run_id} finished at step {status.step}: nothing is left to do. To train again from one of its "
        "checkpoints, give --at-step\n"
    )
    return True


def _choose(run_dir: Path, at_step: int | None) -> Choice | None:
    """The checkpoint to go on from, None when the run never saved one.

    Raises CheckpointError when those that the ledger tells of are gone.
    """
    directory = run_dir / "checkpoints"
    if at_step is None and find_unfinished(directory) is not None:
        told = read_status(run_dir).checkpoint
        if told is not None:
            raise CheckpointError(
                f"expected checkpoints in {directory}, by the ledger the newest of step {told['step']}, seen none that "
                "is finished: put them back, or start a new run in another directory",
                path=str(directory),
            )
        return None
    return choose_checkpoint(directory, at_step=at_step)


def _say_choice(choice: Choice | None) -> None:
    if choice is None:
        sys.stdout.write("no checkpoint yet: the run begins again at step 0\n")
    else:
        for path, problem in choice.rejected:
            sys.stdout.write(f"not used: {path.name}: {problem}\n")
        manifest = choice.found.manifest
        assert manifest is not None
        cursor = manifest.cursor
        sys.stdout.write(
            f"continuing from {choice.found.path.name}: step {manifest.step}, epoch {cursor.get('epoch')}, "
            f"batch {cursor.get('batch')} of its data; saved by {manifest.world_size} workers\n"
        )
    sys.stdout.flush()


def _set_aside(directory: Path, at_step: int) -> None:
    """Rename the checkpoints behind `at_step`: they belong to a continuation that is given up, but nothing is lost."""
    for found in find_checkpoints(directory):
        if found.step > at_step:
            target = found.path.with_name(f"set-aside-{found.path.name}")
            number = 1
            while target.exists():
                number += 1
                target = found.path.with_name(f"set-aside-{number}-{found.path.name}")
            try:
                found.path.rename(target)
            except OSError as error:
                raise CheckpointError(f"cannot rename {found.path}: {error.strerror}", path=str(found.path)) from None
            logger.info("%s is later than step %d: kept as %s", found.path.name, at_step, target.name)
