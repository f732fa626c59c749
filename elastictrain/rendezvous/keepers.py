"""Runs of many nodes: a few keepers see every member and decide for the others. Pure.

If every node watched every other one, each change of membership would cost the square of their number in messages. So
beyond `Settings.see_all_up_to` nodes a node watches its own member key and what is meant for all, and NUM_KEEPERS of
the members, who hold `keeper/<number>` on their leases, watch all members besides. They declare losses, plan for
newcomers, name the step to stop behind, and make the Rounds; each gives the one that has been keeper for longer the
time to act first, because that one has seen more.

No node is special. A keeper's key goes with its lease. While another keeper is there, nodes at the front of the Round
fill its place, at their leisure; when none is there, every node asks for the place at once, and one create wins. What
keepers write is created once whoever writes it, and each node enters, fences and rejoins by its own key: with too many
keepers, or with wrong ones, a run is slow and not wrong.
"""

from __future__ import annotations

from elastictrain.rendezvous.draft import Draft
from elastictrain.rendezvous.events import CreateKeeper, CreateStop, MemberSeen, Waiting, WatchAll
from elastictrain.rendezvous.records import Keeper, Stop
from elastictrain.rendezvous.state import (
    State,
    admitted_members,
    can_enter,
    has_keepers,
    lost_node,
    seat_holders,
    stop_step,
)

NUM_KEEPERS = 3
# The nodes of the Round that fill vacant places beside a keeper: so many that not all of them are keepers or dead.
_FRONT = 8


def among_keepers(state: State, eligible: list[MemberSeen]) -> list[MemberSeen]:
    """Those of `eligible` who may act: in a run with keepers these, the oldest first."""
    if not has_keepers(state):
        return eligible
    since = {seen.keeper.node_id: seen.revision for seen in state.keepers.values()}
    return sorted(
        (seen for seen in eligible if seen.member.node_id in since), key=lambda seen: since[seen.member.node_id]
    )


def keep(draft: Draft) -> None:
    """Become a keeper where one is missing, and see all as soon as this node is one."""
    state = draft.state
    if not has_keepers(state) or not state.is_present or state.leaving is not None:
        return
    if any(seen.keeper.node_id == state.node_id for seen in state.keepers.values()):
        see_all(draft)
        return
    number = next((number for number in range(NUM_KEEPERS) if number not in state.keepers), None)
    if number is None or number == state.keeper_sent or (state.keepers and not _is_at_front(state)):
        return
    keeper = Keeper(number=number, node_id=state.node_id)
    draft.emit(CreateKeeper(keeper=keeper), reason=f"there is no keeper {number}")
    draft.change(keeper_sent=number)


def see_all(draft: Draft) -> None:
    """Watch every member from now on."""
    if not draft.state.sees_all and not draft.state.asked_all:
        draft.emit(WatchAll(), reason="see every member")
        draft.change(asked_all=True)


def _is_at_front(state: State) -> bool:
    return state.round is not None and state.is_seated and state.node_id in state.round.node_ids[:_FRONT]


def find_newcomer(state: State) -> str | None:
    """A node with workers that a planned change would give seats: this node, or, as this one sees all, any."""
    if not has_keepers(state):
        return state.node_id if (state.wants_in or not state.is_seated) and can_enter(state) else None
    if not state.sees_all:
        return None
    held = state.round.worker_ids if state.round is not None else frozenset()
    holders = {seen.member.node_id for seen in seat_holders(state)}

    def is_waiting(seen: MemberSeen) -> bool:
        member = seen.member
        is_asking = member.wants_in or member.node_id not in holders
        return is_asking and any(one.worker_id not in held for one in member.candidates)

    waiting = {seen.member.node_id for seen in state.members.values() if seen.member.candidates and is_waiting(seen)}
    if not waiting:
        return None
    return next((seen.member.node_id for seen in admitted_members(state) if seen.member.node_id in waiting), None)


def say_stop(draft: Draft) -> None:
    """Tell the nodes, who do not see each other's positions, behind which step all park."""
    state = draft.state
    is_asked = state.is_planned and not state.is_broken and state.stop_sent < state.generation
    if not has_keepers(state) or not state.sees_all or not is_asked:
        return
    step = stop_step(state)
    if step is not None and lost_node(state) is None:
        stop = Stop(generation=state.generation, step=step)
        draft.emit(CreateStop(stop=stop), reason=f"all are to stop behind step {step}")
        draft.change(stop_sent=state.generation)


def told_stop(state: State) -> int | None:
    """The step behind which this node is to park, None as long as it is not known."""
    if has_keepers(state):
        return state.stop.step if state.stop is not None and state.stop.generation == state.generation else None
    return stop_step(state) if lost_node(state) is None else None


def wait_for_keepers(draft: Draft) -> None:
    """What is left to a node that does not see all: to say that it waits, and to look for itself in the end."""
    state = draft.state
    if not state.is_present:
        return
    reason = ""
    if not state.is_seated and (state.candidates or state.expected):
        names = ", ".join(seen.keeper.node_id for seen in state.keepers.values()) or "none yet"
        reason = f"waiting for a round with this node; which nodes are missing is known to the keepers: {names}"
    if reason and not state.waiting:
        draft.emit(Waiting(reason=reason), reason=reason)
    draft.change(waiting=(state.waiting or reason) if reason else "")
    if state.has_run or state.round is not None or state.ready_at_s is None:
        return
    # Who is to say, when the join time-out is over, how many are missing has to have seen it.
    due_s = state.ready_at_s + state.settings.join_timeout_s
    if draft.now_s < due_s:
        draft.deadlines_s.append(due_s)
    else:
        see_all(draft)
