"""One test per rule of the rendezvous: events in, effects out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastictrain.errors import InternalError
from elastictrain.rendezvous import events as ev
from elastictrain.rendezvous.protocol import Phase, State, advance, check_invariants, next_deadline_s, start
from elastictrain.rendezvous.records import Broken, Closed, Member, Plan, Position, Settings
from elastictrain.topology import Candidate, Round, Seat


def worker(name: str) -> Candidate:
    """`a0` is the worker with local rank 0 of node `a`."""
    return Candidate(worker_id=name, node_id=name[0], local_rank=int(name[1:]))


def member(
    node_id: str, *workers: str, settled: int = 0, position: Position | None = None, expected: int = 0
) -> Member:
    return Member(
        node_id=node_id,
        host=f"{node_id}.local",
        store_port=29500,
        candidates=tuple(worker(name) for name in workers),
        settled=settled,
        position=position,
        expected=expected,
    )


def seen(one: Member, *, created: int, revision: int | None = None) -> ev.MemberSeen:
    return ev.MemberSeen(member=one, revision=created if revision is None else revision, created_revision=created)


def made(generation: int, *workers: str, reason: str = "start") -> Round:
    seats = tuple(
        Seat(worker_id=name, node_id=name[0], local_rank=int(name[1:]), rank=rank, stream=rank)
        for rank, name in enumerate(workers)
    )
    return Round(
        generation=generation, seats=seats, store_host=f"{workers[0][0]}.local", store_port=29500, reason=reason
    )


def step(state: State, *events: ev.Event, now_s: float = 0.0) -> tuple[State, list[ev.Effect]]:
    """Advance by all events; effects in order, without the node's news about itself."""
    effects: list[ev.Effect] = []
    for event in events:
        transition = advance(state, event, now_s=now_s)
        state = transition.state
        check_invariants(state)
        assert transition.reason
        effects += [one for one in transition.effects if not isinstance(one, ev.PutMember)]
    return state, effects


def told(*changes: ev.StoreChange) -> ev.StoreChanged:
    return ev.StoreChanged(changes=changes)


def settings(**values: float) -> Settings:
    return Settings(run_id="run", **{"max_nodes": 4, "last_call_timeout_s": 5.0, **values})  # type: ignore[arg-type]


def joined(node_id: str = "a", **values: float) -> State:
    """A node whose configuration the store has confirmed."""
    state = start(settings(**values), node_id=node_id, host=f"{node_id}.local", store_port=29500)
    ready = ev.NodeReady(candidates=())
    config = ev.ConfigSeen(config=state.settings.config())
    state, _ = step(state, ready, ev.SnapshotSeen(changes=(config,), revision=1))
    assert state.phase is Phase.JOINED
    return state


def running(node_id: str = "a", *, members: str = "ab", **values: float) -> State:
    """Generation 1 runs with one worker on each of the nodes, whose keys were created in this order."""
    changes = [seen(member(name, f"{name}0"), created=10 + place) for place, name in enumerate(members)]
    state, _ = step(joined(node_id, **{"last_call_timeout_s": 1e3, **values}), told(*changes))
    now = ev.RoundSeen(round=made(1, *(f"{name}0" for name in members)), revision=20)
    state, effects = step(state, told(now))
    assert effects[-1] == ev.EnterRound(round=now.round)
    news = [seen(member(name), created=10 + place, revision=21 + place) for place, name in enumerate(members)]
    state, effects = step(state, told(*news))
    assert effects == []
    return state


def broken(generation: int = 1, cause: str = "worker_died", node_id: str = "b", worker_id: str = "b0") -> Broken:
    return Broken(generation=generation, cause=cause, node_id=node_id, worker_id=worker_id)


def fence_for(one: Broken) -> ev.Fence:
    return ev.Fence(
        generation=one.generation,
        cause=one.cause,
        node_id=one.node_id,
        worker_id=one.worker_id,
        detail=one.detail,
        planned=one.planned,
    )


def parked(*workers: str, settled: int, wants_in: bool = False) -> ev.LocalChanged:
    return ev.LocalChanged(candidates=tuple(worker(name) for name in workers), settled=settled, wants_in=wants_in)


