"""The rendezvous of one node as a pure function: (state, event, now) -> (state, effects, reason).

Every change of membership takes the same way. Somebody marks the generation as ending: `broken/<g>` ends it now,
`plan/<g>` ends it behind a step that all agree on. Every node parks its workers and says so (`settled`). When all live
holders of a seat have, the first node in the join order creates `round/<g+1>`; the others take over, one after the
other, if it does not. Nobody waits for a member that the store has dropped, nor for a newcomer that is not warm.

Decisions (`decisions.py`) are made only from what the store has shown, this node's own key included, so every node
decides alike. What a node knows, and the questions about it, are in `state.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from elastictrain.errors import InternalError
from elastictrain.rendezvous.decisions import decide, fence, rejoin
from elastictrain.rendezvous.draft import Draft
from elastictrain.rendezvous.events import (
    BrokenSeen,
    ClosedSeen,
    CloseRun,
    ConfigSeen,
    CreateBroken,
    DeadlineReached,
    Effect,
    Event,
    HostGone,
    KeeperGone,
    KeeperSeen,
    LeaseLost,
    LeaveRun,
    LocalBroken,
    LocalChanged,
    LocalPosition,
    MemberGone,
    MemberSeen,
    NodeReady,
    PlanSeen,
    RoundSeen,
    SnapshotSeen,
    StopSeen,
    StoreChange,
    StoreChanged,
)
from elastictrain.rendezvous.records import Broken, Position, Settings
from elastictrain.rendezvous.state import FINAL_PHASES, Phase, State, as_entered, check_invariants
from elastictrain.topology import Candidate

__all__ = ["Phase", "State", "Transition", "advance", "check_invariants", "next_deadline_s", "start"]


@dataclass(frozen=True, slots=True)
class Transition:
    """The state after an event, what to do about it in this order, and why, in a sentence."""

    state: State
    effects: tuple[Effect, ...]
    reason: str


def start(settings: Settings, *, node_id: str, host: str, store_port: int) -> State:
    """The state of a node that has not asked to join. `host`, `store_port`: where it would host a group's store."""
    return State(settings=settings, node_id=node_id, host=host, store_port=store_port)


def next_deadline_s(state: State) -> float | None:
    """When DeadlineReached is due (monotonic), None when only an event can change anything."""
    return state.deadline_s


def advance(state: State, event: Event, *, now_s: float) -> Transition:
    """Take in one event. In a final phase nothing happens any more. Raises InternalError on an impossible event."""
    if state.phase in FINAL_PHASES:
        return Transition(state, (), f"ignored: this node's part is over ({state.phase.value})")
    draft = Draft(state, now_s)
    match event:
        case NodeReady():
            _node_ready(draft, event)
        case LocalChanged():
            _local_changed(draft, event)
        case LocalBroken():
            _local_broken(draft, event)
        case LocalPosition():
            _local_position(draft, event)
        case LeaveRun(reason=reason):
            draft.change(leaving=reason)
        case CloseRun(reason=reason):
            draft.change(closing=reason)
        case LeaseLost():
            draft.change(config_sent=state.config is not None)
            if state.put is not None:
                rejoin(draft, "the lease of this node may have expired")
        case HostGone(generation=generation):
            draft.change(host_gone=max(state.host_gone, generation))
        case StoreChanged(changes=changes):
            _absorb(draft, changes)
        case SnapshotSeen(changes=changes, is_partial=is_partial):
            _absorb(draft, changes + _vanished(state, event))
            draft.change(is_synced=True, sees_all=state.sees_all or not is_partial)
        case DeadlineReached():
            pass
        case _ as unreachable:
            assert_never(unreachable)
    decide(draft)
    reason = "; ".join(draft.reasons) or f"{type(event).__name__} changes nothing yet"
    return Transition(draft.state, tuple(draft.effects), reason)


# ---------------------------------------------------------------- what the local node says


