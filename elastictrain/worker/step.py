"""The life of a step: draw → compute → reduce → commit, or else abort → rewind.

1. draw     this rank's part of the global batch is there and the agent lets the step begin
2. compute  the user's block runs: forward, backward
3. reduce   the gradients are sums over all ranks, buffers are their mean; after this nothing can fail
4. commit   the optimizer has changed the parameters; the step counts

An attempt that loses a peer before `reduce` is done is undone and tried again; user code does not notice. Whoever has
finished `reduce` may commit alone: its gradients are those of the whole global batch, so it holds the only possible
outcome, and the others take it over. The block is left only after the recovery, so that the code behind it finds the
step committed on every rank or on none.
"""

from __future__ import annotations

import time
import traceback as traceback_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim import Optimizer

from elastictrain.data.fetch import Fetched
from elastictrain.data.order import mix
from elastictrain.data.seeding import seed_all
from elastictrain.errors import ConfigError, StepAborted
from elastictrain.worker.recovery import recover

if TYPE_CHECKING:
    from elastictrain.worker.run import Run

STEP_STREAM: Final = 0x57E9


def on_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`, in dicts, lists and tuples too; as it is where it is there already."""
    if device.type == "cpu":
        return batch
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: on_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(value, device) for value in batch)
    return batch


class Step:
    """One try at one step; a context manager that gives this rank's part of the batch, on `run.device`.

    `committed` tells after the block whether the step counts. An attempt that was undone is followed by another one at
    the same batch.
    """

    def __init__(self, run: Run, fetched: Fetched, *, seed: int, batch_size: int, draw_s: float) -> None:
        self._run = run
        self._fetched = fetched
        self._seed = seed
        self._batch_size = batch_size
        self.committed = False
        self.was_tried = False
        self.is_reduced = False
        self._own_weight: float | None = None
        self._total: torch.Tensor | None = None
        self._total_work: Any = None
        self._base_step = run._cursor.step
        self._num_collectives = 0
        self._between: dict[str, Any] = {}
        self._seconds = {"draw": draw_s, "compute": 0.0, "reduce": 0.0, "commit": 0.0}
        self._began_s = 0.0
        self._values: dict[str, float] = {}

    @property
    def num_samples(self) -> int:
        """Samples of this rank's part; 0 on a rank that is idle in this step and only keeps the others company."""
        return self._fetched.share_stop - self._fetched.share_start

    @property
    def global_batch(self) -> int:
        """Samples of the global batch of this step."""
        return self._fetched.stop - self._fetched.start

    def weight(self, n: float) -> None:
        """Set this rank's weight in the mean, instead of its sample count (token counts, say).

        Call it on every rank, before the backward pass. Starts a reduction of one number and does not wait for it.
        """
        if self.is_reduced or any(module.reduction.has_started for module in self._run._state.modules):
            raise ConfigError("step.weight(n) was called after the backward pass: call it before, on every rank")
        self._own_weight = float(n) if self.num_samples else 0.0
        self._total = torch.tensor([self._own_weight], dtype=torch.float64, device=self._run.device)
        self._total_work = self._run._comm.reduce_async(self._total)

    def _scale(self) -> float:
        """This rank's part of the mean over the global batch."""
        if self._total is None or self._own_weight is None:
            return self.num_samples / self.global_batch
        if self._total_work is not None:
            self._total_work.wait()
            self._total_work = None
        total = float(self._total)
        return self._own_weight / total if total else 0.0

    def __enter__(self) -> Any:
        run = self._run
        self.was_tried = True
        run._attempt = self
        run._control.place = "step"
        run._undo.begin()
        buffers = run._state.buffer_reduction
        buffers.begin(run._undo.buffers, self._scale)
        for module in run._state.modules:
            module.reduction.begin(self._scale, buffers.start)
        seed_all(mix(self._seed, STEP_STREAM, run._cursor.step, run._stream))
        self._began_s = time.perf_counter()
        return on_device(self._fetched.batch, run.device)

    def before_update(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """An optimizer is about to change parameters: everything that can fail must be over by then."""
        if not self.is_reduced and not has_closure:
            self.reduce()
        self._run._undo.before_update(optimizer, has_closure=has_closure)
        self._num_collectives = self._run._comm.num_collectives()

    def reduce(self) -> None:
        """Finish what the ranks do together. Raises StepAborted when a peer was lost before."""
        began_s = time.perf_counter()
        self._seconds["compute"] = began_s - self._began_s
        run = self._run
        reductions = [module.reduction for module in run._state.modules]
        if any(reduction.has_failed for reduction in reductions):
            raise StepAborted("the gradients of this attempt are not complete")
        exchanged = run._state.buffer_reduction.finish()
        if not exchanged and not any(reduction.has_started for reduction in reductions):
            run._comm.barrier()  # nothing else kept the ranks in step
        self.is_reduced = True
        self._seconds["reduce"] = time.perf_counter() - began_s

    def log(self, values: dict[str, float]) -> None:
        self._values.update(values)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        run = self._run
        try:
            if error is None:
                try:
                    if not self.is_reduced:
                        self.reduce()
                except StepAborted as aborted:
                    self._abort(aborted, aborted.__traceback__)
                    return True
                self._commit()
                return False
            if isinstance(error, StepAborted) or (isinstance(error, Exception) and run._is_echo(error, self)):
                self._abort(error, traceback)
                return True
            run._failed_step = error
            return False
        finally:
            run._attempt = None
            run._control.place = "between"

    def _abort(self, error: BaseException, traceback: TracebackType | None) -> None:
        """Undo the attempt and recover; `committed` tells then whether another rank had carried the step through.

        Frames of the traceback are emptied and it is dropped: they would keep the broken group's sockets open.
        """
        run = self._run
        traceback_module.clear_frames(traceback)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        run._attempt = None
        run._abort_reason = str(error)
        recover(run, evaluating=False)
        self.committed = run._cursor.step > self._base_step
        if not self.committed:
            self._between = run._state.between()

    def forget_between(self) -> None:
        """Take back what the code behind the block has done after an attempt that was undone."""
        if self._between:
            self._run._state.load_between(self._between)

    def _commit(self) -> None:
        began_s = time.perf_counter()
        run, fetched = self._run, self._fetched
        if run._undo.num_updates and run._comm.num_collectives() != self._num_collectives:
            run._undo.saw_late_collective()  # one that the script called by itself: torch.distributed's own count tells
        run._undo.commit()
        position = run._cursor.to_json()
        run._cursor.commit()
        run._committed_cursor = run._body_cursor = run._cursor.to_json()
        run._evaluations = run._evaluations_reached = 0
        self.committed = True
        self._seconds["commit"] = time.perf_counter() - began_s
        run._control.channel.send(
            "commit",
            step=run._cursor.step,
            loop=position["loop"],
            epoch=position["epoch"],
            start=fetched.start,
            stop=fetched.stop,
            epoch_length=run._epoch_length,
            batch_size=self._batch_size,
            share=self.num_samples,
            world_size=run.world_size,
            rank=run.rank,
            generation=run.generation,
            seconds=self._seconds,
            values=self._values,
        )
