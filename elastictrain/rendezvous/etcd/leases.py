"""A lease in etcd, timed by this node's own clock."""

from __future__ import annotations

import asyncio
import math
import secrets
from concurrent.futures import Future
from typing import TYPE_CHECKING

from elastictrain.clock import Deadline
from elastictrain.errors import StoreError
from elastictrain.rendezvous.etcd.failures import Action, EtcdError
from elastictrain.rendezvous.store import LeaseLostError

if TYPE_CHECKING:
    from elastictrain.rendezvous.etcd.etcd_store import EtcdStore

_LONGEST_TTL_S = 9_000_000_000  # etcd's own limit
# A renewal that is not answered must be asked of another member well before the lease is over.
_ATTEMPTS_PER_TTL = 5


class EtcdLease:
    """See `Lease` for the promises; made by `EtcdStore.lease`.

    The public methods may be called from any thread and do not block; the others belong to the I/O thread. etcd counts
    whole seconds and has a minimum of its own: `ttl_s` is what was asked for until the answer tells what was granted.
    The number of a lease is drawn here, so that a grant whose answer was lost can be asked for again.
    """

    def __init__(self, store: EtcdStore, ttl_s: float) -> None:
        if not 0 < ttl_s <= _LONGEST_TTL_S:
            raise StoreError(f"a lease of {ttl_s} s: expected more than 0 s and an end", retryable=False)
        self.id = secrets.randbits(62) + 1
        self._store = store
        self._ttl_s = ttl_s
        self._expires_at_s = math.inf
        self._is_given_up = False
        self._is_wanted = False
        self._renewing: asyncio.Task[None] | None = None
        self.is_granted = False
        self.is_over = False

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    @property
    def is_held(self) -> bool:
        """The lease was granted, and nobody has given it up or found it lost."""
        return self.is_granted and not self.is_over and not self._is_given_up

    def keep_alive(self) -> None:
        """Ask for a renewal. A renewal that is not answered is asked for again until it is, or the lease is over."""
        if not self._is_given_up and not self.is_over:
            self._store.post(self._want_renewal)

    def expires_at_s(self) -> float:
        return -math.inf if self._is_given_up or self.is_over else self._expires_at_s

    def revoke(self) -> Future[None]:
        """Give the lease up, behind the writes that were called before. Never to be renewed from now on."""
        self._is_given_up = True
        return self._store.revoke(self)

    # ---------------------------------------------------------------- on the I/O thread

    async def ensure_granted(self, deadline: Deadline) -> None:
        """Grant the lease unless it is. Raises LeaseLostError when it is over, EtcdError when etcd does not answer."""
        self.check()
        if not self.is_granted:
            began_s = self._store.clock.now_s()
            ttl_s = await self.grant(deadline)
            self.is_granted = True
            self._prolong(began_s, ttl_s)

    async def grant(self, deadline: Deadline) -> float:
        """Have etcd make the lease, under its number; gives the granted time to live."""
        client = self._store.client
        request = client.rpc.LeaseGrantRequest(TTL=math.ceil(self._ttl_s), ID=self.id)
        try:
            answer = await client.call("LeaseGrant", request, deadline=deadline)
        except EtcdError as error:
            if error.action is not Action.LEASE_EXISTS:
                raise
            return self._ttl_s  # the answer of an earlier attempt was lost; at least this much was granted
        return float(answer.TTL)

    def check(self) -> None:
        """Raise LeaseLostError when the lease is over."""
        if self.is_over:
            raise LeaseLostError(f"lease {self.id:x} is over: it has expired or was revoked")

    def end(self) -> None:
        """Note that the lease is gone for good, and let the owner know."""
        if not self.is_over:
            self.is_over = True
            if self._renewing is not None:
                self._renewing.cancel()
            self._store.wake_watchers()

    def _want_renewal(self) -> None:
        self._is_wanted = True
        if self._renewing is None and self.is_held:
            self._renewing = self._store.start_task(self._renew())
            self._renewing.add_done_callback(self._forget_task)

    def _forget_task(self, _: asyncio.Task[None]) -> None:
        self._renewing = None

    async def _renew(self) -> None:
        while self._is_wanted and self.is_held:
            self._is_wanted = False
            await self._store.client.retry(self._renew_once)

    async def _renew_once(self) -> None:
        if not self.is_held:
            return
        client, began_s = self._store.client, self._store.clock.now_s()
        timeout_s = min(self._store.settings.attempt_timeout_s, self._ttl_s / _ATTEMPTS_PER_TTL)
        request = client.rpc.LeaseKeepAliveRequest(ID=self.id)
        answer = await client.ask_stream("LeaseKeepAlive", request, timeout_s=timeout_s)
        if answer.TTL > 0:
            self._prolong(began_s, float(answer.TTL))
        elif await self._store.is_lost(self):
            self.end()
        else:
            self._is_wanted = True  # etcd had lost its data, and the lease was put back

    def _prolong(self, sent_s: float, ttl_s: float) -> None:
        """Take in an answer: the server counts from some moment after the request was sent."""
        self._ttl_s = ttl_s
        expires_at_s = sent_s + ttl_s
        if self._expires_at_s == math.inf or expires_at_s > self._expires_at_s:
            self._expires_at_s = expires_at_s
