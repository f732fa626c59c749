"""What lies in the store under `/elastictrain/<run_id>/`, and how it is written as JSON. Pure.

config               what all nodes must agree on; created by the first, never changed
members/<node_id>    one Member per node, on the node's lease
round/<generation>   the agreed Round; created once
plan/<generation>    somebody wants the Round to end at a step boundary; created once
stop/<generation>    the step behind which all park, once the Round is planned to end; only where there are keepers
broken/<generation>  the Round is over now; created once
keeper/<number>      a node that sees every member, on the node's lease; only in runs of many nodes (`keepers.py`)
closed               the run is over; created once, on a lease of its own that nobody renews

Who closes the run deletes all but the last, which the store drops by itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from elastictrain.errors import ConfigError, StoreError
from elastictrain.topology import Candidate

RECORD_VERSION = 1
MANY_NODES = 32
PAST_GENERATION = "past_generation"
"""In the `config` key, but nothing that nodes have to agree on beforehand: the first to write it decides."""

PlanKind = Literal["join", "leave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the rendezvous needs to know. Times are seconds.

    The numbers of nodes, the minimal world size and `agreed` must be the same on every node: the first node writes
    them to the store, and a node that disagrees is refused.
    """

    run_id: str
    min_nodes: int = 1
    max_nodes: int = 1
    """Nodes beyond it wait, and step in when a seat becomes free."""
    min_world_size: int = 1
    """Fewest workers that a Round may have; below it the run waits."""
    join_timeout_s: float = 600.0
    """How long a new node waits for the minimum before it gives up."""
    last_call_timeout_s: float = 30.0
    """How long the first Round waits for more nodes once it has the minimum."""
    takeover_s: float = 1.0
    """How long each node gives the one before it in the join order to act first."""
    ttl_s: float = 10.0
    """Life of this node's lease; infinite where the store cannot outlive the node."""
    outage_timeout_s: float = 60.0
    """How long nodes that train together go on beyond their leases while they cannot reach the store."""
    closed_ttl_s: float = 60.0
    """How long the record of a finished run tells late nodes of it; then its id may be used again."""
    past_generation: int = 0
    """Newest generation of the run's earlier lives that this node knows of: numbers go on from there."""
    see_all_up_to: int = MANY_NODES
    """Up to so many nodes (`max_nodes`) every node watches every other one; in larger runs only the keepers do."""
    agreed: Mapping[str, str] = field(default_factory=dict)
    """More that must be equal on every node, such as the version."""

    def __post_init__(self) -> None:
        _check_name("run_id", self.run_id)
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigError(
                f"nodes {self.min_nodes}:{self.max_nodes}: expected 1 <= min <= max",
                field="nnodes",
                seen=self.min_nodes,
            )
        if self.min_world_size < 1:
            raise ConfigError(
                f"min_world_size {self.min_world_size}: expected 1 or more",
                field="min_world_size",
                seen=self.min_world_size,
            )
        for name in (
            "join_timeout_s",
            "last_call_timeout_s",
            "takeover_s",
            "ttl_s",
            "closed_ttl_s",
            "outage_timeout_s",
        ):
            seconds = getattr(self, name)
            if not seconds >= 0 or (name.endswith("ttl_s") and seconds == 0):
                raise ConfigError(f"{name} {seconds}: expected a positive number of seconds", field=name, seen=seconds)

    def config(self) -> dict[str, Any]:
        """What must be equal on every node."""
        numbers = {"min_nodes": self.min_nodes, "max_nodes": self.max_nodes, "min_world_size": self.min_world_size}
        # A node that waits less than the others go on would train beside them.
        times = {"outage_timeout_s": float(self.outage_timeout_s)}
        return {"version": RECORD_VERSION, **numbers, **times, **self.agreed}

    def config_record(self) -> dict[str, Any]:
        """The value of the `config` key that this node would write: it also decides where generations begin."""
        return {**self.config(), PAST_GENERATION: self.past_generation}


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The highest step that any worker of a node has begun, in a generation."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node, as it shows itself to the others.

    `candidates` are its workers that may take part in the next Round: parked survivors and warm newcomers. `settled` is
    the newest generation that none of its workers runs any more (0 at the start). `expected` counts the workers it is
    starting for its first Round. `incarnation` grows each time the node had to join anew.
    """

    node_id: str
    host: str
    store_port: int
    incarnation: int = 0
    candidates: tuple[Candidate, ...] = ()
    settled: int = 0
    position: Position | None = None
    wants_in: bool = False
    expected: int = 0

    def to_json(self) -> dict[str, Any]:
        workers = [
            {"worker_id": one.worker_id, "local_rank": one.local_rank, "evaluating": one.evaluating}
            for one in self.candidates
        ]
        position = self.position
        return {
            "version": RECORD_VERSION,
            "node_id": self.node_id,
            "host": self.host,
            "store_port": self.store_port,
            "incarnation": self.incarnation,
            "candidates": workers,
            "settled": self.settled,
            "position": None if position is None else {"generation": position.generation, "step": position.step},
            "wants_in": self.wants_in,
            "expected": self.expected,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Member:
        """Rebuild a Member. Raises StoreError when it is malformed or of another version."""
        what = "member"
        node_id = _text(what, value, "node_id")
        candidates = []
        for one in _list(what, value, "candidates"):
            worker_id, local_rank = _text(what, one, "worker_id"), _count(what, one, "local_rank")
            evaluating = one.get("evaluating") is True
            candidates.append(
                Candidate(worker_id=worker_id, node_id=node_id, local_rank=local_rank, evaluating=evaluating)
            )
        position = value.get("position")
        if position is not None:
            generation, step = _count(what, position, "generation"), _count(what, position, "step")
            position = Position(generation=generation, step=step)
        return cls(
            node_id=node_id,
            host=_text(what, value, "host"),
            store_port=_count(what, value, "store_port"),
            incarnation=_count(what, value, "incarnation"),
            candidates=tuple(candidates),
            settled=_count(what, value, "settled"),
            position=position,
            wants_in=value.get("wants_in") is True,
            expected=_count(what, value, "expected"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Why a generation ended: the cause, the node that saw it, and the worker where one is to blame."""

    generation: int
    cause: str
    node_id: str
    worker_id: str = ""
    detail: str = ""
    planned: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"version": RECORD_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Broken:
        """Rebuild it. Raises StoreError when it is malformed or of another version."""
        return cls(
            generation=_count("broken", value, "generation"),
            cause=_text("broken", value, "cause"),
            node_id=_text("broken", value, "node_id"),
            worker_id=_text("broken", value, "worker_id"),
            detail=_text("broken", value, "detail"),
            planned=value.get("planned") is True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A generation is to end at a step boundary, because a node has newcomers or wants to leave."""

    generation: int
    kind: PlanKind
    node_id: str

    def to_json(self) -> dict[str, Any]:
        return {"version": RECORD_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        """Rebuild it. Raises StoreError when it is malformed or of another version."""
        kind: PlanKind = "leave" if _text("plan", value, "kind") == "leave" else "join"
        generation = _count("plan", value, "generation")
        return cls(generation=generation, kind=kind, node_id=_text("plan", value, "node_id"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The step behind which all workers of a generation park: the highest that any node says it has begun."""

    generation: int
    step: int

    def to_json(self) -> dict[str, Any]:
        return {"version": RECORD_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Stop:
        """Rebuild it. Raises StoreError when it is malformed or of another version."""
        return cls(generation=_count("stop", value, "generation"), step=_count("stop", value, "step"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeper:
    """A node that sees every member and decides for those that do not."""

    number: int
    node_id: str

    def to_json(self) -> dict[str, Any]:
        return {"version": RECORD_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Keeper:
        """Rebuild it. Raises StoreError when it is malformed or of another version."""
        return cls(number=_count("keeper", value, "number"), node_id=_text("keeper", value, "node_id"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The run is over, by the word of a node."""

    reason: str
    node_id: str

    def to_json(self) -> dict[str, Any]:
        return {"version": RECORD_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Closed:
        """Rebuild it. Raises StoreError when it is malformed or of another version."""
        return cls(reason=_text("closed", value, "reason"), node_id=_text("closed", value, "node_id"))


@dataclass(frozen=True, slots=True)
class Keys:
    """The names of a run's keys."""

    run_id: str

    @property
    def prefix(self) -> str:
        return f"/elastictrain/{self.run_id}/"

    @property
    def config(self) -> str:
        return f"{self.prefix}config"

    @property
    def closed(self) -> str:
        return f"{self.prefix}closed"

    @property
    def members(self) -> str:
        return f"{self.prefix}members/"

    def member(self, node_id: str) -> str:
        _check_name("node_id", node_id)
        return f"{self.members}{node_id}"

    def keeper(self, number: int) -> str:
        return f"{self.prefix}keeper/{number}"

    def stop(self, generation: int) -> str:
        return f"{self.prefix}stop/{generation}"

    def round(self, generation: int) -> str:
        return f"{self.prefix}round/{generation}"

    def plan(self, generation: int) -> str:
        return f"{self.prefix}plan/{generation}"

    def broken(self, generation: int) -> str:
        return f"{self.prefix}broken/{generation}"


def _check_name(what: str, name: str) -> None:
    if not name or "/" in name or not name.isprintable():
        raise ConfigError(f"{what} {name!r}: expected a name without '/'", field=what, seen=name)


def _malformed(what: str, value: object, expected: str) -> StoreError:
    seen = json.dumps(value, default=str)[:200]
    return StoreError(f"malformed {what} in the store: expected {expected}, got {seen}", retryable=False)


def _field(what: str, value: object, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise _malformed(what, value, "an object")
    if value.get("version", RECORD_VERSION) != RECORD_VERSION:
        raise _malformed(what, value, f"version {RECORD_VERSION} (run the same elastictrain on every node)")
    return value.get(name)


def _text(what: str, value: object, name: str) -> str:
    seen = _field(what, value, name)
    if not isinstance(seen, str):
        raise _malformed(what, value, f"text in {name!r}")
    return seen


def _count(what: str, value: object, name: str) -> int:
    seen = _field(what, value, name)
    if not isinstance(seen, int) or isinstance(seen, bool) or seen < 0:
        raise _malformed(what, value, f"a whole number in {name!r}")
    return seen


def _list(what: str, value: object, name: str) -> list[Any]:
    seen = _field(what, value, name)
    if not isinstance(seen, list):
        raise _malformed(what, value, f"a list in {name!r}")
    return seen
