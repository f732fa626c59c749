"""What one node knows, and the questions that can be answered from it. Pure.

A seat is only worth something to the node that has been a member without a break since before the Round was made: a
member whose key was created after the Round lost its lease in between, and counts as a newcomer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from elastictrain.errors import InternalError
from elastictrain.rendezvous.events import KeeperSeen, MemberSeen
from elastictrain.rendezvous.records import PAST_GENERATION, Broken, Closed, Member, Plan, Position, Settings, Stop
from elastictrain.topology import Candidate, Round


class Phase(Enum):
    """How far the node has come. LEFT, CLOSED and REFUSED are final."""

    IDLE = "idle"
    JOINING = "joining"
    JOINED = "joined"
    LEFT = "left"
    CLOSED = "closed"
    REFUSED = "refused"


FINAL_PHASES = frozenset({Phase.LEFT, Phase.CLOSED, Phase.REFUSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything the protocol core knows on one node. Times are monotonic seconds of this node."""

    settings: Settings
    node_id: str
    host: str
    store_port: int
    phase: Phase = Phase.IDLE
    is_synced: bool = False
    """The store's first snapshot has been seen."""
    sees_all: bool = False
    """`members` holds every member, not only this node; always so in runs without keepers."""

    # This node, by its own word.
    incarnation: int = 0
    candidates: tuple[Candidate, ...] = ()
    settled: int = 0
    expected: int = 0
    wants_in: bool = False
    position: Position | None = None
    leaving: str | None = None
    closing: str | None = None

    # The store, as far as its watch has told.
    config: Mapping[str, Any] | None = None
    closed: Closed | None = None
    members: Mapping[str, MemberSeen] = field(default_factory=dict)
    gone: Mapping[str, int] = field(default_factory=dict)
    """The revision at which a member vanished: an older word about it, delivered late, is not believed."""
    departed: Mapping[str, Position | None] = field(default_factory=dict)
    """Seat holders that went after all their workers had parked: not a loss."""
    round: Round | None = None
    round_revision: int = 0
    broken: Broken | None = None
    plan: Plan | None = None
    stop: Stop | None = None
    keepers: Mapping[int, KeeperSeen] = field(default_factory=dict)
    keepers_gone: Mapping[int, int] = field(default_factory=dict)
    """As `gone`, for keepers by their number."""

    # What has been written or said already; a number is the newest generation for which it was.
    put: Member | None = None
    was_present: bool = False
    entered: int = 0
    """Newest Round taken in, whether or not this node has seats in it."""
    seat_generation: int = 0
    """The generation in which this node holds seats, 0 when none."""
    has_run: bool = False
    fenced: int = 0
    asked: int = 0
    stop_said: int = 0
    stop_sent: int = 0
    broken_sent: int = 0
    plan_sent: int = 0
    probed: int = 0
    host_gone: int = 0
    """Newest generation whose store host is proven dead: nothing of it can be committed any more."""
    round_sent: int = 0
    config_sent: bool = False
    keeper_sent: int | None = None
    """Which keeper this node has asked to be, and has not heard whether it is."""
    asked_all: bool = False
    closed_sent: bool = False
    waiting: str = ""

    # Since when something has been so, and when to look again.
    ready_at_s: float | None = None
    lost_since_s: float | None = None
    complete_since_s: float | None = None
    minimum_since_s: float | None = None
    deadline_s: float | None = None

    @property
    def generation(self) -> int:
        """Number of the newest Round known, 0 before the first."""
        return self.round.generation if self.round is not None else 0

    @property
    def is_present(self) -> bool:
        """The store shows this node's current incarnation."""
        seen = self.members.get(self.node_id)
        return seen is not None and seen.member.incarnation == self.incarnation

    @property
    def is_seated(self) -> bool:
        """This node holds seats in the newest Round."""
        return self.round is not None and self.seat_generation == self.round.generation

    @property
    def is_broken(self) -> bool:
        return self.round is not None and self.broken is not None and self.broken.generation == self.round.generation

    @property
    def is_planned(self) -> bool:
        return self.round is not None and self.plan is not None and self.plan.generation == self.round.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocker:
    """Why the next Round cannot be made now; `is_said`: people should hear it, `is_short`: members are missing."""

    reason: str
    is_said: bool = False
    is_short: bool = False
    deadline_s: float | None = None


def has_keepers(state: State) -> bool:
    """Whether the run may be so large that nodes do not see each other; see `keepers.py`."""
    return state.settings.max_nodes > state.settings.see_all_up_to


