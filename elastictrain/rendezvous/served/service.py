"""What the server of the served store does for its clients: an EmbeddedStore, their sessions, and a memory put back.

The store is empty when it begins. If it was there before, those who were connected to it are alive and train; what they
know is the run. So nothing is done for anybody until they have had the time to come back (`gather_s`; `patience_s`
where some may train that cannot reach it yet), or all have that held a lease: then the furthest memory of each prefix
is put in, with its numbers and leases, and the clients find everything as it was. Only the leases of the node that
served the lost store end at once: its process is dead. A fresh start pays `gather_s` once, while workers are being
started.

Belongs to one thread, the loop's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastictrain.clock import Clock
from elastictrain.rendezvous.embedded import EmbeddedLease, EmbeddedStore
from elastictrain.rendezvous.served.past import Envelope, LeaseTerms, Offer, Past, View, choose, is_complete
from elastictrain.rendezvous.served.sessions import Feed, Line, Session
from elastictrain.rendezvous.served.wire import Message, WireError
from elastictrain.rendezvous.store import KeyEvent, LeaseLostError

# Far more than the changes that a survivor may have seen and the furthest one that came back has not.
_REVISION_STEP = 1 << 20
# How long the keys of the dead host stay after they were put back: what hangs on its lease and on all is then written
# by the survivors, and a newcomer has compared itself with it.
_HOST_LEASE_S = 1.0
# A client that comes back finds its session, so that no write is done twice.
_SESSION_KEEP_S = 600.0
_MAX_GONE_SESSIONS = 4096
# Later than this after a lease's end, the server itself was held up, and nobody could renew.
_STALL_S = 1.0
_STALL_GRACE_S = 2.0


@dataclass(slots=True)
class _Held:
    terms: LeaseTerms
    lease: EmbeddedLease


class Service:
    """The store and those who use it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        *,
        host: str,
        gather_s: float,
        patience_s: float,
        report: Callable[[str], None],
    ) -> None:
        self.id = secrets.token_hex(8)
        self.last_write_s = clock.now_s()
        self._host = host
        self._lineage: tuple[str, ...] = (self.id,)
        self._loop, self._clock, self._report = loop, clock, report
        self._store = EmbeddedStore(clock)
        self._sessions: dict[str, Session] = {}
        self._leases: dict[str, _Held] = {}
        self._put_back: dict[str, int] = {}
        self._waiting: dict[str, tuple[Line, Offer | None]] = {}
        self._gather_s = gather_s
        longest_s = max(gather_s, patience_s)
        self._gathering = loop.call_later(longest_s, self._end_gathering) if longest_s > 0 else None
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def num_others(self) -> int:
        """Clients that are connected, but for the host's own."""
        lines = {name for name, session in self._sessions.items() if session.line is not None} | self._waiting.keys()
        return len(lines - {self._host})

    # ---------------------------------------------------------------- coming and going

    def open(self, line: Line, known: object) -> None:
        """A client has proven itself and is `line.session`; `known` is the store that it was connected to before."""
        within_s = 0.0 if self._gathering is None else max(0.0, self._gathering.when() - self._loop.time())
        wants_past = known is not None and known != self.id
        line.send({"op": "store", "store": self.id, "wants_past": wants_past, "within_s": within_s})
        if known is None or known == self.id:
            self.admit(line, None)

    def admit(self, line: Line, offer: Offer | None) -> None:
        """A client has said all there is. It is served at once, or when the memories are gathered."""
        if self._gathering is not None:
            self._waiting[line.session] = (line, offer)
            if offer is not None:
                self.hurry()
            offers = [one for _, one in self._waiting.values() if one is not None]
            if is_complete(offers, self._waiting):
                self._end_gathering()
        elif offer is None or self._take_late(offer):
            self._begin(line)
        else:
            self._refuse(line)

    def hurry(self) -> None:
        """Who may come back does so within `gather_s` from now: one of them has, or it is known that nobody trains."""
        due_s = self._loop.time() + self._gather_s
        if self._gathering is not None and self._gathering.when() > due_s:
            self._gathering.cancel()
            self._gathering = self._loop.call_at(due_s, self._end_gathering)

    def leave(self, line: Line) -> None:
        """A connection is gone; the session and its leases live on."""
        waiting = self._waiting.get(line.session)
        if waiting is not None and waiting[0] is line:
            del self._waiting[line.session]
        session = self._sessions.get(line.session)
        if session is not None and session.line is line:
            session.line = None
            session.end_watches()
            session.gone_since_s = self._clock.now_s()

    def close(self) -> None:
        for timer in (self._gathering, self._expiry):
            if timer is not None:
                timer.cancel()

    def _begin(self, line: Line) -> None:
        self._forget_sessions()
        session = self._sessions.setdefault(line.session, Session(line.session, self._flush_soon))
        if session.line is not None:
            session.end_watches()
            session.line.drop("its client has a newer connection")
        session.line = line
        line.send({"op": "ready", "lineage": list(self._lineage), "host": self._host})

    def _forget_sessions(self) -> None:
        gone = sorted((one for one in self._sessions.values() if one.line is None), key=lambda one: one.gone_since_s)
        now_s = self._clock.now_s()
        for number, one in enumerate(gone):
            if one.gone_since_s + _SESSION_KEEP_S < now_s or number < len(gone) - _MAX_GONE_SESSIONS:
                del self._sessions[one.name]

    def _refuse(self, line: Line) -> None:
        line.send({"op": "refused", "reason": "past"})
        line.drop("its run is not the one that goes on here")

    def _flush_soon(self, session: Session) -> None:
        self._loop.call_soon(session.flush)

    # ---------------------------------------------------------------- requests

    def take(self, line: Line, message: dict[str, Any]) -> None:
        """Do what a client asks for. Raises WireError for what nobody asks."""
        session = self._sessions.get(line.session)
        if session is None or session.line is not line:
            return
        self._excuse_stall()
        try:
            match message["op"]:
                case "write":
                    self._take_write(session, line, message)
                case "renew":
                    name = str(message["lease"])
                    line.send({"op": "renewed", "lease": name, "is_held": self._renew(name)})
                case "watch":
                    number = int(message["watch"])
                    session.end_watch(number)
                    session.add_watch(number, self._store.watch(str(message["prefix"]), Feed(number, session)))
                case "unwatch":
                    session.end_watch(int(message["watch"]))
                case other:
                    raise WireError(f"a request for {other!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"a malformed request: {error!r}") from None
        self._arm_expiry()

    def _take_write(self, session: Session, line: Line, message: dict[str, Any]) -> None:
        number = int(message["number"])
        is_known, answer = session.find_answer(number, int(message["acknowledged"]))
        if not is_known:
            self.last_write_s = self._clock.now_s()
            answer = {"op": "done", "number": number, **self._write(f"{session.name}/{number}", session, message)}
            session.keep_answer(number, answer)
        session.flush()  # an answer never comes before the change that it is about
        if answer is not None:
            line.send(answer)

    def _write(self, mark: str, session: Session, message: dict[str, Any]) -> Message:
        kind = message["kind"]
        if kind == "grant":
            self._grant(LeaseTerms(str(message["lease"]), float(message["ttl_s"]), session.name))
        elif kind == "revoke":
            held = self._leases.pop(str(message["lease"]), None)
            if held is not None:
                held.lease.revoke()
        elif kind == "delete":
            self._store.delete(str(message["key"]))
        elif kind in ("create", "put"):
            return self._write_key(kind, mark, message)
        else:
            raise WireError(f"a write of kind {kind!r}")
        return {"result": None}

    def _write_key(self, kind: str, mark: str, message: dict[str, Any]) -> Message:
        key, held = str(message["key"]), None
        if message["lease"] is not None:
            held = self._leases.get(str(message["lease"]))
            if held is None:
                return {"error": "lease"}
        known = self._store.get(key)
        if known is not None and known.value is not None and known.value["by"] == mark:
            return {"result": True}  # done in the store of before; its answer was lost with it
        value = message["value"]
        envelope = Envelope(mark, None if held is None else held.terms, value).to_json()
        lease = None if held is None else held.lease
        if not isinstance(value, dict):
            raise WireError("a value that is no object")
        written = (self._store.create if kind == "create" else self._store.put)(key, envelope, lease=lease)
        error = written.exception()
        if isinstance(error, LeaseLostError):
            return {"error": "lease"}
        if error is not None:
            return {"error": str(error)}
        return {"result": written.result()}

    # ---------------------------------------------------------------- leases

    def _grant(self, terms: LeaseTerms, *, ttl_s: float | None = None) -> EmbeddedLease:
        held = self._leases.get(terms.id)
        if held is None:
            held = self._leases[terms.id] = _Held(terms, self._store.lease(terms.ttl_s))
            if ttl_s is not None:
                held.lease.deadline_s = min(held.lease.deadline_s, self._clock.now_s() + ttl_s)
        return held.lease

    def _renew(self, lease_id: str) -> bool:
        held = self._leases.get(lease_id)
        if held is None:
            return False
        held.lease.keep_alive()
        return held.lease.expires_at_s() > self._clock.now_s()

    def _excuse_stall(self) -> None:
        """After the server itself stood still, let clients renew before their leases end."""
        now_s, due_s = self._clock.now_s(), self._store.next_expiry_s()
        if due_s is not None and now_s > due_s + _STALL_S:
            self._report(f"the store was held up for {now_s - due_s:.1f} s or more: leases run so much longer")
            self._store.postpone_expiry(now_s - due_s + _STALL_GRACE_S)

    def _arm_expiry(self) -> None:
        due_s = self._store.next_expiry_s()
        if self._expiry is None and due_s is not None:
            self._expiry = self._loop.call_later(max(0.0, due_s - self._clock.now_s()), self._expire)

    def _expire(self) -> None:
        self._expiry = None
        self._excuse_stall()
        self._store.expire_leases()
        now_s = self._clock.now_s()
        for lease_id in [one for one, held in self._leases.items() if held.lease.expires_at_s() <= now_s]:
            del self._leases[lease_id]
        self._arm_expiry()

    # ---------------------------------------------------------------- memories

    def _end_gathering(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        waiting, self._waiting = self._waiting, {}
        offers = [offer for _, offer in waiting.values() if offer is not None]
        strangers: frozenset[str] = frozenset()
        if offers:
            past = choose(offers)
            strangers = past.strangers
            self._put_in(past, past.views)
        for line, _ in waiting.values():
            self._refuse(line) if line.session in strangers else self._begin(line)

    def _take_late(self, offer: Offer) -> bool:
        """Somebody remembers the store of before, but the others have not waited: may it go on with them?"""
        is_kin = offer.store in self._lineage
        news: list[View] = []
        missing: list[KeyEvent] = []
        for view in offer.views:
            lasting = [entry for entry in self._store.snapshot(view.prefix).entries if _is_lasting(entry)]
            if view.prefix not in self._put_back:
                if lasting:
                    return False  # others have begun a run of their own
                news.append(view)
            elif not is_kin:
                return False
            else:
                taken = self._missing(view)
                if taken is None:
                    return False
                missing += taken
        if news:
            self._put_in(choose([offer]), tuple(news))
        for entry in missing:
            self._store.create(entry.key, entry.value or {})
        return True

    def _missing(self, view: View) -> list[KeyEvent] | None:
        """Lasting keys of a view that were never put back since nobody else had seen them; None if one contradicts."""
        found = []
        for entry in view.entries:
            if entry.revision > self._put_back[view.prefix] and _is_lasting(entry):
                present = self._store.get(entry.key)
                if present is None:
                    found.append(entry)
                elif Envelope.from_json(present.value).value != Envelope.from_json(entry.value).value:
                    return None
        return found

    def _put_in(self, past: Past, views: tuple[View, ...]) -> None:
        num_keys = sum(len(view.entries) for view in views)
        self._report(f"the store begins anew: {num_keys} keys are put back as its clients know them")
        terms = {lease.id: lease for lease in past.leases}
        leases = {
            lease.id: self._grant(lease, ttl_s=_HOST_LEASE_S if lease.owner in past.hosts else None)
            for lease in terms.values()
        }
        self._lineage = (*(one for one in past.lineage if one != self.id), self.id)
        entries: list[tuple[KeyEvent, EmbeddedLease | None]] = []
        for view in views:
            self._put_back[view.prefix] = view.revision
            for entry in view.entries:
                lease = Envelope.from_json(entry.value).lease
                entries.append((entry, None if lease is None else leases[lease.id]))
        self._store.load(past.revision + _REVISION_STEP, entries)
        self._arm_expiry()


def _is_lasting(entry: KeyEvent) -> bool:
    """A key without a lease: a decision of the run."""
    return Envelope.from_json(entry.value).lease is None
