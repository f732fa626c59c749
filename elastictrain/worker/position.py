"""Where a run stands: how many steps are committed, and which batch of which pass over the data comes next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastictrain.errors import CheckpointError


@dataclass(slots=True, kw_only=True)
class Cursor:
    """The position of a run.

    `step` counts committed steps of the run. `epoch` is the pass over the data, `loop` the number of the `run.steps`
    call within that epoch (within the run, outside `run.epochs`), `batch` the committed batches of this pass,
    `loop_steps` the committed steps of this call. Samples that were fetched but not committed are counted nowhere.
    """

    step: int = 0
    epoch: int = 0
    loop: int = 0
    batch: int = 0
    loop_steps: int = 0

    def next_epoch(self) -> None:
        self.epoch += 1
        self.batch = 0

    def next_loop(self, loop: int, epoch: int) -> None:
        self.loop, self.epoch, self.batch, self.loop_steps = loop, epoch, 0, 0

    def commit(self) -> None:
        self.step += 1
        self.batch += 1
        self.loop_steps += 1

    def to_json(self) -> dict[str, int]:
        # By hand: dataclasses.asdict copies deeply, and this runs in every step.
        return {
            "step": self.step,
            "epoch": self.epoch,
            "loop": self.loop,
            "batch": self.batch,
            "loop_steps": self.loop_steps,
        }

    def load(self, values: Mapping[str, Any]) -> None:
        """Take over another cursor's values. Raises CheckpointError when they are none."""
        try:
            for name in self.to_json():
                setattr(self, name, int(values[name]))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"expected a cursor with {sorted(self.to_json())}, saw {dict(values)!r}: the checkpoint was made by "
                "another version or another program"
            ) from None
