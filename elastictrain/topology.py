"""The nouns of a run and the one rule that gives ranks. Pure: no clock, no I/O, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastictrain.errors import ConfigError

ROUND_VERSION = 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
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

    @property
    def world_size(self) -> int:
        return len(self.seats)

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Nodes in the order of their lowest rank; the index is the node_rank."""
        return tuple(dict.fromkeys(seat.node_id for seat in self.seats))

    def seat_of(self, worker_id: str) -> Seat | None:
        return next((seat for seat in self.seats if seat.worker_id == worker_id), None)

    def to_json(self) -> dict[str, Any]:
        return {"version": ROUND_VERSION, **asdict(self), "seats": [asdict(seat) for seat in self.seats]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Round:
        """Rebuild a Round. Raises ConfigError on another version or a malformed value."""
        if value.get("version") != ROUND_VERSION:
            raise ConfigError(
                f"round format {value.get('version')!r} is not {ROUND_VERSION}: run the same elastictrain everywhere"
            )
        try:
            seats = tuple(Seat(**seat) for seat in value["seats"])
            return cls(
                generation=int(value["generation"]),
                seats=seats,
                store_host=str(value["store_host"]),
                store_port=int(value["store_port"]),
                reason=str(value.get("reason", "")),
            )
        except (KeyError, TypeError, ValueError) as error:
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
