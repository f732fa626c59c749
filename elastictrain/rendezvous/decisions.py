"""What a node does next, from all that it knows: the steps of `decide`, in order. Pure."""

from __future__ import annotations

from dataclasses import replace

from elastictrain.rendezvous.draft import Draft
from elastictrain.rendezvous.events import (
    CreateBroken,
    CreateClosed,
    CreateConfig,
    CreatePlan,
    CreateRound,
    DeleteMember,
    EnterRound,
    Fence,
    Left,
    ProbeHost,
    PutMember,
    Refused,
    RejoinMember,
    ReportPosition,
    RunClosed,
    StopAt,
    Waiting,
)
from elastictrain.rendezvous.keepers import (
    among_keepers,
    find_newcomer,
    keep,
    say_stop,
    see_all,
    told_stop,
    wait_for_keepers,
)
from elastictrain.rendezvous.records import PAST_GENERATION, Broken, Closed, Plan, PlanKind
from elastictrain.rendezvous.state import (
    FINAL_PHASES,
    Blocker,
    Phase,
    State,
    as_entered,
    chosen_candidates,
    find_blocker,
    has_place,
    in_join_order,
    lost_node,
    may_train_on,
    next_generation,
    own_member,
    seat_holders,
    turn_of,
)
from elastictrain.topology import Round, assign_seats


def decide(draft: Draft) -> None:
    """Bring the node up to date with what it knows; every step leaves alone what has been done already."""
    for step in (_close, _join, _keep_membership, _enter, _fence_broken, _leave):
        if draft.state.phase in FINAL_PHASES:
            break
        step(draft)
    if draft.state.phase is Phase.JOINED:
        for step in (keep, _declare_loss, _make_plan, say_stop, _follow_plan, _publish, _leave):
            step(draft)
    if draft.state.phase in (Phase.JOINING, Phase.JOINED):
        _propose(draft)
    is_over = draft.state.phase in FINAL_PHASES
    draft.change(deadline_s=None if is_over else min(draft.deadlines_s, default=None))


# ---------------------------------------------------------------- joining and going


def _close(draft: Draft) -> None:
    state = draft.state
    if state.phase is Phase.IDLE:
        return
    if state.closed is not None:
        outcome = RunClosed(reason=state.closed.reason)
        draft.emit(DeleteMember(), outcome, reason=f"the run is closed: {state.closed.reason}")
        draft.change(phase=Phase.CLOSED)
    elif state.closing is not None and state.phase is Phase.JOINED and not state.closed_sent:
        closed = Closed(reason=state.closing, node_id=state.node_id)
        draft.emit(CreateClosed(closed=closed), reason=f"close the run: {state.closing}")
        draft.change(closed_sent=True)


def _join(draft: Draft) -> None:
    """Agree on what must be equal everywhere. It is on the lease of one node, and written anew when that is gone."""
    state = draft.state
    if not state.is_synced or state.phase not in (Phase.JOINING, Phase.JOINED):
        return
    own = state.settings.config()
    if state.config is None:
        if not state.config_sent:
            record = state.settings.config_record()
            draft.emit(CreateConfig(config=record), reason="say what all nodes must agree on")
            draft.change(config_sent=True)
        return
    names = sorted((own.keys() | state.config.keys()) - {PAST_GENERATION})
    differing = next((name for name in names if own.get(name) != state.config.get(name)), None)
    if differing is None:
        draft.change(phase=Phase.JOINED)
        return
    if state.phase is Phase.JOINING and not state.members:
        see_all(draft)
        return  # of a run whose nodes are all dead: the store drops it with the last lease
    message = (
        f"this node was started with {differing}={own.get(differing)}, "
        f"run {state.settings.run_id} has {differing}={state.config.get(differing)}: "
        "start every node with the same options, or use another run id"
    )
    draft.emit(Refused(kind="config", message=message), reason=message)
    draft.change(phase=Phase.REFUSED)


def _keep_membership(draft: Draft) -> None:
    if draft.state.was_present and not draft.state.is_present:
        rejoin(draft, "the store has dropped this node")
    elif draft.state.is_present and not draft.state.was_present:
        draft.change(was_present=True)


def rejoin(draft: Draft, cause: str, *, broken_as: str = "lease_lost") -> None:
    """Fence the workers and come back as a new member: the seats of the old one are void."""
    state = draft.state
    if state.seat_generation:
        # Not the newest: the others may have made a Round meanwhile, and the word of it may have come first.
        held = state.seat_generation
        fence(draft, Broken(generation=held, cause=broken_as, node_id=state.node_id, detail=cause))
    draft.change(
        incarnation=state.incarnation + 1, was_present=False, seat_generation=0, entered=state.generation, position=None
    )
    draft.change(keeper_sent=None)
    member = own_member(draft.state)
    draft.emit(RejoinMember(member=member), reason=f"join anew: {cause}")
    draft.change(put=member)


