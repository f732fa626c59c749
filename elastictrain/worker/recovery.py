"""The life of a failure, as a surviving worker lives it: detect → fence → abort → park → agree → rebuild → sync →
rewind → resume.

`detect` and `fence` are the agent's. Here, in order:

3. abort    the collectives in flight have ended; what keeps the old group alive is let go
4. park     the agent knows that this worker stands still, and at which step
5. agree    the next Round is there, and this worker has a seat in it
6. rebuild  the new group connects its members; DDP wraps the same parameters
7. sync     all ranks hold the same state: that of the highest committed step
8. rewind   what the aborted attempt had touched is as it was before (done before `park`, so that the state which this
            rank may have to send is whole; what remains here is to take the batch again)
9. resume   training goes on with the same batch

A newcomer enters by the same path, from `agree` on. If the generation breaks again on the way, the path starts over.
If a process dies anywhere in it, the others do the same.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from elastictrain.checkpoint.tree import decode, encode
from elastictrain.errors import InternalError, StepAborted
from elastictrain.topology import Round
from elastictrain.worker import transfer
from elastictrain.worker.destruction import release_groups

if TYPE_CHECKING:
    from elastictrain.worker.run import Run

STAGES: Final = ("detect", "fence", "abort", "park", "agree", "rebuild", "sync", "rewind", "resume")


class StageTimes:
    """Seconds spent in each stage of one recovery, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one rank brings to `sync`."""

    step: int
    holds_state: bool
    evaluations: int
    has_entered: bool = True

    def to_tensor(self, device: torch.device) -> torch.Tensor:
        values = [self.step, int(self.holds_state), self.evaluations, int(self.has_entered)]
        return torch.tensor(values, dtype=torch.int64, device=device)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> Standing:
        step, holds_state, evaluations, has_entered = (int(value) for value in tensor)
        return cls(step=step, holds_state=bool(holds_state), evaluations=evaluations, has_entered=bool(has_entered))


def choose_source(standings: Sequence[Standing]) -> int | None:
    """The lowest rank that holds the state of the highest committed step; None when no rank holds a state.

    A rank that has trained comes before a newcomer whose entry was cut short.
    """
    holders = [rank for rank, standing in enumerate(standings) if standing.holds_state]
    return min(holders, key=lambda rank: (-standings[rank].step, not standings[rank].has_entered, rank), default=None)


def recover(run: Run, *, evaluating: bool) -> None:
    """Bring this worker from a broken (or ending) generation into the next one; blocks until it trains again."""
    times = StageTimes()
    while True:
        with times.stage("abort"):
            abort(run)
        with times.stage("rewind"):
            run._rewind()
        with times.stage("park"):
            parked = park(run, evaluating=evaluating)
        try:
            _enter_next(run, times, parked=parked)
            return
        except StepAborted as aborted:
            aborted.__traceback__ = None
            run._abort_reason = str(aborted)


def enter(run: Run) -> None:
    """Bring a worker that has never trained into a Round; blocks until it is admitted."""
    times = StageTimes()
    parked: dict[str, Any] | None = None
    while True:
        try:
            _enter_next(run, times, parked=parked)
            return
        except StepAborted as aborted:
            aborted.__traceback__ = None
            run._abort_reason = str(aborted)
        abort(run)
        parked = None if run._is_newcomer else park(run, evaluating=False)


def _enter_next(run: Run, times: StageTimes, *, parked: dict[str, Any] | None) -> None:
    with times.stage("agree"):
        round_ = agree(run, parked)
    with times.stage("rebuild"):
        rebuild(run, round_)
    with times.stage("sync"):
        sync(run)
    resume(run, round_, times)


def abort(run: Run) -> None:
    """End this generation's collectives and drop its group; idempotent."""
    if run.generation and not run._control.is_fenced and run._abort_reason:
        run._control.confirm_broken(run._abort_reason)
    run._comm.abort(run.generation)
    run._state.drop()
    run._comm.leave()


def park(run: Run, *, evaluating: bool) -> dict[str, Any]:
    """What the agent is told of a worker that stands still."""
    return {"step": run._cursor.step, "evaluating": evaluating, "holds_state": run._holds_state}


def agree(run: Run, parked: dict[str, Any] | None) -> Round:
    """Wait for the Round that this worker is part of. The memory of older groups is given back meanwhile."""
    return run._control.wait_round(
        run._worker_id, parked, save=run._checkpointer.save_standing, meanwhile=release_groups
    )


