"""What ranks do together outside a step's gradients: evaluations, reductions, gathers.

An evaluation ends with a barrier. Whoever passes it knows that every rank has its result, so a rank that loses a peer
just then keeps the result it has as soon as it learns that another one has passed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from elastictrain.checkpoint.tree import decode, encode
from elastictrain.errors import ConfigError, StepAborted
from elastictrain.worker.collectives import REDUCTIONS
from elastictrain.worker.recovery import recover

if TYPE_CHECKING:
    from elastictrain.worker.run import Run

T = TypeVar("T")


def evaluate(run: Run, fn: Callable[[], T]) -> T:
    """Return `fn()`, called again as long as membership changes while it runs.

    A worker that was admitted into a running world and has not begun a step yet evaluates by itself, over the whole
    data set: the others are at a step and would not answer.
    """
    if run._is_alone:
        result = _evaluate_alone(run, fn)
        if not run._has_entered:
            run._evaluations += 1
        return result
    run._enter()
    results: list[T] = []
    while True:
        if run._evaluations_reached > run._evaluations:
            if not results:  # others did it before this worker came
                results.append(_evaluate_alone(run, fn))
            break  # another rank has passed the barrier, so this one's result counts too
        run._evaluating, run._control.place = True, "evaluation"
        results.clear()
        try:
            results.append(fn())
            run._comm.barrier()
            break
        except StepAborted as aborted:
            aborted.__traceback__ = None
            run._abort_reason = str(aborted)
        except Exception as error:  # a collective that the user calls directly fails with a bare RuntimeError
            if not run._is_echo(error, None):
                raise
            error.__traceback__ = None
        finally:
            run._evaluating, run._control.place = False, "between"
        recover(run, evaluating=True)
    run._evaluations += 1
    run._control.channel.send("evaluated", step=run.step, rank=run.rank, result=_plain(results[0]))
    return results[0]


def _evaluate_alone(run: Run, fn: Callable[[], T]) -> T:
    before, run._evaluating_alone = run._evaluating_alone, True
    run._control.place = "evaluation"
    try:
        with run._comm.alone():
            return fn()
    finally:
        run._evaluating_alone, run._control.place = before, "between"


def _plain(result: Any) -> Any:
    """The result as JSON where it is that, for the ledger; else None."""
    try:
        return json.loads(json.dumps(result))
    except (TypeError, ValueError):
        return None


@contextlib.contextmanager
def collective(run: Run) -> Iterator[None]:
    """Where ranks act together: only in a step or an evaluation, which can be tried again as a whole."""
    if run._attempt is None and not run._evaluating:
        raise ConfigError(
            "all_reduce, gather and barrier work inside `with step` or `run.evaluate(fn)`: elsewhere a change of "
            "membership could not be undone. Move the call into one of them"
        )
    if run._attempt is not None and run._undo.num_updates:
        run._undo.saw_late_collective()
    yield


def all_reduce(run: Run, value: T, op: str) -> T:
    if op not in REDUCTIONS:
        raise ConfigError(f"all_reduce takes op {', '.join(sorted(REDUCTIONS))}, saw {op!r}", field="op", seen=op)
    if run._is_alone:
        return value
    with collective(run):
        if isinstance(value, torch.Tensor):
            return cast(T, run._comm.all_reduce(value.detach().clone().to(run.device), op))
        if not isinstance(value, int | float):
            raise ConfigError(f"all_reduce takes a number or a tensor, saw {type(value).__name__}")
        is_whole = isinstance(value, int) and op != "mean"
        tensor = torch.tensor(value, dtype=torch.int64 if is_whole else torch.float64, device=run.device)
        return cast(T, run._comm.all_reduce(tensor, op).item())


def barrier(run: Run) -> None:
    if not run._is_alone:
        with collective(run):
            run._comm.barrier()


def gather(run: Run, values: T) -> list[T]:
    if run._is_alone:
        return [values]
    with collective(run):
        return [cast(T, _from_bytes(part)) for part in run._comm.gather_bytes(_to_bytes(values))]


def _to_bytes(value: object) -> bytes:
    from safetensors.torch import save  # only scripts that gather pay for it

    encoded = encode(value)
    tree = json.dumps(encoded.tree).encode()
    tensors = save({name: tensor.detach().cpu().contiguous() for name, tensor in encoded.tensors.items()})
    return len(tree).to_bytes(8, "little") + tree + tensors


def _from_bytes(data: bytes) -> object:
    from safetensors.torch import load

    size = int.from_bytes(data[:8], "little")
    return decode(json.loads(data[8 : 8 + size]), load(data[8 + size :]))
