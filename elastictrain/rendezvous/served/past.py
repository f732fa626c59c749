"""What survivors remember of a store that is lost, and which of their memories the new one takes up. Pure.

Every watch knows all keys under its prefix as they were at some revision, and the revisions of one store have one
order: of two watches the one that is further knows all that the other knows. So the new store takes, for each prefix,
the furthest view, whole. It forgets the leases of the node that served the lost store: that process is dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastictrain.rendezvous.served.wire import WireError
from elastictrain.rendezvous.store import KeyEvent

_LONGEST_LINEAGE = 64


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """A lease as it is told to others. `owner` is the session of the client that holds it."""

    id: str
    ttl_s: float
    owner: str

    def to_json(self) -> list[Any]:
        return [self.id, self.ttl_s, self.owner]

    @classmethod
    def from_json(cls, found: Any) -> LeaseTerms:
        """Raises TypeError or ValueError."""
        lease_id, ttl_s, owner = found
        if not 0 < float(ttl_s) < float("inf"):
            raise ValueError(f"a lease of {ttl_s} s")
        return cls(str(lease_id), float(ttl_s), str(owner))


@dataclass(frozen=True, slots=True)
class Envelope:
    """How a value lies in the served store: who wrote it (`<session>/<number of the write>`), and its lease."""

    by: str
    lease: LeaseTerms | None
    value: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"by": self.by, "lease": None if self.lease is None else self.lease.to_json(), "value": self.value}

    @classmethod
    def from_json(cls, found: Any) -> Envelope:
        """Raises WireError."""
        try:
            lease = None if found["lease"] is None else LeaseTerms.from_json(found["lease"])
            if not isinstance(found["value"], dict):
                raise TypeError("no object")
            return cls(str(found["by"]), lease, found["value"])
        except (KeyError, TypeError, ValueError):
            raise WireError("a value without its envelope") from None


def event_to_json(event: KeyEvent) -> list[Any]:
    return [event.key, event.value, event.revision, event.created_revision]


def event_from_json(found: Any) -> KeyEvent:
    """Raises WireError."""
    try:
        key, value, revision, created = found
        if value is not None:
            Envelope.from_json(value)
        return KeyEvent(key=str(key), value=value, revision=int(revision), created_revision=int(created))
    except (TypeError, ValueError):
        raise WireError("a change that is none") from None


@dataclass(frozen=True, slots=True)
class View:
    """All keys under `prefix` as one watch knew them at `revision`; values are envelopes."""

    prefix: str
    revision: int
    entries: tuple[KeyEvent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one client remembers. `store` is the lost one, `lineage` those before it, `host` its server's session."""

    session: str
    store: str
    lineage: tuple[str, ...]
    host: str
    views: tuple[View, ...]
    leases: tuple[LeaseTerms, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "op": "past",
            "store": self.store,
            "lineage": list(self.lineage),
            "host": self.host,
            "views": [[one.prefix, one.revision, [event_to_json(each) for each in one.entries]] for one in self.views],
            "leases": [lease.to_json() for lease in self.leases],
        }

    @classmethod
    def from_json(cls, session: str, message: Mapping[str, Any]) -> Offer:
        """Raises WireError."""
        try:
            return cls(
                session=session,
                store=str(message["store"]),
                lineage=tuple(map(str, message["lineage"])),
                host=str(message["host"]),
                views=tuple(
                    View(str(prefix), int(revision), tuple(event_from_json(one) for one in entries))
                    for prefix, revision, entries in message["views"]
                ),
                leases=tuple(LeaseTerms.from_json(one) for one in message["leases"]),
            )
        except (KeyError, TypeError, ValueError):
            raise WireError("a past that is none") from None

    @property
    def terms(self) -> set[LeaseTerms]:
        """Every lease that the client holds or has seen behind a key."""
        seen = (Envelope.from_json(event.value).lease for view in self.views for event in view.entries)
        return set(self.leases) | {lease for lease in seen if lease is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What a new store takes up."""

    views: tuple[View, ...]
    revision: int
    lineage: tuple[str, ...]
    hosts: frozenset[str]
    leases: frozenset[LeaseTerms]
    strangers: frozenset[str]
    """Sessions whose memory is of another store: their run is not the one that goes on."""


def is_complete(offers: Iterable[Offer], present: Iterable[str]) -> bool:
    """Tell whether all are there that, by the word of those who are, held a lease and can be alive.

    Where they know of no such lease, there is no telling.
    """
    listed = list(offers)
    hosts = {offer.host for offer in listed}
    alive = {lease.owner for offer in listed for lease in offer.terms} - hosts
    return bool(alive) and alive <= set(present)


def choose(offers: Iterable[Offer]) -> Past:
    """Take the furthest view of each prefix. At least one offer."""
    listed = list(offers)
    best: dict[str, tuple[View, Offer]] = {}
    for offer in listed:
        for view in offer.views:
            known = best.get(view.prefix)
            if known is None or view.revision > known[0].revision:
                best[view.prefix] = (view, offer)
    lineage: dict[str, None] = {}
    for offer in [one for _, one in best.values()] or listed:
        lineage.update(dict.fromkeys((*offer.lineage, offer.store)))
    strangers = {offer.session for offer in listed if offer.store not in lineage}
    kin = [offer for offer in listed if offer.session not in strangers]
    views = tuple(view for view, _ in best.values())
    seen = (Envelope.from_json(event.value).lease for view in views for event in view.entries)
    return Past(
        views=views,
        revision=max((view.revision for offer in kin for view in offer.views), default=0),
        lineage=tuple(lineage)[-_LONGEST_LINEAGE:],
        hosts=frozenset(offer.host for offer in kin),
        leases=frozenset(lease for lease in seen if lease is not None) | {one for offer in kin for one in offer.leases},
        strangers=frozenset(strangers),
    )