def rebuild(run: Run, round_: Round) -> None:
    """Connect with the members of `round_` and wrap the same parameters for it."""
    seat = round_.seat_of(run._worker_id)
    if seat is None:
        raise InternalError(f"worker {run._worker_id} was given a round without a seat for it")
    run._take_seat(round_, seat)
    run._comm.build(round_, seat.rank)
    run._state.build()


def sync(run: Run) -> None:
    """Make all ranks hold the state of the highest committed step. Nothing is sent when they do already."""
    comm = run._comm
    own = Standing(
        step=run._cursor.step,
        holds_state=run._holds_state,
        evaluations=run._evaluations,
        has_entered=run._has_entered,
    )
    standings = [Standing.from_tensor(row) for row in comm.all_gather(own.to_tensor(comm.device))]
    source = choose_source(standings)
    if source is None:
        if comm.rank == 0:
            run._checkpointer.restore()
        source = 0
        lacking = [rank != source for rank in range(comm.world_size)]
        run._came_late, position = False, "committed"
        # Newcomers that had taken the run for a running one may have evaluated by themselves already.
        run._evaluations_reached = max(s.evaluations * (not s.has_entered) for s in standings)
        evaluations = 0 if own.has_entered else own.evaluations
    else:
        highest = standings[source].step
        lacking = [
            rank != source and not (standing.holds_state and standing.has_entered and standing.step == highest)
            for rank, standing in enumerate(standings)
        ]
        position = "own" if own.has_entered and own.step == highest else "committed" if own.has_entered else "current"
        run._came_late = run._came_late or not own.has_entered
        run._evaluations_reached = max(
            (s.evaluations for s in standings if s.step == highest and s.has_entered), default=0
        )
        evaluations = {"own": own.evaluations, "committed": 0, "current": run._evaluations_reached}[position]
    if any(lacking):
        _send_state(run, source, is_receiver=lacking[comm.rank], position=position)
    run._evaluations = evaluations
    run._holds_state = True
    run._control.begun = run._cursor.step


def _send_state(run: Run, source: int, *, is_receiver: bool, position: str) -> None:
    """Broadcast the state of rank `source`; those that have it already only pass it on.

    What code between steps may change, and the place in the loop, a receiver takes as they are at `source` ("current",
    for a newcomer, which enters at the step that is next there), as they were at the commit ("committed", for one that
    still has to run that code itself), or not at all ("own").
    """
    comm = run._comm
    if comm.rank == source:
        encoded = encode(run._state.capture())
        tensors = {name: tensor.detach().contiguous().to(comm.device) for name, tensor in encoded.tensors.items()}
        specs = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()
        ]
        cursors = {"current": run._cursor.to_json(), "committed": run._committed_cursor}
        head = {"tree": encoded.tree, "tensors": specs, "cursors": cursors}
        comm.broadcast_bytes(json.dumps(head).encode(), source)
        transfer.broadcast(comm, list(tensors.values()), _sizes(specs), source)
        return
    head = json.loads(comm.broadcast_bytes(None, source))
    if not is_receiver:
        transfer.broadcast(comm, None, _sizes(head["tensors"]), source)
        return
    # Not into the live tensors: if the source dies meanwhile, this rank's state may be the newest that is left.
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=comm.device)
        for name, dtype, shape in head["tensors"]
    }
    transfer.broadcast(comm, list(tensors.values()), _sizes(head["tensors"]), source)
    # From here to the end this rank holds neither the old state nor the new one: it must not be a source.
    run._holds_state = False
    state = decode(head["tree"], tensors)
    run._state.load(state, position=position)  # type: ignore[arg-type]
    if position != "own":
        run._cursor.load(head["cursors"][position])
        run._committed_cursor, run._body_cursor = dict(head["cursors"]["committed"]), {}
    run._undo.forget()


def _sizes(specs: Sequence[tuple[str, str, list[int]]]) -> list[int]:
    """Bytes of each tensor."""
    return [math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in specs]


def resume(run: Run, round_: Round, times: StageTimes) -> None:
    """This worker trains again: tell the agent, with the seconds of every stage."""
    with times.stage("resume"):
        if run._control.is_fenced:
            raise StepAborted(f"generation {round_.generation} broke before it began")
        run._abort_reason = ""
        run._is_newcomer = False
        if not run._has_entered:
            run._has_entered, run._at_entry = True, run._state.between()
    run._control.channel.send(
        "resumed", generation=round_.generation, rank=run.rank, step=run._cursor.step, seconds=times.seconds
    )
