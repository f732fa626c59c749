"""What the workers of this node amount to for the rendezvous."""

from __future__ import annotations

from collections.abc import Sequence

from elastictrain.agent.policy import Failure
from elastictrain.agent.supervisor import Phase, WorkerProcess
from elastictrain.rendezvous.events import LocalChanged
from elastictrain.topology import Candidate, Round


def seated(workers: Sequence[WorkerProcess], round_: Round | None) -> list[WorkerProcess]:
    """The living workers that have a seat in `round_` and have not finished."""
    if round_ is None:
        return []
    return [
        worker
        for worker in workers
        if worker.is_alive and not worker.has_finished and round_.seat_of(worker.worker_id) is not None
    ]


def local_view(workers: Sequence[WorkerProcess], round_: Round | None, *, node_id: str) -> LocalChanged:
    """Candidates, settled generation and wishes of this node.

    When no worker holds the state any more (and at the very start), candidates are held back until all workers that are
    being started are ready: they begin together, from the newest checkpoint.
    """
    alive = [worker for worker in workers if worker.is_alive and not worker.has_finished]
    members = seated(workers, round_)
    generation = round_.generation if round_ is not None else 0
    # A seat that was void when its Round came (the node had joined anew) was not entered: there is nothing to settle.
    entered = (worker.settled for worker in members if worker.generation == generation)
    settled = min(entered, default=generation)
    parked = [worker for worker in alive if worker.phase is Phase.PARKED]
    waiting = [worker for worker in alive if worker.phase is Phase.WAITING]
    starting = [worker for worker in alive if worker.phase is Phase.STARTING]
    survives = any(worker.phase in (Phase.TRAINING, Phase.PARKED) for worker in alive)
    if any(worker.evaluating for worker in parked):
        waiting = []  # newcomers enter only at a step
    if any(worker.has_finished for worker in workers):
        waiting = [worker for worker in waiting if worker.is_late]  # training is over: the others come for nothing
    ready = parked + waiting
    if not survives and starting:
        ready = []
    return LocalChanged(
        candidates=tuple(
            Candidate(
                worker_id=worker.worker_id,
                node_id=node_id,
                local_rank=worker.local_rank,
                evaluating=worker.evaluating,
            )
            for worker in sorted(ready, key=lambda worker: worker.local_rank)
        ),
        settled=settled,
        expected=0 if survives else len(starting),
        wants_in=bool(waiting) and any(worker.phase is Phase.TRAINING for worker in members),
    )


def failure_of(worker: WorkerProcess) -> Failure | None:
    """How this worker failed, None when it ended well."""
    code = 1 if worker.exit_code is None else worker.exit_code
    told = worker.exception or {}
    if code == 0 and not told and not worker.left_early:
        return None
    return Failure(
        worker_id=worker.worker_id,
        rank=worker.rank if worker.is_elastic or worker.rank is not None else worker.local_rank,
        exit_code=code,
        step=told.get("step") if told else (worker.step if worker.holds_state else None),
        error_type=str(told.get("error_type", "")),
        message=str(told.get("message", "")),
        traceback=str(told.get("traceback", "")) or worker.hang_stack,
        hang=worker.hang,
        is_config=bool(told.get("is_config", False)),
        incident=(worker.generation, 0 if worker.generation else worker.attempt),
    )


def is_done(workers: Sequence[WorkerProcess]) -> bool:
    """Whether a worker has finished and none is left that still has something to finish."""
    ended_well = [
        w for w in workers if w.phase is Phase.ENDED and w.exit_code == 0 and not (w.killed_by_agent or w.left_early)
    ]
    busy = [
        w
        for w in workers
        if w.is_alive and (w.is_late or not (w.is_newcomer and w.phase in (Phase.STARTING, Phase.WAITING)))
    ]
    return bool(ended_well) and not busy and not any(w.phase is Phase.LOST for w in workers)