# ---------------------------------------------------------------- joining


def test_node_fences_what_it_runs_when_it_hears_of_its_end_and_of_the_next_round_at_once() -> None:
    """Cut off for a while: one snapshot tells that the store has dropped this node and that the others went on."""
    next_round = ev.RoundSeen(round=made(2, "b0"), revision=40)
    state, effects = step(running("a"), told(ev.MemberGone(node_id="a", revision=39), next_round))
    fence, rejoined = effects[0], effects[1]
    assert isinstance(fence, ev.Fence)
    assert (fence.generation, fence.cause) == (1, "lease_lost")
    assert isinstance(rejoined, ev.RejoinMember)
    assert state.seat_generation == 0


def test_node_says_what_must_agree_when_the_run_is_new() -> None:
    state = start(settings(), node_id="a", host="a.local", store_port=1)
    state, effects = step(state, ev.NodeReady(expected=2))
    assert effects == []
    state, effects = step(state, ev.SnapshotSeen(changes=(), revision=0))
    assert effects == [ev.CreateConfig(config=state.settings.config_record())]
    transition = advance(state, told(ev.ConfigSeen(config=state.settings.config())), now_s=0.0)
    assert transition.effects[0] == ev.PutMember(member=Member(node_id="a", host="a.local", store_port=1, expected=2))


def test_node_waits_for_the_last_lease_when_a_dead_run_had_another_configuration() -> None:
    state = start(settings(max_nodes=3), node_id="a", host="a.local", store_port=1)
    other = ev.ConfigSeen(config=settings(max_nodes=2).config())
    state, effects = step(state, ev.NodeReady(), ev.SnapshotSeen(changes=(other,), revision=1))
    assert effects == []
    state, effects = step(state, told(ev.ConfigSeen(config=None)))
    assert effects == [ev.CreateConfig(config=state.settings.config_record())]


def test_node_says_again_what_must_agree_when_the_node_that_had_said_it_is_gone() -> None:
    state, effects = step(running("a"), told(ev.ConfigSeen(config=None)))
    assert effects == [ev.CreateConfig(config=state.settings.config_record())]
    _, effects = step(state, told(ev.ConfigSeen(config=state.settings.config())))
    assert effects == []


def test_node_is_refused_with_both_values_when_its_configuration_differs() -> None:
    state = start(settings(max_nodes=3), node_id="a", host="a.local", store_port=1)
    other = ev.ConfigSeen(config=settings(max_nodes=2).config())
    holder = seen(member("b"), created=1)
    state, effects = step(state, ev.NodeReady(), ev.SnapshotSeen(changes=(other, holder), revision=1))
    (refused,) = effects
    assert isinstance(refused, ev.Refused)
    assert refused.kind == "config"
    assert "max_nodes=3" in refused.message
    assert "max_nodes=2" in refused.message
    assert state.phase is Phase.REFUSED


def test_first_round_waits_for_workers_that_are_starting() -> None:
    state, effects = step(joined(max_nodes=1), told(seen(member("a", "a0", expected=1), created=10)))
    assert effects == [ev.Waiting(reason="1 of 2 workers are starting")]
    state, effects = step(state, told(seen(member("a", "a0", "a1"), created=10, revision=11)))
    assert effects == [ev.CreateRound(round=made(1, "a0", "a1"))]


def test_first_round_goes_on_without_a_worker_that_failed_to_start() -> None:
    state, _ = step(joined(max_nodes=1), told(seen(member("a", "a0", expected=1), created=10)))
    _, effects = step(state, told(seen(member("a", "a0"), created=10, revision=11)))
    assert effects == [ev.CreateRound(round=made(1, "a0"))]


def test_first_round_waits_for_the_last_call_when_more_nodes_may_come() -> None:
    state, effects = step(joined(), told(seen(member("a", "a0"), created=10)), now_s=100.0)
    assert effects == [ev.Waiting(reason="1 nodes are there, last call for up to 4")]
    assert next_deadline_s(state) == 105.0
    state, effects = step(state, ev.DeadlineReached(), now_s=104.9)
    assert effects == []
    state, effects = step(state, ev.DeadlineReached(), now_s=105.0)
    assert effects == [ev.CreateRound(round=made(1, "a0"))]
    _, effects = step(state, ev.DeadlineReached(), now_s=106.0)
    assert effects == []


