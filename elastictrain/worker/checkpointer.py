"""When a worker saves and from where it restores. Rank 0 writes; everybody else gets the state in `sync`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from elastictrain.checkpoint.restore import choose_checkpoint, find_unfinished, load_checkpoint
from elastictrain.checkpoint.save import save_checkpoint
from elastictrain.clock import SystemClock
from elastictrain.errors import CheckpointError

if TYPE_CHECKING:
    from elastictrain.worker.run import Run

AUTO_COST: Final = 0.01
AUTO_SHORTEST_S: Final = 10.0
AUTO_LONGEST_S: Final = 600.0


class Checkpointer:
    """The checkpoints of one worker, written in its main thread when the loop's body is over.

    "auto" saves as often as keeps the cost of saving below AUTO_COST of the time, between AUTO_SHORTEST_S and
    AUTO_LONGEST_S.
    """

    def __init__(self, run: Run, welcome: dict[str, Any]) -> None:
        self._run = run
        self._directory = Path(welcome["run_dir"]) / "checkpoints"
        self._keep = int(welcome["keep"])
        self._every_kind = str(welcome["checkpoint_every"]["kind"])
        self._every_value = float(welcome["checkpoint_every"]["value"])
        self._at_step: int | None = welcome.get("resume_at_step")
        self._saved_step = -1
        self._saved_s = time.monotonic()
        self._cost_s = 0.0
        self._is_wanted = False

    def at_body_end(self) -> None:
        """Save when it is time to; called by every rank when the body of a committed step is over, acts on rank 0."""
        wanted = self._run._control.take_save_request() or self._is_wanted
        if self._run.rank == 0 and (wanted or self._is_due()):
            self._save()
        self._is_wanted = False

    def _is_due(self) -> bool:
        if self._every_kind == "steps":
            return self._run.step % max(1, int(self._every_value)) == 0
        since_s = time.monotonic() - self._saved_s
        if self._every_kind == "seconds":
            return since_s >= self._every_value
        return since_s >= min(AUTO_LONGEST_S, max(AUTO_SHORTEST_S, self._cost_s / AUTO_COST))

    def save_now(self, *, deferred: bool) -> None:
        if deferred:
            self._is_wanted = True
        elif self._run.rank == 0 and self._run._holds_state and self._run.step != self._saved_step:
            self._save()

    def save_standing(self) -> None:
        """Save on the agent's word while this worker stands still between steps; any rank, since all hold the same."""
        self._save()

    def save_final(self) -> None:
        if self._run.rank == 0 and self._run.step != self._saved_step:
            self._save(is_final=True)

    def _save(self, *, is_final: bool = False) -> None:
        run = self._run
        began_s = time.monotonic()
        run._control.channel.ring()  # the record must not be behind a checkpoint that a resume finds
        try:
            saved = save_checkpoint(
                self._directory,
                run._state.capture(at_body_end=True),
                step=run.step,
                generation=run.generation,
                run_id=run.run_id,
                cursor=run._body_cursor or run._cursor.to_json(),
                world_size=run.world_size,
                keep=self._keep,
                clock=SystemClock(),
            )
        except (OSError, CheckpointError) as error:
            # Training goes on without it: the failure is told at once, and the last good checkpoint stays.
            run._control.channel.send("save_failed", step=run.step, error=str(error), final=is_final)
            self._saved_s = time.monotonic()
            return
        self._saved_step, self._saved_s = run.step, time.monotonic()
        self._cost_s = self._saved_s - began_s
        run._control.channel.send(
            "saved",
            step=run.step,
            path=saved.path.name,
            size_bytes=saved.size_bytes,
            seconds=self._cost_s,
            generation=run.generation,
        )

    def restore(self) -> None:
        """Load the newest intact checkpoint (or the asked-for step) into this rank, or start from the beginning.

        Raises CheckpointError when there are checkpoints but none is intact: starting over silently would lose the run.
        """
        run = self._run
        at_step, self._at_step = self._at_step, None
        unfinished = find_unfinished(self._directory)
        if at_step is None and unfinished is not None:
            rejected = [[each.path.name, each.problem] for each in unfinished]
            run._control.channel.send(
                "resumed_from", step=0, cursor=run._cursor.to_json(), path=None, rejected=rejected
            )
            return
        choice = choose_checkpoint(self._directory, at_step=at_step)
        loaded = load_checkpoint(choice.found)
        run._state.load(loaded.state, position="committed")
        run._cursor.load(loaded.manifest.cursor)
        run._committed_cursor, run._body_cursor = run._cursor.to_json(), {}
        self._saved_step = run.step
        run._control.channel.send(
            "resumed_from",
            step=run.step,
            cursor=run._cursor.to_json(),
            path=choice.found.path.name,
            rejected=[[path.name, problem] for path, problem in choice.rejected],
        )