def own_member(state: State) -> Member:
    """This node as it should show itself to the others."""
    return Member(
        node_id=state.node_id,
        host=state.host,
        store_port=state.store_port,
        incarnation=state.incarnation,
        candidates=() if state.leaving is not None else state.candidates,
        settled=state.settled,
        position=state.position,
        wants_in=state.wants_in and state.leaving is None,
        expected=0 if state.leaving is not None else state.expected,
    )


def as_entered(state: State, seen: MemberSeen) -> MemberSeen:
    """What a member has become by the newest Round, if that was made behind its last word: its workers with seats are
    candidates no more. A node that enters a Round need not write so."""
    made, member = state.round, seen.member
    if made is None or seen.revision >= state.round_revision or not member.candidates:
        return seen
    left = tuple(one for one in member.candidates if one.worker_id not in made.worker_ids)
    if len(left) == len(member.candidates):
        return seen
    return replace(seen, member=replace(member, candidates=left, wants_in=member.wants_in and bool(left)))


def in_join_order(state: State) -> list[MemberSeen]:
    return sorted(state.members.values(), key=lambda seen: (seen.created_revision, seen.member.node_id))


def seat_holders(state: State) -> list[MemberSeen]:
    """Live members with seats in the newest Round, in rank order of their nodes."""
    if state.round is None:
        return []
    found = (state.members.get(node_id) for node_id in state.round.node_ids)
    return [seen for seen in found if seen is not None and seen.created_revision < state.round_revision]


def lost_node(state: State) -> str | None:
    """The first node of the newest Round that is no longer the member it was, and had not parked before it went."""
    if state.round is None:
        return None
    alive = {seen.member.node_id for seen in seat_holders(state)} | state.departed.keys()
    return next((node_id for node_id in state.round.node_ids if node_id not in alive), None)


def next_generation(state: State) -> int:
    """Number of the next Round. One key decides where the first begins, so that two proposers name the same."""
    if state.round is not None:
        return state.generation + 1
    past = (state.config or {}).get(PAST_GENERATION, 0)
    return 1 + (past if isinstance(past, int) and past >= 0 else 0)


def may_train_on(state: State) -> bool:
    """Whether the nodes of the newest Round, all of them gone from the store, may still train.

    Nodes that are cut off from the store, but not from each other, go on for `outage_timeout_s`: while every step needs
    all of them, nobody can have replaced one of them behind the others' back. A single node is no such proof and stops
    by its lease; and a node that came back as a new member has stopped, and the others' steps with it.
    """
    if state.round is None or state.is_broken or state.host_gone >= state.generation or state.departed:
        return False
    node_ids = state.round.node_ids
    has_stopped = state.node_id in node_ids or any(node_id in state.members for node_id in node_ids)
    return len(node_ids) > 1 and not has_stopped


def outage_patience_s(state: State) -> float:
    """How long beyond its lease this node may let its workers be, in seconds; see `may_train_on`."""
    if state.round is None or not state.is_seated or max(state.settled, state.fenced) >= state.generation:
        return math.inf  # nothing runs: what has become of the lease, the store will tell
    return state.settings.outage_timeout_s if len(state.round.node_ids) > 1 else 0.0


def turn_of(state: State, eligible: list[MemberSeen]) -> int | None:
    """This node's place in the order in which `eligible` members act, None when it is not among them."""
    order = [seen.member.node_id for seen in eligible]
    return order.index(state.node_id) if state.is_present and state.node_id in order else None


def has_survivors(state: State) -> bool:
    """Whether any candidate held a seat in the newest Round."""
    held = state.round.worker_ids if state.round is not None else frozenset()
    return any(one.worker_id in held for seen in state.members.values() for one in seen.member.candidates)


def admitted_members(state: State) -> list[MemberSeen]:
    """The at most `max_nodes` members that the next Round is for: seat holders first, then by join order."""
    holders = {seen.member.node_id for seen in seat_holders(state)}
    counts_starting = not has_survivors(state)

    def is_part(seen: MemberSeen) -> bool:
        runs = seen.member.node_id in holders and seen.member.settled < state.generation
        return bool(seen.member.candidates) or runs or (counts_starting and seen.member.expected > 0)

    part = [seen for seen in in_join_order(state) if is_part(seen)]
    part.sort(key=lambda seen: seen.member.node_id not in holders)
    return part[: state.settings.max_nodes]


def chosen_candidates(state: State) -> tuple[Candidate, ...]:
    """The workers that would take part in the next Round if it were made now, by join order and local rank."""
    admitted = sorted(admitted_members(state), key=lambda seen: (seen.created_revision, seen.member.node_id))
    return tuple(
        one for seen in admitted for one in sorted(seen.member.candidates, key=lambda candidate: candidate.local_rank)
    )