def test_first_round_is_made_at_once_when_all_nodes_are_there() -> None:
    both = told(seen(member("b", "b0"), created=11), seen(member("a", "a0", "a1"), created=10))
    _, effects = step(joined(max_nodes=2), both)
    assert effects == [ev.CreateRound(round=made(1, "a0", "a1", "b0"))]


@pytest.mark.parametrize(
    ("values", "reason"),
    [({"min_nodes": 2}, "1 of at least 2 nodes"), ({"min_world_size": 3}, "1 of at least 3 workers")],
)
def test_node_gives_up_when_the_minimum_does_not_come_in_time(values: dict[str, float], reason: str) -> None:
    state, effects = step(joined(join_timeout_s=60.0, **values), told(seen(member("a", "a0"), created=10)))
    assert effects == [ev.Waiting(reason=reason)]
    assert next_deadline_s(state) == 60.0
    state, effects = step(state, ev.DeadlineReached(), now_s=60.0)
    assert [type(one) for one in effects] == [ev.DeleteMember, ev.Refused]
    assert isinstance(effects[1], ev.Refused)
    assert effects[1].kind == "timeout"
    assert reason in effects[1].message
    assert next_deadline_s(state) is None


def test_node_gives_up_when_the_store_does_not_answer_in_time() -> None:
    state = start(settings(join_timeout_s=60.0), node_id="a", host="a.local", store_port=1)
    state, _ = step(state, ev.NodeReady())
    _, effects = step(state, ev.DeadlineReached(), now_s=60.0)
    assert isinstance(effects[-1], ev.Refused)
    assert "the store has not answered" in effects[-1].message


def test_round_takes_no_more_nodes_than_the_maximum() -> None:
    three = told(*(seen(member(name, f"{name}0"), created=10 + place) for place, name in enumerate("abc")))
    _, effects = step(joined(max_nodes=2), three)
    assert effects == [ev.CreateRound(round=made(1, "a0", "b0"))]


# ---------------------------------------------------------------- unplanned changes


def test_generation_is_broken_and_fenced_at_once_when_a_local_worker_dies() -> None:
    state = running("b")
    state, effects = step(state, ev.LocalBroken(generation=1, cause="worker_died", worker_id="b0", detail="SIGKILL"))
    word = replace(broken(), detail="SIGKILL")
    assert effects == [ev.CreateBroken(broken=word), fence_for(word)]
    _, effects = step(state, told(ev.BrokenSeen(broken=word)), ev.LocalBroken(generation=1, cause="raised"))
    assert effects == []


def test_node_fences_once_when_another_broke_the_generation() -> None:
    state, effects = step(running("a"), told(ev.BrokenSeen(broken=broken())))
    assert effects == [fence_for(broken())]
    _, effects = step(state, told(ev.BrokenSeen(broken=broken())), ev.LocalBroken(generation=1, cause="collective"))
    assert effects == []


def test_old_word_of_a_broken_generation_is_ignored_when_a_newer_runs() -> None:
    state, _ = step(running("a"), told(ev.BrokenSeen(broken=broken())), parked("a0", settled=1))
    state, effects = step(state, told(ev.RoundSeen(round=made(2, "a0", "b1"), revision=30)))
    assert effects == [ev.EnterRound(round=made(2, "a0", "b1"))]
    _, effects = step(
        state, told(ev.BrokenSeen(broken=broken())), ev.LocalBroken(generation=1, cause="collective", worker_id="a0")
    )
    assert effects == []