def _leave(draft: Draft) -> None:
    state = draft.state
    if state.leaving is None or (state.is_seated and state.settled < state.generation):
        return
    if state.is_seated and (state.put is None or state.put.settled < state.generation):
        return  # first the word that the workers stand still: without it the others take the departure for a loss
    draft.emit(DeleteMember(), Left(reason=state.leaving), reason=f"this node leaves: {state.leaving}")
    draft.change(phase=Phase.LEFT)


def _publish(draft: Draft) -> None:
    member = own_member(draft.state)
    if member != draft.state.put:
        draft.emit(PutMember(member=member), reason="this node has news")
        draft.change(put=member)


# ---------------------------------------------------------------- the newest Round


def _enter(draft: Draft) -> None:
    state = draft.state
    if state.round is None or state.entered >= state.generation:
        return
    has_seats = state.node_id in state.round.node_ids
    if has_seats and not state.is_present:
        return  # whether the seats are this incarnation's shows when the own key does
    if state.seat_generation > state.settled:
        cause = f"generation {state.generation} was made without this node"
        fence(draft, Broken(generation=state.seat_generation, cause="superseded", node_id=state.node_id, detail=cause))
    seen = state.members.get(state.node_id)
    if not has_seats or seen is None or seen.created_revision >= state.round_revision:
        draft.change(entered=state.generation, seat_generation=0)
        return
    waiting = tuple(one for one in state.candidates if one.worker_id not in state.round.worker_ids)
    is_newest_shown = (
        state.put is not None
        and seen.revision < state.round_revision
        and as_entered(state, replace(seen, member=state.put)).member == seen.member
    )
    draft.change(
        entered=state.generation,
        seat_generation=state.generation,
        has_run=True,
        candidates=waiting,
        wants_in=state.wants_in and bool(waiting),
        position=None,
    )
    if is_newest_shown and not waiting:
        # Whoever sees the Round knows what has become of the candidates (`as_entered`): it need not be written.
        draft.change(put=own_member(draft.state))
    draft.emit(EnterRound(round=state.round), reason=f"enter generation {state.generation}: {state.round.reason}")


def _fence_broken(draft: Draft) -> None:
    state = draft.state
    if state.is_seated and state.is_broken and state.broken is not None:
        fence(draft, state.broken)


def fence(draft: Draft, broken: Broken) -> None:
    """Tell the agent, once, that a generation is over for its workers."""
    if draft.state.fenced >= broken.generation:
        return
    output = Fence(
        generation=broken.generation,
        cause=broken.cause,
        node_id=broken.node_id,
        worker_id=broken.worker_id,
        detail=broken.detail,
        planned=broken.planned,
    )
    draft.emit(output, reason=f"fence generation {broken.generation}: {broken.cause}")
    draft.change(fenced=broken.generation)


def _declare_loss(draft: Draft) -> None:
    """Break the Round of which a node has vanished. Its seat holders judge; others only when none is left."""
    state = draft.state
    is_told = state.is_broken or state.broken_sent >= state.generation
    lost = None if is_told or not state.sees_all else lost_node(state)
    if lost is None:
        draft.change(lost_since_s=None)
        return
    since_s = draft.now_s if state.lost_since_s is None else state.lost_since_s
    draft.change(lost_since_s=since_s)
    if may_train_on(state) and state.round is not None:
        if state.probed < state.generation:
            probe = ProbeHost(generation=state.generation, host=state.round.store_host, port=state.round.store_port)
            draft.emit(probe, reason=f"is the host of generation {state.generation} dead?")
            draft.change(probed=state.generation)
        since_s += state.settings.outage_timeout_s
    if not _is_my_turn(draft, since_s, is_for_holders=True):
        return
    detail = f"node {lost} is gone"
    broken = Broken(generation=state.generation, cause="node_lost", node_id=lost, detail=detail)
    draft.emit(CreateBroken(broken=broken), reason=f"generation {state.generation} is broken: {detail}")
    draft.change(broken_sent=state.generation)
    if state.is_seated:
        fence(draft, broken)


def _make_plan(draft: Draft) -> None:
    state = draft.state
    is_ending = state.is_broken or state.is_planned or state.plan_sent >= state.generation
    if state.round is None or is_ending or not state.is_present:
        return
    kind: PlanKind = "join"
    node_id: str | None = state.node_id
    if state.leaving is not None:
        kind = "leave"  # still here, so it has seats that are not settled
    else:
        node_id = find_newcomer(state)
    if node_id is None:
        return
    plan = Plan(generation=state.generation, kind=kind, node_id=node_id)
    draft.emit(CreatePlan(plan=plan), reason=f"end generation {state.generation} at a step: a node wants to {kind}")
    draft.change(plan_sent=state.generation)