def can_enter(state: State) -> bool:
    """Whether a planned change would give a seat to a candidate of this node that has none."""
    seen = state.members.get(state.node_id)
    held = state.round.worker_ids if state.round is not None else frozenset()
    # Shown by the store and still true: whoever makes the Round must see it, and it must not have died since.
    offered = set(seen.member.candidates) & set(state.candidates) if seen is not None else set()
    return any(one.worker_id not in held for one in offered) and has_place(state)


def has_place(state: State) -> bool:
    """Whether this node is among those that the next Round is for."""
    return any(seen.member.node_id == state.node_id for seen in admitted_members(state))


def stop_step(state: State) -> int | None:
    """The step behind which all park: the highest that anybody has begun. None until every seat holder has told."""
    steps = []
    holders = [(seen.member.position, seen.member.settled) for seen in seat_holders(state)]
    for position, settled in holders + [(position, state.generation) for position in state.departed.values()]:
        if position is not None and position.generation == state.generation:
            steps.append(position.step)
        elif settled < state.generation:
            return None
    return max(steps, default=None)


def find_blocker(state: State, now_s: float) -> Blocker | None:
    """What keeps the next Round from being made, None when nothing does."""
    generation, settings = state.generation, state.settings
    if state.round is not None and may_train_on(state):
        reason = (
            f"all nodes of generation {generation} are gone from the store, but may be cut off from it and train on: "
            f"waiting for up to {settings.outage_timeout_s:g} s, or until {state.round.store_host} answers that "
            "nobody is there"
        )
        return Blocker(reason=reason, is_said=True)
    if state.round is not None and not state.is_broken and not state.is_planned:
        return Blocker(reason=f"generation {generation} runs")
    holders = seat_holders(state)
    running = next((seen.member.node_id for seen in holders if seen.member.settled < generation), None)
    if running is not None:
        return Blocker(reason=f"workers of {running} have not parked from generation {generation}")
    admitted = admitted_members(state)
    # With a survivor there is somebody to wait, so nobody is waited for; without one, an incomplete start only costs a
    # second Round.
    starting = 0 if has_survivors(state) else sum(seen.member.expected for seen in admitted)
    num_workers = sum(len(seen.member.candidates) for seen in admitted) + starting
    if len(admitted) < settings.min_nodes:
        # A node that is there without a worker that is ready or starting is another trouble than one that is not there.
        what = "nodes" if len(state.members) < settings.min_nodes else "nodes with a ready worker"
        return _shortage(len(admitted), settings.min_nodes, what)
    if num_workers < settings.min_world_size:
        return _shortage(num_workers, settings.min_world_size, "workers")
    if starting:
        return Blocker(reason=f"{starting} of {num_workers} workers are starting", is_said=True)
    if not holders and len(admitted) < settings.max_nodes:
        since_s = now_s if state.minimum_since_s is None else state.minimum_since_s
        deadline_s = since_s + settings.last_call_timeout_s
        if now_s < deadline_s:
            reason = f"{len(admitted)} nodes are there, last call for up to {settings.max_nodes}"
            return Blocker(reason=reason, is_said=True, deadline_s=deadline_s)
    return None


def _shortage(seen: int, minimum: int, what: str) -> Blocker:
    return Blocker(reason=f"{seen} of at least {minimum} {what}", is_said=True, is_short=True)


def check_invariants(state: State, before: State | None = None) -> None:
    """Raise InternalError when the state contradicts itself. What it shares with the one `before` is not looked at."""
    generation = state.generation
    is_same_round = state.round is None or (before is not None and before.round is state.round)
    is_same_members = before is not None and before.members is state.members
    checks = {
        "ranks are 0..n-1": is_same_round
        or state.round is None
        or [seat.rank for seat in state.round.seats] == list(range(state.round.world_size)),
        "a worker sits once": is_same_round
        or state.round is None
        or len(state.round.worker_ids) == state.round.world_size,
        "nobody enters a Round that is not made": state.entered <= generation,
        "seats are held in an entered Round": state.seat_generation <= state.entered,
        "only what was entered is fenced": state.fenced <= state.entered,
        "only what was made is settled": state.settled <= generation,
        "the next Round is one further": state.round is None or state.round_sent <= generation + 1,
        "only what was made is broken or planned": max(state.broken_sent, state.plan_sent) <= generation,
        "members stand under their own name": is_same_members
        or all(node_id == seen.member.node_id for node_id, seen in state.members.items()),
        "candidates belong to this node": all(one.node_id == state.node_id for one in state.candidates),
    }
    failed = [rule for rule, holds in checks.items() if not holds]
    if failed:
        raise InternalError(f"rendezvous of {state.node_id}: violated: {'; '.join(failed)}")
