"""What goes into the protocol core (events) and what comes out (writes to the store, outputs to the agent). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from elastictrain.rendezvous.records import Broken, Closed, Keeper, Member, Plan, Stop
from elastictrain.topology import Candidate, Round

# ---------------------------------------------------------------- events from the local node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReady:
    """The node wants to take part. `expected` workers are being started; they count until they are warm or failed."""

    expected: int = 0
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalChanged:
    """The workers of this node changed; all four values replace the previous ones.

    `candidates` are all workers that may take part in the next Round: parked survivors and warm newcomers. `settled` is
    the newest generation from which every live seated worker of this node has parked. `wants_in` asks for a planned
    change that lets the newcomers in.
    """

    candidates: tuple[Candidate, ...]
    settled: int
    expected: int = 0
    wants_in: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBroken:
    """The generation cannot go on: a worker of this node died, raised, hangs, or suspects another."""

    generation: int
    cause: str
    worker_id: str = ""
    detail: str = ""
    planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPosition:
    """Answer to ReportPosition: no worker of this node has begun a step beyond `step`, nor will it before StopAt."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRun:
    """The node wants to leave while the run goes on."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseRun:
    """The run is over, for all nodes."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost:
    """The lease of this node has ended, or may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGone:
    """The node that hosts the store of this generation's group is proven dead (answer to ProbeHost)."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineReached:
    """The time that `next_deadline_s` named has come."""


# ---------------------------------------------------------------- events from the store


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSeen:
    member: Member
    revision: int
    created_revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberGone:
    node_id: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSeen:
    round: Round
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenSeen:
    broken: Broken


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSeen:
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSeen:
    stop: Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSeen:
    keeper: Keeper
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperGone:
    number: int
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedSeen:
    closed: Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigSeen:
    """`config` is None when the store has dropped it with the lease of the node that wrote it."""

    config: Mapping[str, Any] | None


StoreChange = (
    MemberSeen
    | MemberGone
    | RoundSeen
    | BrokenSeen
    | PlanSeen
    | StopSeen
    | KeeperSeen
    | KeeperGone
    | ClosedSeen
    | ConfigSeen
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreChanged:
    """Changes in the order of the store, taken in together: decisions are made once, after the last of them."""

    changes: tuple[StoreChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSeen:
    """All that the store holds at `revision`: a member that is not listed is gone. Of members other than this node a
    partial one says nothing."""

    changes: tuple[StoreChange, ...]
    revision: int
    is_partial: bool = False


Event = (
    NodeReady
    | LocalChanged
    | LocalBroken
    | LocalPosition
    | LeaveRun
    | CloseRun
    | LeaseLost
    | HostGone
    | DeadlineReached
    | StoreChanged
    | SnapshotSeen
)

# ---------------------------------------------------------------- writes to the store


@dataclass(frozen=True, slots=True, kw_only=True)
class PutMember:
    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinMember:
    """Give up the old lease with its key, then write the member under a new lease."""

    member: Member


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteMember:
    """Give up the lease with its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateConfig:
    """On this node's lease: what a run has agreed on does not outlive its nodes."""

    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRound:
    round: Round


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePlan:
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateStop:
    stop: Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateKeeper:
    """On this node's lease: a keeper is one as long as it is a member."""

    keeper: Keeper


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateBroken:
    broken: Broken


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateClosed:
    closed: Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeHost:
    """Find out whether the agent that hosts the store of this generation's group is dead. No write: nobody sees it."""

    generation: int
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchAll:
    """Watch every member from now on; a Snapshot of all comes first. No write: nobody sees it."""


Write = (
    PutMember
    | RejoinMember
    | DeleteMember
    | CreateConfig
    | CreateRound
    | CreatePlan
    | CreateStop
    | CreateKeeper
    | CreateBroken
    | CreateClosed
)

# ---------------------------------------------------------------- outputs to the agent


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Abort the workers of this generation and let them park. Said once per generation."""

    generation: int
    cause: str
    node_id: str = ""
    worker_id: str = ""
    detail: str = ""
    planned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPosition:
    """A planned change begins: answer with LocalPosition, or with LocalBroken if the workers cannot stop at a step."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAt:
    """Let the workers commit `step`, the same on every node, and park behind it."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterRound:
    """Workers of this node have seats in the new Round: start them on it."""

    round: Round


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """No Round can be formed, or this node cannot enter, for the reason given. Said when the reason changes."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The node has left the run."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClosed:
    """The run is over for every node."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """This node cannot take part: its configuration differs, or the minimum did not arrive in time."""

    kind: Literal["config", "timeout"]
    message: str


Output = Fence | ReportPosition | StopAt | EnterRound | Waiting | Left | RunClosed | Refused
Effect = Write | ProbeHost | WatchAll | Output