def _follow_plan(draft: Draft) -> None:
    state = draft.state
    is_over = state.is_broken or state.fenced >= state.generation or state.settled >= state.generation
    if not state.is_seated or not state.is_planned or is_over:
        return
    if state.asked < state.generation:
        draft.emit(ReportPosition(generation=state.generation), reason=f"generation {state.generation} is to end")
        draft.change(asked=state.generation)
    step = told_stop(state)
    if step is not None and state.stop_said < state.generation:
        draft.emit(StopAt(generation=state.generation, step=step), reason=f"all stop behind step {step}")
        draft.change(stop_said=state.generation)


# ---------------------------------------------------------------- the next Round


def _propose(draft: Draft) -> None:
    state = draft.state
    if not state.sees_all and state.phase is Phase.JOINED:
        wait_for_keepers(draft)
        return
    blocker = find_blocker(state, draft.now_s) if state.phase is Phase.JOINED else None
    has_minimum = state.phase is Phase.JOINED and (blocker is None or (blocker.is_said and not blocker.is_short))
    since_s = draft.now_s if state.minimum_since_s is None else state.minimum_since_s
    draft.change(minimum_since_s=since_s if has_minimum else None)
    if blocker is not None and blocker.deadline_s is not None:
        draft.deadlines_s.append(blocker.deadline_s)
    _report(draft, blocker)
    _give_up(draft, blocker)
    if blocker is not None or draft.state.phase is not Phase.JOINED or state.round_sent > state.generation:
        draft.change(complete_since_s=None)
        return
    since_s = draft.now_s if state.complete_since_s is None else state.complete_since_s
    draft.change(complete_since_s=since_s)
    if not _is_my_turn(draft, since_s, is_for_holders=False):
        return
    made = _next_round(state)
    draft.emit(CreateRound(round=made), reason=f"propose generation {made.generation} with {made.world_size} workers")
    draft.change(round_sent=made.generation)


def _next_round(state: State) -> Round:
    previous = state.round.seats if state.round is not None else ()
    seats = assign_seats(previous, chosen_candidates(state))
    host = state.members[seats[0].node_id].member
    if state.is_broken and state.broken is not None:
        reason = state.broken.cause
    elif state.is_planned and state.plan is not None:
        reason = state.plan.kind
    else:
        reason = "start"
    return Round(
        generation=next_generation(state), seats=seats, store_host=host.host, store_port=host.store_port, reason=reason
    )


def _is_my_turn(draft: Draft, since_s: float, *, is_for_holders: bool) -> bool:
    """The first node acts at once, every other one when those before it have let their time pass."""
    state = draft.state
    holders = among_keepers(state, seat_holders(state)) if is_for_holders else []
    turn = turn_of(state, holders or among_keepers(state, in_join_order(state)))
    if turn is None:
        return False
    due_s = since_s + turn * draft.state.settings.takeover_s
    if draft.now_s < due_s:
        draft.deadlines_s.append(due_s)
        return False
    return True


def _report(draft: Draft, blocker: Blocker | None) -> None:
    """Say why this node's workers wait, when the reason changes."""
    state = draft.state
    if not state.is_present:
        return  # what the store shows does not count this node yet
    reason = blocker.reason if blocker is not None and blocker.is_said else ""
    shown = state.members[state.node_id].member
    is_outside = state.round is not None and not state.is_seated and bool(shown.candidates)
    if not reason and is_outside and not has_place(state):
        reason = f"the run has its {state.settings.max_nodes} nodes; this one steps in when one leaves"
    if reason and reason != state.waiting:
        draft.emit(Waiting(reason=reason), reason=reason)
    draft.change(waiting=reason)


def _give_up(draft: Draft, blocker: Blocker | None) -> None:
    """End a new node's wait for the minimum when the join time-out is over."""
    state = draft.state
    is_waiting = state.phase is Phase.JOINING or (blocker is not None and blocker.is_short)
    if state.has_run or state.ready_at_s is None or not is_waiting:
        return
    limit_s = state.settings.join_timeout_s
    if draft.now_s < state.ready_at_s + limit_s:
        draft.deadlines_s.append(state.ready_at_s + limit_s)
        return
    seen = blocker.reason if blocker is not None else "the store has not answered"
    message = f"{seen} after {limit_s:g} s: start the missing ones, or raise the join time-out"
    draft.emit(DeleteMember(), Refused(kind="timeout", message=message), reason=message)
    draft.change(phase=Phase.REFUSED)
