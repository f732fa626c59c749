"""The nouns of a run and the one rule that gives ranks. Pure: no clock, no I/O, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elastictrain.errors import ConfigError

ROUND_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that may take part in the next Round: parked there, or warm and waiting to enter.

    `evaluating` says that it parked inside an evaluation: a Round that holds such a survivor admits no newcomer, who
    could not take part in the evaluation's collectives.
    """

    worker_id: str
    node_id: str
    local_rank: int
    evaluating: bool = False


class Seat(NamedTuple):
    """One worker's place in a Round.

    `rank` is its position in the world of this generation. `stream` numbers its random stream: it stays with a
    survivor over every change of rank, and a replacement takes the stream of the worker whose place it fills.
    """

    worker_id: str
    node_id: str
    local_rank: int
    rank: int
    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The agreed outcome of a rendezvous: who takes part, at which rank, and where the group's store listens.

    `seats` is ordered by rank. `store_host` and `store_port` belong to this generation and are cached nowhere.
    """

    generation: int
    seats: tuple[Seat, ...]
    store_host: str
    store_port: int
    reason: str = ""
    node_ids: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Nodes in the order of their lowest rank; the index is the node_rank."""

    worker_ids: frozenset[str] = field(init=False, repr=False, compare=False)
    """Who sits; a worker sits once."""

    def __post_init__(self) -> None:
        # Made once: every node asks for them again and again.
        object.__setattr__(self, "node_ids", tuple(dict.fromkeys([seat[1] for seat in self.seats])))
        object.__setattr__(self, "worker_ids", frozenset([seat[0] for seat in self.seats]))

    @property
    def world_size(self) -> int:
        return len(self.seats)

    def seat_of(self, worker_id: str) -> Seat | None:
        return next((seat for seat in self.seats if seat.worker_id == worker_id), None)

    def to_json(self) -> dict[str, Any]:
        """As short as may be, for every node reads it: one list of each thing about the seats, by rank; `at` counts in
        `nodes`."""
        index = {node_id: number for number, node_id in enumerate(self.node_ids)}
        return {
            "version": ROUND_VERSION,
            "generation": self.generation,
            "store_host": self.store_host,
            "store_port": self.store_port,
            "reason": self.reason,
            "nodes": list(self.node_ids),
            "workers": [seat.worker_id for seat in self.seats],
            "at": [index[seat.node_id] for seat in self.seats],
            "local_ranks": [seat.local_rank for seat in self.seats],
            "streams": [seat.stream for seat in self.seats],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Round:
        """Rebuild a Round. Raises ConfigError on another version or a malformed value."""
        if value.get("version") != ROUND_VERSION:
            raise ConfigError(
                f"round format {value.get('version')!r} is not {ROUND_VERSION}: run the same elastictrain everywhere"
            )
        try:
            workers, ranks = value["workers"], range(len(value["workers"]))
            nodes = [value["nodes"][number] for number in value["at"]]
            seats = zip(workers, nodes, value["local_ranks"], ranks, value["streams"], strict=True)
            return cls(
                generation=int(value["generation"]),
                seats=tuple(map(Seat._make, seats)),
                store_host=str(value["store_host"]),
                store_port=int(value["store_port"]),
                reason=str(value.get("reason", "")),
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"malformed round: {error}: {json.dumps(value)[:200]}") from None


def assign_seats(previous: Sequence[Seat], candidates: Sequence[Candidate]) -> tuple[Seat, ...]:
    """Give every candidate a rank and a stream.

    Survivors (candidates that had a seat) keep their order. Newcomers first fill the places that have become vacant,
    lowest rank first, and take over the vacant stream; the rest follow behind, on the lowest streams that are free.
    Places that nobody fills close up.
    """
    by_id = {candidate.worker_id: candidate for candidate in candidates}
    if len(by_id) != len(candidates):
        raise ConfigError(f"a worker is named twice among {[candidate.worker_id for candidate in candidates]}")
    held = {seat.worker_id for seat in previous}
    newcomers = [candidate for candidate in candidates if candidate.worker_id not in held]
    places: list[tuple[Candidate, int]] = []
    for seat in sorted(previous, key=lambda seat: seat.rank):
        survivor = by_id.get(seat.worker_id)
        if survivor is not None:
            places.append((survivor, seat.stream))
        elif newcomers:
            places.append((newcomers.pop(0), seat.stream))
    used = {stream for _, stream in places}
    free = (stream for stream in range(len(candidates) + len(used) + 1) if stream not in used)
    places.extend((newcomer, next(free)) for newcomer in newcomers)
    return tuple(
        Seat(
            worker_id=candidate.worker_id,
            node_id=candidate.node_id,
            local_rank=candidate.local_rank,
            rank=rank,
            stream=stream,
        )
        for rank, (candidate, stream) in enumerate(places)
    )