def test_next_round_waits_until_every_live_seat_holder_has_parked() -> None:
    state, _ = step(running("a"), told(ev.BrokenSeen(broken=broken())))
    state, effects = step(state, told(seen(member("a", "a0", settled=1), created=10, revision=30)))
    assert effects == []
    _, effects = step(state, told(seen(member("b", "b1", settled=1), created=11, revision=31)))
    (create,) = effects
    assert isinstance(create, ev.CreateRound)
    assert [(seat.worker_id, seat.rank, seat.stream) for seat in create.round.seats] == [("a0", 0, 0), ("b1", 1, 1)]
    assert (create.round.generation, create.round.reason) == (2, "worker_died")


def test_next_round_waits_for_nobody_who_is_not_warm() -> None:
    state, _ = step(running("a"), told(ev.BrokenSeen(broken=broken())))
    news = [
        seen(member("b", expected=1, settled=1), created=11, revision=31),
        seen(member("c", expected=2), created=32),
        seen(member("a", "a0", settled=1), created=10, revision=33),
    ]
    _, effects = step(state, told(*news))
    assert effects == [ev.CreateRound(round=made(2, "a0", reason="worker_died"))]


def test_survivors_keep_their_order_when_a_newcomer_takes_the_first_place() -> None:
    state, _ = step(running("b"), told(ev.BrokenSeen(broken=broken(node_id="a", worker_id="a0"))))
    news = [
        seen(member("a", "a1", settled=1), created=10, revision=31),
        seen(member("b", "b0", settled=1), created=11, revision=32),
    ]
    _, effects = step(state, told(*news), ev.DeadlineReached(), now_s=1.0)
    assert effects == []  # it is node a's turn
    _, effects = step(state, told(*news[:1]), told(ev.MemberGone(node_id="a", revision=33)), told(news[1]))
    assert effects == [
        ev.CreateRound(
            round=replace(made(2, "b0"), seats=(made(1, "b0").seats[0]._replace(stream=1),), reason="worker_died")
        )
    ]


def test_node_waits_and_says_so_when_too_few_are_left() -> None:
    state, _ = step(running("a", min_nodes=2), told(ev.BrokenSeen(broken=broken())), parked("a0", settled=1))
    gone = told(ev.MemberGone(node_id="b", revision=30), seen(member("a", "a0", settled=1), created=10, revision=31))
    state, effects = step(state, gone)
    assert effects == [ev.Waiting(reason="1 of at least 2 nodes")]
    state, effects = step(state, ev.DeadlineReached(), now_s=1e6)
    assert effects == []  # a run that was up waits without end
    _, effects = step(state, told(seen(member("c", "c0"), created=40)))
    assert effects == [ev.CreateRound(round=made(2, "a0", "c0", reason="worker_died"))]


def test_lost_node_breaks_the_generation_by_the_first_seat_holder() -> None:
    gone = told(ev.MemberGone(node_id="a", revision=30))
    word = Broken(generation=1, cause="node_lost", node_id="a", detail="node a is gone")
    state, effects = step(running("b", members="abc"), gone)
    assert effects == [ev.CreateBroken(broken=word), fence_for(word)]
    state, effects = step(running("c", members="abc"), gone)
    assert effects == []
    assert next_deadline_s(state) == state.settings.takeover_s
    state, effects = step(state, ev.DeadlineReached(), now_s=1.0)
    assert effects == [ev.CreateBroken(broken=word), fence_for(word)]


def test_next_round_is_taken_over_when_the_first_node_does_not_act() -> None:
    news = [
        seen(member(name, f"{name}0", settled=1), created=10 + place, revision=30 + place)
        for place, name in enumerate("abc")
    ]
    word = ev.BrokenSeen(broken=broken())
    for node_id, due_s in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        state, effects = step(running(node_id, members="abc"), told(word), told(*news))
        expected = ev.CreateRound(round=made(2, "a0", "b0", "c0", reason="worker_died"))
        if due_s:
            assert expected not in effects
            assert next_deadline_s(state) == due_s
            _, effects = step(state, ev.DeadlineReached(), now_s=due_s)
        assert effects[-1] == expected


