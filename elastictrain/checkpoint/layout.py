"""Names inside `RUN_DIR/checkpoints`: one folder for each attempt at saving a step. Pure.

A folder is called `step-0000001200`, or `step-0000001200-a1`, `-a2` ... for later attempts at the same step. A name is
matched whole, so that `step-0000001200.backup` is nobody's business here.
"""

from __future__ import annotations

import enum
import re

MANIFEST_NAME = "manifest.json"
TENSORS_NAME = "state.safetensors"
TREE_NAME = "tree.json"

_FOLDER = re.compile(r"step-(?P<step>[0-9]{10,18})(?:-a(?P<attempt>[1-9][0-9]{0,8}))?", re.ASCII)


class Condition(enum.Enum):
    """What a checkpoint folder is worth."""

    INTACT = "intact"
    TORN = "torn"
    """No manifest: the save never finished, or a deletion did not."""
    DAMAGED = "damaged"
    """There is a manifest, and the content contradicts it (or this version cannot read it)."""


def folder_name(step: int, attempt: int = 0) -> str:
    """Name the folder of one attempt at saving `step`."""
    return f"step-{step:010d}" + (f"-a{attempt}" if attempt else "")


def parse_folder_name(name: str) -> tuple[int, int] | None:
    """Return (step, attempt), or None where `name` is not exactly what `folder_name` gives."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    step, attempt = int(match["step"]), int(match["attempt"] or 0)
    return (step, attempt) if folder_name(step, attempt) == name else None
