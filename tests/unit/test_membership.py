"""What the workers of a node amount to for the rendezvous."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastictrain.agent.membership import failure_of, local_view, seated
from elastictrain.agent.supervisor import Phase, WorkerProcess
from elastictrain.channel import Channel, channel_pair
from elastictrain.topology import Candidate, Round, assign_seats


@pytest.fixture
def channel() -> Iterator[Channel]:
    made, raw = channel_pair()
    yield made
    made.close()
    raw.close()


def worker(channel: Channel, number: int, phase: Phase, **fields: Any) -> WorkerProcess:
    entered = 1 if phase in (Phase.TRAINING, Phase.PARKED) else 0
    made = WorkerProcess(f"w{number}", number, 0, channel, phase=phase, generation=entered)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def round_of(*numbers: int, generation: int = 1) -> Round:
    seats = assign_seats((), [Candidate(worker_id=f"w{n}", node_id="n", local_rank=n) for n in numbers])
    return Round(generation=generation, seats=seats, store_host="h", store_port=1)


def ids(view: Any) -> list[str]:
    return [one.worker_id for one in view.candidates]


def test_nobody_is_offered_when_some_workers_of_a_first_start_are_not_ready(channel: Channel) -> None:
    workers = [worker(channel, 0, Phase.WAITING), worker(channel, 1, Phase.STARTING)]
    view = local_view(workers, None, node_id="n")
    assert (ids(view), view.expected) == ([], 1)
    workers[1].phase = Phase.WAITING
    view = local_view(workers, None, node_id="n")
    assert (ids(view), view.expected, view.wants_in) == (["w0", "w1"], 0, False)


def test_survivors_do_not_wait_for_a_replacement_when_it_is_still_starting(channel: Channel) -> None:
    workers = [
        worker(channel, 0, Phase.PARKED, settled=1),
        worker(channel, 1, Phase.LOST),
        worker(channel, 2, Phase.STARTING),
    ]
    view = local_view(workers, round_of(0, 1), node_id="n")
    assert (ids(view), view.settled, view.expected) == (["w0"], 1, 0)


def test_newcomer_asks_to_come_in_when_the_others_train(channel: Channel) -> None:
    workers = [worker(channel, 0, Phase.TRAINING), worker(channel, 1, Phase.WAITING)]
    view = local_view(workers, round_of(0), node_id="n")
    assert (ids(view), view.wants_in, view.settled) == (["w1"], True, 0)


def test_newcomer_is_held_back_when_a_survivor_parked_inside_an_evaluation(channel: Channel) -> None:
    workers = [worker(channel, 0, Phase.PARKED, settled=1, evaluating=True), worker(channel, 1, Phase.WAITING)]
    view = local_view(workers, round_of(0), node_id="n")
    assert (ids(view), view.wants_in) == (["w0"], False)


def test_nothing_is_settled_anew_when_a_seat_was_void_before_it_was_entered(channel: Channel) -> None:
    waiting = [worker(channel, 0, Phase.WAITING)]
    assert local_view(waiting, round_of(0, generation=3), node_id="n").settled == 3


def test_generation_is_not_settled_when_one_member_has_not_parked(channel: Channel) -> None:
    members = [worker(channel, 0, Phase.PARKED, settled=1), worker(channel, 1, Phase.TRAINING)]
    assert local_view(members, round_of(0, 1), node_id="n").settled == 0
    members[1].settled = 1  # a newcomer whose entry was cut short says so with "ready"
    members[1].phase = Phase.WAITING
    view = local_view(members, round_of(0, 1), node_id="n")
    assert (view.settled, ids(view)) == (1, ["w0", "w1"])


def test_nobody_new_comes_in_when_training_is_over(channel: Channel) -> None:
    workers = [worker(channel, 0, Phase.FINISHED, has_finished=True), worker(channel, 1, Phase.WAITING)]
    assert ids(local_view(workers, round_of(0), node_id="n")) == []
    workers[1].is_late = True
    assert ids(local_view(workers, round_of(0), node_id="n")) == ["w1"]


def test_seated_are_the_living_members_that_have_not_finished(channel: Channel) -> None:
    workers = [
        worker(channel, 0, Phase.TRAINING),
        worker(channel, 1, Phase.LOST),
        worker(channel, 2, Phase.TRAINING, has_finished=True),
        worker(channel, 3, Phase.WAITING),
    ]
    assert [one.worker_id for one in seated(workers, round_of(0, 1, 2))] == ["w0"]
    assert seated(workers, None) == []


def test_workers_of_one_round_share_an_incident_when_they_fail(channel: Channel) -> None:
    one = failure_of(worker(channel, 0, Phase.ENDED, exit_code=-9, generation=4, rank=0))
    two = failure_of(worker(channel, 1, Phase.ENDED, exit_code=-9, generation=4, rank=1, attempt=2))
    three = failure_of(worker(channel, 2, Phase.ENDED, exit_code=-9, attempt=2))
    assert one is not None
    assert two is not None
    assert three is not None
    assert one.incident == two.incident == (4, 0)
    assert three.incident == (0, 2)
    assert failure_of(worker(channel, 3, Phase.ENDED, exit_code=0)) is None