def test_takeover_is_dropped_when_the_round_has_come() -> None:
    news = [
        seen(member(name, f"{name}0", settled=1), created=10 + place, revision=30 + place)
        for place, name in enumerate("ab")
    ]
    state, _ = step(running("b"), told(ev.BrokenSeen(broken=broken())), parked("b0", settled=1), told(*news))
    assert next_deadline_s(state) == 1.0
    state, effects = step(state, told(ev.RoundSeen(round=made(2, "a0", "b0"), revision=40)))
    assert effects == [ev.EnterRound(round=made(2, "a0", "b0"))]
    assert next_deadline_s(state) is None


# ---------------------------------------------------------------- planned changes


def test_newcomer_plans_the_end_of_the_generation_when_it_is_warm() -> None:
    state, effects = step(running("a"), parked("a1", settled=0, wants_in=True))
    assert effects == []  # the others cannot count on it before the store shows it
    news = replace(member("a", "a1"), wants_in=True)
    state, effects = step(state, told(seen(news, created=10, revision=30)))
    assert effects == [ev.CreatePlan(plan=Plan(generation=1, kind="join", node_id="a"))]


def test_node_outside_waits_and_says_so_when_the_run_is_full() -> None:
    changes = [seen(member("a", "a0"), created=10), seen(member("b", "b0"), created=11)]
    state, _ = step(joined("b", max_nodes=1), parked("b0", settled=0), told(*changes))
    state, effects = step(state, told(ev.RoundSeen(round=made(1, "a0"), revision=20)))
    assert effects == [ev.Waiting(reason="the run has its 1 nodes; this one steps in when one leaves")]
    assert not state.is_planned
    _, effects = step(state, told(ev.MemberGone(node_id="a", revision=30)))
    assert isinstance(effects[0], ev.CreateBroken)


def test_all_stop_behind_the_highest_step_when_a_plan_is_made() -> None:
    plan = ev.PlanSeen(plan=Plan(generation=1, kind="leave", node_id="b"))
    state, effects = step(running("a"), told(plan))
    assert effects == [ev.ReportPosition(generation=1)]
    transition = advance(state, ev.LocalPosition(generation=1, step=7), now_s=0.0)
    (put,) = transition.effects
    assert isinstance(put, ev.PutMember)
    assert put.member.position == Position(generation=1, step=7)
    again = advance(transition.state, ev.LocalPosition(generation=1, step=9), now_s=0.0)
    assert again.effects == ()
    mine = seen(member("a", position=Position(generation=1, step=7)), created=10, revision=30)
    state, effects = step(transition.state, told(mine))
    assert effects == []
    stale = seen(member("b", position=Position(generation=0, step=99)), created=11, revision=31)
    state, effects = step(state, told(stale))
    assert effects == []
    other = seen(member("b", position=Position(generation=1, step=8)), created=11, revision=32)
    _, effects = step(state, told(other), told(other))
    assert effects == [ev.StopAt(generation=1, step=8)]


def test_position_is_ignored_when_nobody_asked() -> None:
    state, effects = step(running("a"), ev.LocalPosition(generation=1, step=5))
    assert effects == []
    assert state.position is None


def test_plan_gives_way_when_the_generation_breaks() -> None:
    plan = ev.PlanSeen(plan=Plan(generation=1, kind="join", node_id="b"))
    state, _ = step(running("a"), told(plan))
    state, effects = step(state, told(ev.BrokenSeen(broken=broken())))
    assert effects == [fence_for(broken())]
    positions = [
        seen(member(name, position=Position(generation=1, step=3)), created=10 + place, revision=30 + place)
        for place, name in enumerate("ab")
    ]
    _, effects = step(state, told(*positions))
    assert effects == []


def test_leaving_node_goes_when_its_workers_have_parked() -> None:
    state, effects = step(running("b"), ev.LeaveRun(reason="preempted"))
    assert effects == [ev.CreatePlan(plan=Plan(generation=1, kind="leave", node_id="b"))]
    state, _ = step(state, told(ev.PlanSeen(plan=Plan(generation=1, kind="leave", node_id="b"))))
    state, effects = step(state, parked("b0", settled=1))
    assert effects == [ev.DeleteMember(), ev.Left(reason="preempted")]
    assert state.phase is Phase.LEFT