def _node_ready(draft: Draft, event: NodeReady) -> None:
    if draft.state.phase is not Phase.IDLE:
        raise InternalError(f"NodeReady came twice on {draft.state.node_id}")
    _check_own(draft.state, event.candidates)
    draft.change(phase=Phase.JOINING, ready_at_s=draft.now_s, expected=event.expected, candidates=event.candidates)


def _local_changed(draft: Draft, event: LocalChanged) -> None:
    state = draft.state
    if state.phase is Phase.IDLE:
        raise InternalError(f"LocalChanged before NodeReady on {state.node_id}")
    if not state.settled <= event.settled <= state.generation:
        raise InternalError(
            f"{state.node_id} settled generation {event.settled}: expected {state.settled} to {state.generation}"
        )
    _check_own(state, event.candidates)
    draft.change(candidates=event.candidates, settled=event.settled, expected=event.expected, wants_in=event.wants_in)


def _check_own(state: State, candidates: tuple[Candidate, ...]) -> None:
    foreign = [one for one in candidates if one.node_id != state.node_id]
    if foreign:
        raise InternalError(f"{state.node_id} offers worker {foreign[0].worker_id} of {foreign[0].node_id}")


def _local_broken(draft: Draft, event: LocalBroken) -> None:
    state = draft.state
    if event.generation > state.generation:
        raise InternalError(f"{state.node_id} broke generation {event.generation} of {state.generation}")
    if not state.is_seated or event.generation < state.generation:
        # A node without seats in the newest Round, a fenced one that came back among them, has no say in it.
        draft.emit(reason=f"ignored: generation {event.generation} is over for this node")
        return
    broken = Broken(
        generation=event.generation,
        cause=event.cause,
        node_id=state.node_id,
        worker_id=event.worker_id,
        detail=event.detail,
        planned=event.planned,
    )
    if not state.is_broken and state.broken_sent < event.generation:
        draft.emit(CreateBroken(broken=broken), reason=f"generation {event.generation} is broken: {event.cause}")
        draft.change(broken_sent=event.generation)
    fence(draft, broken)


def _local_position(draft: Draft, event: LocalPosition) -> None:
    state = draft.state
    is_asked = state.is_seated and state.is_planned and event.generation == state.generation
    has_answered = state.position is not None and state.position.generation == event.generation
    if is_asked and not has_answered:
        # Only the first answer counts: every node computes the stop step from the same published values.
        draft.change(position=Position(generation=event.generation, step=event.step))


# ---------------------------------------------------------------- what the store says


def _absorb(draft: Draft, changes: tuple[StoreChange, ...]) -> None:
    """Take in changes one after the other; an older word about a member than the one known is not believed."""
    members, gone, round_before = dict(draft.state.members), dict(draft.state.gone), draft.state.round
    for change in changes:
        match change:
            case MemberSeen(member=member, revision=revision):
                if revision > _last_revision(members.get(member.node_id), gone.get(member.node_id)):
                    members[member.node_id] = change
            case MemberGone(node_id=node_id, revision=revision):
                if revision > _last_revision(members.get(node_id), gone.get(node_id)):
                    gone[node_id] = revision
                    _note_departure(draft, members.pop(node_id, None))
            case RoundSeen():
                _round_seen(draft, change)
            case BrokenSeen(broken=broken):
                if draft.state.broken is None or draft.state.broken.generation < broken.generation:
                    draft.change(broken=broken)
            case PlanSeen(plan=plan):
                if draft.state.plan is None or draft.state.plan.generation < plan.generation:
                    draft.change(plan=plan)
            case StopSeen(stop=stop):
                if draft.state.stop is None or draft.state.stop.generation < stop.generation:
                    draft.change(stop=stop)
            case KeeperSeen() | KeeperGone():
                _keeper_changed(draft, change)
            case ClosedSeen(closed=closed):
                draft.change(closed=closed)
            case ConfigSeen(config=config):
                # What has gone may have been this node's own: then it is to be said again.
                draft.change(config=config, config_sent=draft.state.config_sent and config is not None)
            case _ as unreachable:
                assert_never(unreachable)
    known_round = draft.state.round
    if known_round is not None:
        is_new = known_round is not round_before
        touched = list(members) if is_new else [one.member.node_id for one in changes if isinstance(one, MemberSeen)]
        for seen in filter(None, map(members.get, touched)):
            members[seen.member.node_id] = as_entered(draft.state, seen)
    draft.change(members=members, gone=gone)


