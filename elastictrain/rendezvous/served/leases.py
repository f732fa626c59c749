"""A lease in the served store, timed by this node's own clock."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from elastictrain.clock import Clock
from elastictrain.errors import StoreError
from elastictrain.rendezvous.served.link import Link
from elastictrain.rendezvous.served.past import LeaseTerms

# A renewal that is not answered must go over another connection well before the lease is over.
_ATTEMPTS_PER_TTL = 4


class Owner(Protocol):
    """What a lease needs of its store."""

    clock: Clock
    session: str

    def post(self, action: Callable[[], object]) -> None: ...

    def revoke(self, lease: ServedLease) -> Future[None]: ...

    def ask_renewal(self, lease: ServedLease) -> None: ...

    def wake_watchers(self) -> None: ...


class ServedLease:
    """See `Lease` for the promises; made by `ServedStore.lease`.

    The public methods may be called from any thread and do not block; the others belong to the client's thread.
    """

    def __init__(self, store: Owner, ttl_s: float) -> None:
        if not 0 < ttl_s < math.inf:
            raise StoreError(f"a lease of {ttl_s} s: expected more than 0 s and an end", retryable=False)
        self.id = secrets.token_hex(8)
        self._store = store
        self._ttl_s = ttl_s
        self._expires_at_s = math.inf
        self._is_given_up = False
        self._sent_s: float | None = None
        self._is_wanted = False
        self.is_asked = False
        """A grant is on its way, or has been answered."""
        self.is_granted = False
        self.is_over = False

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    @property
    def is_held(self) -> bool:
        """The lease was granted, and nobody has given it up or found it lost."""
        return self.is_granted and not self.is_over and not self._is_given_up

    @property
    def terms(self) -> LeaseTerms:
        return LeaseTerms(self.id, self._ttl_s, self._store.session)

    def keep_alive(self) -> None:
        """Ask for a renewal. One that is not answered is asked for again until it is, or the lease is over."""
        if not self._is_given_up and not self.is_over:
            self._store.post(self._want)

    def expires_at_s(self) -> float:
        return -math.inf if self._is_given_up or self.is_over else self._expires_at_s

    def revoke(self) -> Future[None]:
        """Give the lease up, behind the writes that were called before. Never to be renewed from now on."""
        self._is_given_up = True
        return self._store.revoke(self)

    # ---------------------------------------------------------------- on the client's thread

    def granted(self, sent_s: float) -> None:
        """Take in the answer to the grant, which was first sent at `sent_s`."""
        self.is_granted = True
        self._prolong(sent_s)
        if self._is_wanted:
            self._want()

    def end(self) -> None:
        """Note that the lease is gone for good, and let the owner know."""
        if not self.is_over:
            self.is_over = True
            self._store.wake_watchers()

    def send_renewal(self, link: Link, timeout_s: float) -> None:
        """Ask over this connection, if a renewal is wanted and none is under way; an answer has to come soon."""
        if self._is_wanted and self._sent_s is None and self.is_held:
            self._is_wanted = False
            self._sent_s = self._store.clock.now_s()
            link.write({"op": "renew", "lease": self.id})
        if self._sent_s is not None:
            link.expect(min(timeout_s, self._ttl_s / _ATTEMPTS_PER_TTL))

    def connection_lost(self) -> None:
        """An answer that was expected will not come: ask again over the next connection."""
        self._is_wanted = self._is_wanted or self._sent_s is not None
        self._sent_s = None

    def renewed(self, *, is_held: bool) -> None:
        """Take in an answer. The server counts from some moment after the request was sent."""
        sent_s, self._sent_s = self._sent_s, None
        if not is_held:
            self.end()
        elif sent_s is not None:
            self._prolong(sent_s)
            if self._is_wanted:
                self._store.ask_renewal(self)

    def _want(self) -> None:
        self._is_wanted = True
        self._store.ask_renewal(self)

    def _prolong(self, sent_s: float) -> None:
        expires_at_s = sent_s + self._ttl_s
        if self._expires_at_s == math.inf or expires_at_s > self._expires_at_s:
            self._expires_at_s = expires_at_s
