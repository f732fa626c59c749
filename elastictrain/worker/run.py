"""The run as a training script sees it: `run = elastictrain.init()`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from elastictrain.data.fetch import Fetcher, make_fetcher, split
from elastictrain.errors import ConfigError
from elastictrain.topology import Round, Seat
from elastictrain.worker import evaluation
from elastictrain.worker.checkpointer import Checkpointer
from elastictrain.worker.collectives import Communicator
from elastictrain.worker.control import Control
from elastictrain.worker.position import Cursor
from elastictrain.worker.recovery import enter, recover
from elastictrain.worker.state import TrainingState
from elastictrain.worker.step import Step
from elastictrain.worker.undo import Undo

T = TypeVar("T")


class Run:
    """One worker's part in a run.

    Attributes that may change at a step, whenever membership does: `rank`, `world_size`, `generation`, `is_main`.
    In a process that has not entered yet they are provisional: a number outside the world, and `is_main` is False.
    """

    def __init__(self, *, control: Control, comm: Communicator, welcome: dict[str, Any], worker_id: str) -> None:
        self._control = control
        self._comm = comm
        self._worker_id = worker_id
        self._is_newcomer = self._came_late = bool(welcome["newcomer"])
        self.run_id: str = welcome["run_id"]
        self.rank: int = welcome["rank"]
        self.local_rank: int = welcome["local_rank"]
        self.world_size: int = welcome["world_size"]
        self.generation = 0
        self.device = comm.device
        self._stream = 0
        self._cursor = Cursor()
        self._state = TrainingState(comm)
        self._undo = Undo(self._state)
        self._checkpointer = Checkpointer(self, welcome)
        self._attempt: Step | None = None
        self._failed_step: BaseException | None = None
        self._abort_reason = ""
        self._holds_state = False
        self._has_entered = False
        self._has_drawn = False
        self._has_skipped = False
        self._at_entry: dict[str, Any] = {}
        self._committed_cursor = self._cursor.to_json()
        self._body_cursor: dict[str, int] = {}
        self._in_body = False
        self._evaluating = False
        self._evaluating_alone = False
        self._evaluations = 0
        self._evaluations_reached = 0
        self._loop_calls = 0
        self._in_epochs = False
        self._epoch_length: int | None = None
        self._fetcher: Fetcher | None = None
        self._is_finished = False

    # -- who I am --------------------------------------------------------------------------------------------------

    @property
    def is_main(self) -> bool:
        """Whether this worker is rank 0 of the world."""
        return self.rank == 0

    @property
    def step(self) -> int:
        """The number of committed steps of the run."""
        return self._cursor.step

    @property
    def epoch(self) -> int:
        """The current pass over the data, from 0."""
        return self._cursor.epoch

    def _take_seat(self, round_: Round, seat: Seat) -> None:
        self.rank, self.world_size, self.generation = seat.rank, round_.world_size, round_.generation
        self._stream = seat.stream
        os.environ.update(RANK=str(seat.rank), WORLD_SIZE=str(round_.world_size))

    # -- what must survive -----------------------------------------------------------------------------------------

    def prepare(self, *objects: Any, **ddp_options: Any) -> Any:
        """Take modules, optimizers, LR schedulers and gradient scalers; return them in order, modules wrapped.

        The objects keep their identity over every change of membership. Calls no collective: state is loaded when the
        worker enters. `ddp_options` go to DistributedDataParallel. One object is returned as itself, several as a
        tuple. Raises ConfigError for anything else.
        """
        prepared = [self._state.add(obj, ddp_options) for obj in objects]
        for obj in objects:
            if isinstance(obj, Optimizer):
                obj.register_step_pre_hook(self._before_update)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def register(self, **objects: Any) -> None:
        """Let objects with `state_dict` and `load_state_dict` (an EMA, metrics) join the state under their names."""
        for name, obj in objects.items():
            self._state.register(name, obj)

    def save(self) -> None:
        """Write a checkpoint of the newest committed step; in the body of a loop over steps: when the body is over.

        Rank 0 writes and blocks until the checkpoint is durable; for the others it does nothing.
        """
        self._checkpointer.save_now(deferred=self._in_body)

    def _before_update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._attempt is not None:
            has_closure = any(callable(value) for value in (*args[1:], *kwargs.values()))
            self._attempt.before_update(optimizer, has_closure=has_closure)

    # -- the loop --------------------------------------------------------------------------------------------------

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """The epochs still to do, from the one the run is in. A newcomer waits here until it is admitted."""
        if num_epochs < 0:
            raise ConfigError(f"epochs(n) takes n of 0 or more, saw {num_epochs}", field="num_epochs", seen=num_epochs)
        return self._epochs(num_epochs)

    def _epochs(self, num_epochs: int) -> Iterator[int]:
        self._enter()
        self._in_epochs = True
        while self._cursor.epoch < num_epochs:
            epoch = self._cursor.epoch
            self._loop_calls = 0
            yield epoch
            if self._cursor.epoch == epoch:
                self._cursor.next_loop(0, epoch + 1)
        self._in_epochs = False
        self._loop_calls = 0

    def steps(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        tail: str = "short",
        shards: int | None = None,
        reproducible: bool = False,
        accumulate: int = 1,
        steps: int | None = None,
    ) -> Iterator[Step]:
        """The steps still to do over `dataset`, each a transaction: `with step as batch`.

        `batch_size` is the GLOBAL batch; it stays the same whatever the world size, and each rank gets a contiguous
        part of it, as even as possible. Inside `run.epochs` one pass is made, else `epochs` of them (default 1); at
        most `steps` steps. `num_workers` loader processes fetch ahead. A newcomer waits here until it is admitted.
        Raises ConfigError or DataError before anything is fetched.
        """
        if reproducible or shards is not None:
            raise ConfigError("steps(reproducible=True, shards=...) is not in this version: leave both out")
        if accumulate != 1:
            raise ConfigError(f"steps(accumulate={accumulate}) is not in this version: leave it at 1")
        if epochs is not None and self._in_epochs:
            raise ConfigError("steps(epochs=...) inside run.epochs(): leave epochs out, run.epochs counts them")
        if steps is not None and steps < 0:
            raise ConfigError(f"steps(steps=...) takes a number of 0 or more, saw {steps}")
        fetcher = make_fetcher(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            collate_fn=collate_fn,
            num_workers=num_workers,
            tail=tail,
        )
        return self._steps(fetcher, batch_size, 1 if epochs is None else epochs, seed, steps)

    def _steps(self, fetcher: Fetcher, batch_size: int, epochs: int, seed: int, limit: int | None) -> Iterator[Step]:
        self._enter()
        cursor, loop = self._cursor, self._loop_calls
        self._loop_calls += 1
        if loop < cursor.loop:
            self._has_skipped = True
            return  # the run has this loop behind it
        if self._has_skipped:
            # Code between the loops that were skipped has run once more than it should have.
            self._state.load_between(self._at_entry)
            self._has_skipped = False
        if loop > cursor.loop:
            cursor.next_loop(loop, cursor.epoch if self._in_epochs else 0)
        last_epoch = cursor.epoch + 1 if self._in_epochs else epochs
        try:
            while cursor.epoch < last_epoch and cursor.loop == loop:
                epoch = cursor.epoch
                is_over = yield from self._pass(fetcher, batch_size, seed, limit)
                if limit is not None and cursor.loop_steps >= limit:
                    self._control.channel.send("epoch_left", loop=cursor.loop, epoch=cursor.epoch)
                    return
                if is_over and cursor.epoch == epoch:
                    if self._in_epochs:
                        return
                    cursor.next_epoch()
        finally:
            fetcher.close()

    def _pass(self, fetcher: Fetcher, batch_size: int, seed: int, limit: int | None) -> Generator[Step, None, bool]:
        """Steps of the current pass until it is over (returns True) or membership has changed (returns False)."""
        cursor = self._cursor
        order_epoch = cursor.epoch if self._in_epochs else cursor.epoch + cursor.loop
        self._epoch_length = fetcher.epoch_length
        source = fetcher.iterate(
            epoch=order_epoch, batch_index=cursor.batch, rank=self.rank, world_size=self.world_size
        )
        with contextlib.closing(source):
            while limit is None or cursor.loop_steps < limit:
                drawn_s = time.perf_counter()
                self._control.place = "draw"
                fetched = next(source, None)
                self._control.place = "between"
                if fetched is None:
                    if fetcher.epoch_length is None:
                        self._control.channel.send("epoch_finished", loop=cursor.loop, epoch=cursor.epoch)
                    return True
                if not self._control.may_begin(cursor.step + 1):
                    recover(self, evaluating=False)  # membership changes, or the run stops here
                    return False
                self._has_drawn, self._at_entry = True, {}
                generation = self.generation
                step = Step(self, fetched, seed=seed, batch_size=batch_size, draw_s=time.perf_counter() - drawn_s)
                self._in_body = True
                try:
                    yield step
                except GeneratorExit:  # the script has left the loop
                    if step.committed and not self._is_finished:
                        self._control.channel.send("epoch_left", loop=cursor.loop, epoch=cursor.epoch)
                        cursor.next_loop(cursor.loop + 1, cursor.epoch if self._in_epochs else 0)
                        self._end_body()
                    raise
                finally:
                    self._in_body = False
                if step.committed:
                    self._end_body()
                else:
                    self._check_undone(step)
                    step.forget_between()
                if self.generation != generation:
                    return False
        return True

    def _end_body(self) -> None:
        """The body of a loop over steps is over, with its step committed."""
        self._state.mark_body_end()
        self._body_cursor = self._cursor.to_json()
        self._control.place = "save"
        self._checkpointer.at_body_end()
        self._control.place = "between"

    def _check_undone(self, step: Step) -> None:
        if not step.was_tried:
            raise ConfigError("a step was drawn but not used: write `with step as batch:` around the step's work")
        if self._failed_step is not None:
            raise ConfigError(
                f"the step {self.step} raised {type(self._failed_step).__name__} and the script went on: a step cannot "
                "be skipped. Handle the error inside the `with` block, or let it end the script"
            ) from self._failed_step

    def _enter(self) -> None:
        if self.generation == 0:
            enter(self)

    def _rewind(self) -> None:
        """Put back what an attempt has touched; a rank that cannot needs a peer's state."""
        if not self._undo.rewind():
            self._holds_state = False

    def _is_echo(self, error: Exception, attempt: Step | None) -> bool:
        """Whether `error` only tells that a peer was lost, so that the attempt may be tried again."""
        failed = attempt is not None and any(m.reduction.has_failed for m in self._state.modules)
        if self._control.is_fenced:
            return True
        return (failed or self._comm.is_broken()) and self._control.confirm_broken(f"{type(error).__name__}: {error}")

    # -- between ranks ---------------------------------------------------------------------------------------------

    def evaluate(self, fn: Callable[[], T]) -> T:
        """Return `fn()`. It is called again when membership changed while it ran; newcomers wait until it is over."""
        return evaluation.evaluate(self, fn)

    def split(self, dataset: Any) -> Any:
        """This rank's part of `dataset`, each sample on exactly one rank, nothing padded; call it inside `evaluate`."""
        rank, world_size = (0, 1) if self._is_alone else (self.rank, self.world_size)
        return split(dataset, rank=rank, world_size=world_size)

    def log(self, **scalars: Any) -> None:
        """Report numbers of this step to the metrics and the ledger; takes effect when the step commits."""
        values = {
            name: float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            for name, value in scalars.items()
        }
        if self._attempt is None:
            raise ConfigError("run.log(...) was called outside a step: call it inside `with step`, it counts with it")
        self._attempt.log(values)

    def all_reduce(self, value: T, op: str = "sum") -> T:
        """Reduce a number or a tensor over all ranks by "sum", "mean", "min", "max" or "product"; blocks.

        For use inside a step or `evaluate`. Numbers come back as numbers, tensors as new tensors.
        """
        return evaluation.all_reduce(self, value, op)

    def gather(self, values: T) -> list[T]:
        """The `values` of every rank, by rank; plain data and tensors. Blocks. Inside a step or `evaluate`."""
        return evaluation.gather(self, values)

    def barrier(self) -> None:
        """Wait for all ranks. Inside a step or `evaluate`."""
        evaluation.barrier(self)

    @property
    def _is_alone(self) -> bool:
        """A worker that has not begun a step since it was admitted into a running world looks at data by itself."""
        return self._evaluating_alone or (self._came_late and not self._has_drawn)

    # -- the end ---------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The training is done: save what is not saved yet and tell the agent. Called at exit as well; idempotent."""
        if self._is_finished:
            return
        self._is_finished = True
        if self._holds_state and self._cursor.step:
            self._checkpointer.save_final()
        self._control.channel.send("finished", step=self._cursor.step, rank=self.rank, entered=self.generation > 0)
        self._state.drop()
        self._comm.leave()

    def abandon(self) -> None:
        """This process ends with a failure: nothing is saved and nothing is said at exit."""
        self._is_finished = True