def _keeper_changed(draft: Draft, change: KeeperSeen | KeeperGone) -> None:
    """Take in who is keeper; an older word than the one known is not believed."""
    keepers, gone = dict(draft.state.keepers), dict(draft.state.keepers_gone)
    number = change.keeper.number if isinstance(change, KeeperSeen) else change.number
    known = keepers.get(number)
    if change.revision <= max(known.revision if known is not None else -1, gone.get(number, -1)):
        return
    if isinstance(change, KeeperSeen):
        keepers[number] = change
    else:
        keepers.pop(number, None)
        gone[number] = change.revision
    draft.change(keepers=keepers, keepers_gone=gone)
    if draft.state.keeper_sent == number:
        draft.change(keeper_sent=None)  # it is answered: this node is keeper, or has to ask again


def _last_revision(known: MemberSeen | None, gone_at: int | None) -> int:
    return max(known.revision if known is not None else -1, gone_at if gone_at is not None else -1)


def _note_departure(draft: Draft, seen: MemberSeen | None) -> None:
    """Remember a seat holder that parked before it went, so that nobody takes its departure for a loss."""
    state = draft.state
    if seen is None or state.round is None or seen.created_revision >= state.round_revision:
        return
    member = seen.member
    if member.settled >= state.generation and member.node_id in state.round.node_ids:
        draft.change(departed={**state.departed, member.node_id: member.position})


def _round_seen(draft: Draft, seen: RoundSeen) -> None:
    known = draft.state.round
    if known is None or seen.round.generation > known.generation:
        draft.change(
            round=seen.round,
            round_revision=seen.revision,
            departed={},
            lost_since_s=None,
            complete_since_s=None,
            minimum_since_s=None,
        )
    elif seen.round.generation == known.generation and seen.round != known:
        _made_twice(draft, seen)


def _made_twice(draft: Draft, seen: RoundSeen) -> None:
    """A store that lost its data has let a generation be made a second time, by nodes that had not heard of the first.

    Nodes may train by either Round, and neither is known to be the right one: all leave this generation, those of the
    first as new members, so that nobody waits for them to settle a Round that they have not entered.
    """
    generation = seen.round.generation
    detail = f"the store has lost its data: generation {generation} was made twice"
    broken = Broken(generation=generation, cause="store_lost", node_id=draft.state.node_id, detail=detail)
    draft.change(round=seen.round, round_revision=seen.revision, departed={}, broken_sent=generation)
    draft.change(lost_since_s=None, complete_since_s=None, minimum_since_s=None)
    draft.change(round_sent=min(draft.state.round_sent, generation))  # what was proposed went with the rest
    draft.emit(CreateBroken(broken=broken), reason=detail)
    if draft.state.put is not None:
        rejoin(draft, detail, broken_as="store_lost")


def _vanished(state: State, snapshot: SnapshotSeen) -> tuple[StoreChange, ...]:
    changes, revision = snapshot.changes, snapshot.revision
    listed = {change.member.node_id for change in changes if isinstance(change, MemberSeen)}
    gone: list[StoreChange] = [
        MemberGone(node_id=node_id, revision=revision)
        for node_id, seen in state.members.items()
        if node_id not in listed and seen.revision <= revision and (not snapshot.is_partial or node_id == state.node_id)
    ]
    numbers = {change.keeper.number for change in changes if isinstance(change, KeeperSeen)}
    gone += [
        KeeperGone(number=number, revision=revision)
        for number, keeper in state.keepers.items()
        if number not in numbers and keeper.revision <= revision
    ]
    if not any(isinstance(change, ConfigSeen) for change in changes):
        gone.append(ConfigSeen(config=None))
    return tuple(gone)