def test_departure_is_no_loss_when_the_node_had_parked() -> None:
    state, _ = step(running("a"), told(ev.PlanSeen(plan=Plan(generation=1, kind="leave", node_id="b"))))
    state, _ = step(state, ev.LocalPosition(generation=1, step=4))
    mine = seen(member("a", position=Position(generation=1, step=4)), created=10, revision=30)
    other = seen(member("b", settled=1, position=Position(generation=1, step=5)), created=11, revision=31)
    state, effects = step(state, told(mine, other, ev.MemberGone(node_id="b", revision=32)))
    assert effects == [ev.StopAt(generation=1, step=5)]
    state, _ = step(state, parked("a0", settled=1))
    _, effects = step(state, told(seen(member("a", "a0", settled=1), created=10, revision=33)))
    assert effects == [ev.CreateRound(round=made(2, "a0", reason="leave"))]


# ---------------------------------------------------------------- fencing


@pytest.mark.parametrize("event", [ev.LeaseLost(), told(ev.MemberGone(node_id="a", revision=30))])
def test_node_fences_itself_and_joins_anew_when_its_membership_lapsed(event: ev.Event) -> None:
    state, effects = step(running("a"), event)
    fence, rejoin = effects
    assert isinstance(fence, ev.Fence)
    assert (fence.generation, fence.cause) == (1, "lease_lost")
    assert isinstance(rejoin, ev.RejoinMember)
    assert rejoin.member.incarnation == 1
    # Nothing it says counts for the generation that it lost.
    state, effects = step(state, ev.LocalBroken(generation=1, cause="collective"))
    assert effects == []
    state, effects = step(state, told(ev.PlanSeen(plan=Plan(generation=1, kind="join", node_id="b"))))
    assert effects == []


def test_seats_are_void_when_the_node_came_back_after_the_round() -> None:
    """The others see nothing but a newer key, because its end and its return came in one piece."""
    back = replace(member("a"), incarnation=1)
    _, effects = step(running("b"), told(seen(back, created=30)))
    assert isinstance(effects[0], ev.CreateBroken)
    assert effects[0].broken.node_id == "a"


def test_returned_node_does_not_enter_a_round_made_before_it_returned() -> None:
    state, _ = step(running("a"), ev.LeaseLost(), parked("a0", settled=1))
    state, _ = step(state, told(ev.RoundSeen(round=made(2, "a0", "b0"), revision=30)))
    back = replace(member("a", "a0", settled=1), incarnation=1)
    state, effects = step(state, told(seen(back, created=31)))
    assert not [one for one in effects if isinstance(one, ev.EnterRound)]
    assert not state.is_seated


def test_late_word_about_a_member_is_not_believed() -> None:
    state, _ = step(running("a"), told(seen(member("b", settled=0), created=11, revision=40)))
    state, effects = step(state, told(ev.MemberGone(node_id="b", revision=30)))
    assert effects == []
    state, effects = step(state, told(ev.MemberGone(node_id="b", revision=41)))
    assert isinstance(effects[0], ev.CreateBroken)
    state, _ = step(state, told(seen(member("b"), created=11, revision=40)))
    assert "b" not in state.members


def test_member_is_gone_when_a_new_snapshot_does_not_list_it() -> None:
    state = running("a")
    config = ev.ConfigSeen(config=state.settings.config())
    _, effects = step(state, ev.SnapshotSeen(changes=(state.members["a"], config), revision=50))
    assert isinstance(effects[0], ev.CreateBroken)
    assert effects[0].broken.node_id == "b"


def test_node_fences_when_the_run_went_on_without_it() -> None:
    state, effects = step(running("a"), told(ev.RoundSeen(round=made(2, "b0"), revision=30)))
    (fence,) = effects
    assert isinstance(fence, ev.Fence)
    assert (fence.generation, fence.cause) == (1, "superseded")
    assert not state.is_seated


# ---------------------------------------------------------------- the end


def test_run_is_closed_for_all_when_one_closes_it() -> None:
    word = Closed(reason="done", node_id="a")
    state, effects = step(running("a"), ev.CloseRun(reason="done"), ev.CloseRun(reason="done"))
    assert effects == [ev.CreateClosed(closed=word)]
    for one in (state, running("b")):
        after, effects = step(one, told(ev.ClosedSeen(closed=word)))
        assert effects == [ev.DeleteMember(), ev.RunClosed(reason="done")]
        _, effects = step(after, ev.LocalBroken(generation=1, cause="late"), ev.DeadlineReached())
        assert effects == []


def test_late_node_is_told_when_the_run_is_over() -> None:
    state = start(settings(), node_id="z", host="z.local", store_port=1)
    closed = ev.ClosedSeen(closed=Closed(reason="done", node_id="a"))
    _, effects = step(state, ev.SnapshotSeen(changes=(closed,), revision=9), ev.NodeReady())
    assert effects == [ev.DeleteMember(), ev.RunClosed(reason="done")]


# ---------------------------------------------------------------- a store that lost its data


def test_all_leave_a_generation_when_the_emptied_store_let_it_be_made_twice() -> None:
    second = ev.RoundSeen(round=made(1, "b0", "c0"), revision=45)
    state, effects = step(running("a"), told(second))
    assert isinstance(effects[0], ev.CreateBroken)
    assert (effects[0].broken.generation, effects[0].broken.cause) == (1, "store_lost")
    assert isinstance(effects[1], ev.Fence)
    assert (effects[1].generation, effects[1].cause) == (1, "store_lost")
    assert isinstance(effects[2], ev.RejoinMember)
    assert len(effects) == 3
    assert state.round == second.round
    assert state.seat_generation == 0
    # The same word once more changes nothing.
    state, effects = step(state, told(second))
    assert effects == []


def test_next_generation_is_made_when_a_generation_was_made_twice() -> None:
    """Node a knows one Round 1, node b another, both with seats for both; they meet in the one Round 2."""
    first, second = made(1, "a0", "b0"), made(1, "b0", "a0")
    told_twice = ev.RoundSeen(round=second, revision=45)
    broken_twice = Broken(generation=1, cause="store_lost", node_id="a")
    state, _ = step(running("a"), told(told_twice))
    assert state.round is not None
    assert state.round != first
    anew = replace(member("a"), incarnation=1)
    others = seen(member("b"), created=43)
    state, _ = step(state, told(others, seen(anew, created=47), ev.BrokenSeen(broken=broken_twice)))
    state, effects = step(state, parked("a0", settled=1))
    assert effects == []  # b has not parked yet
    state, effects = step(
        state, told(seen(replace(anew, candidates=(worker("a0"),), settled=1), created=47, revision=48))
    )
    assert effects == []
    state, _ = step(state, told(seen(member("b", "b0", settled=1), created=43, revision=49)))
    state, effects = step(state, ev.DeadlineReached(), now_s=100.0)  # b, before it in order, has not made it
    proposals = [one.round for one in effects if isinstance(one, ev.CreateRound)]
    assert [one.generation for one in proposals] == [2]
    assert {seat.worker_id for seat in proposals[0].seats} == {"a0", "b0"}
    assert proposals[0].reason == "store_lost"


# ---------------------------------------------------------------- what cannot be


def test_impossible_events_raise() -> None:
    state = running("a")
    for event in (
        ev.NodeReady(),
        parked("a0", settled=2),
        parked("b0", settled=0),
        ev.LocalBroken(generation=2, cause="early"),
    ):
        with pytest.raises(InternalError):
            advance(state, event, now_s=0.0)
    fresh = start(settings(), node_id="a", host="a.local", store_port=1)
    with pytest.raises(InternalError):
        advance(fresh, parked("a0", settled=0), now_s=0.0)


def test_settled_never_goes_back() -> None:
    state, _ = step(running("a"), told(ev.BrokenSeen(broken=broken())), parked("a0", settled=1))
    with pytest.raises(InternalError, match="settled generation 0"):
        advance(state, parked("a0", settled=0), now_s=0.0)


def test_invariants_are_checked_when_a_state_contradicts_itself() -> None:
    state = running("a")
    for wrong in (replace(state, settled=5), replace(state, fenced=3), replace(state, entered=2)):
        with pytest.raises(InternalError, match="violated"):
            check_invariants(wrong)
