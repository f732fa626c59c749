"""The rendezvous store that one node serves to all: the client's side, which every node has, the serving one too."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from elastictrain.clock import Clock
from elastictrain.errors import ConfigError, InternalError, StoreError
from elastictrain.rendezvous.secret import Secret
from elastictrain.rendezvous.served.connecting import Connecting
from elastictrain.rendezvous.served.hosting import Hosting
from elastictrain.rendezvous.served.leases import ServedLease
from elastictrain.rendezvous.served.link import Link, LinkError
from elastictrain.rendezvous.served.loop_thread import LoopThread
from elastictrain.rendezvous.served.past import LeaseTerms, View
from elastictrain.rendezvous.served.requests import Requests
from elastictrain.rendezvous.served.settings import ServedSettings
from elastictrain.rendezvous.served.watching import ServedWatch
from elastictrain.rendezvous.served.wire import WireError
from elastictrain.rendezvous.store import Inbox, Lease, LeaseLostError, Value, WatchFailed, copy_value

T = TypeVar("T")
# A connection that lived shorter did not work: the next one has to wait its turn.
_SHORT_LIFE_S: Final = 1.0
_CLOSE_MARGIN_S: Final = 10.0
_MAX_VALUE_BYTES: Final = 1 << 20
_CLOSED = "the store is closed"


def make_session() -> str:
    """A name that no other client has."""
    return secrets.token_hex(8)


class ServedStore:
    """Keeps the promises of `Store` over a connection to the node that serves it. Any thread may call it.

    One thread in all; futures are completed on it: their callbacks must not block. One store is one caller in the sense
    of P5. A write fails, retryably, after `settings.write_timeout_s`; a watch and a renewal go on for ever once the
    store has answered. Before that, what the user must change fails everything with a ConfigError, and a store that
    nobody finds fails everything with a StoreError when the join time-out is over. After a reconnect a watch begins
    with a new Snapshot. Does not survive a fork.
    """

    def __init__(
        self,
        settings: ServedSettings,
        clock: Clock,
        *,
        secret: Secret | None,
        session: str,
        on_trouble: Callable[[str], None],
        hosting: Hosting | None = None,
    ) -> None:
        self.settings, self.clock, self.session = settings, clock, session
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_watches = 0
        self._watches: dict[int, ServedWatch] = {}
        self._leases: dict[str, ServedLease] = {}
        self._link: Link | None = None
        self._fatal: StoreError | ConfigError | None = None
        self._thread = LoopThread("elastictrain-store")

        async def start() -> None:
            self._requests = Requests(clock, timeout_s=settings.read_timeout_s)
            self._connecting = Connecting(
                settings,
                clock,
                secret=secret,
                session=session,
                hosting=hosting,
                on_trouble=on_trouble,
                find_past=self._find_past,
            )
            self._serving = self._thread.loop.create_task(self._serve())

        self._thread.run(start(), _CLOSE_MARGIN_S)

    # ---------------------------------------------------------------- the port

    def create(self, key: str, value: Value, *, lease: Lease | None = None) -> Future[bool]:
        return self._write("create", key, value, lease, take=lambda result, _: bool(result))

    def put(self, key: str, value: Value, *, lease: Lease | None = None) -> Future[None]:
        return self._write("put", key, value, lease, take=lambda *_: None)

    def delete(self, key: str) -> Future[None]:
        return self._submit({"kind": "delete", "key": key}, f"delete of {key}", take=lambda *_: None)

    def lease(self, ttl_s: float) -> ServedLease:
        """Ask for a lease. Raises StoreError for one that never ends: it could not be taken from a dead node."""
        lease = ServedLease(self, ttl_s)
        self.post(lambda: self._add_lease(lease))
        return lease

    def watch(self, prefix: str, inbox: Inbox, *, without: str = "", but: str = "") -> ServedWatch:
        """One server tells all: nothing is left out (P9)."""
        with self._lock:
            self._num_watches += 1
            number = self._num_watches
        watch = ServedWatch(number, prefix, inbox, lambda closed: self.post(lambda: self._forget(closed)))
        self.post(lambda: self._add_watch(watch))
        return watch

    def close(self, timeout_s: float = 2.0) -> None:
        """End everything. Blocks up to `timeout_s` for writes that wait, then fails them, and leaves no thread or
        descriptor behind. Leases that were not revoked run out. Idempotent; not from a callback of a future."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.suppress(TimeoutError):
            self._thread.run(self._stop(timeout_s), timeout_s + _CLOSE_MARGIN_S)
        self._thread.stop()

    # ---------------------------------------------------------------- for the leases

    def post(self, action: Callable[[], object]) -> None:
        """Have the client's thread call `action`; nothing happens once the store is closed. Any thread."""
        with self._lock:
            if not self._is_closed:
                self._thread.post(action)

    def revoke(self, lease: ServedLease) -> Future[None]:
        def end(*_: object) -> None:
            lease.is_over = True

        self.post(lambda: self._leases.pop(lease.id, None))
        return self._submit({"kind": "revoke", "lease": lease.id}, "end of a lease", take=end)

    def ask_renewal(self, lease: ServedLease) -> None:
        self._ensure_granted(lease)
        if self._link is not None:
            lease.send_renewal(self._link, self.settings.read_timeout_s)

    def wake_watchers(self) -> None:
        """Wake every owner of a watch: something changed that no key tells of."""
        for watch in self._watches.values():
            watch.wake()

    # ---------------------------------------------------------------- inside: any thread

    def _write(
        self, kind: str, key: str, value: Value, lease: Lease | None, *, take: Callable[[Any, float], T]
    ) -> Future[T]:
        if lease is not None and not isinstance(lease, ServedLease):
            raise InternalError(f"{key}: a lease of {type(lease).__name__} in a served store")
        try:
            copy = copy_value(key, value)
            if len(str(copy)) > _MAX_VALUE_BYTES:
                raise StoreError(f"{key}: a value of more than {_MAX_VALUE_BYTES} bytes", retryable=False)
        except StoreError as error:
            refused: Future[T] = Future()
            refused.set_exception(error)
            return refused
        message = {"kind": kind, "key": key, "value": copy, "lease": None if lease is None else lease.id}
        return self._submit(message, f"{kind} of {key}", take=take, lease=lease)

    def _submit(
        self,
        message: dict[str, Any],
        what: str,
        *,
        take: Callable[[Any, float], T],
        lease: ServedLease | None = None,
    ) -> Future[T]:
        future: Future[T] = Future()

        def lost() -> StoreError:
            if lease is None:
                return _no_lease()
            lease.end()
            return LeaseLostError(f"{what}: the lease it was to be written under has expired")

        def add() -> None:
            if lease is not None:
                self._ensure_granted(lease)
            self._request(message, what, future, take, lost, self.settings.write_timeout_s)

        with self._lock:
            if self._is_closed:
                future.set_exception(StoreError(_CLOSED, retryable=False))
            else:
                self._thread.post(add)
        return future

    # ---------------------------------------------------------------- inside: the client's thread

    def _request(
        self,
        message: dict[str, Any],
        what: str,
        future: Future[Any],
        take: Callable[[Any, float], Any],
        lost: Callable[[], StoreError],
        limit_s: float | None,
    ) -> None:
        self._requests.add(message, what, future, take=take, lost=lost, limit_s=limit_s)
        if self._fatal is not None:
            self._requests.fail_all(self._fatal)
        elif self._link is not None:
            self._requests.send(self._link)

    def _add_lease(self, lease: ServedLease) -> None:
        self._leases[lease.id] = lease
        self._ensure_granted(lease)

    def _ensure_granted(self, lease: ServedLease) -> None:
        """Ask for the grant, once: it has no limit, since a lease cannot be asked for by another name."""
        if lease.is_asked or lease.is_over:
            return
        lease.is_asked = True
        message = {"kind": "grant", "lease": lease.id, "ttl_s": lease.ttl_s}
        self._request(message, "grant of a lease", Future(), lambda _, sent_s: lease.granted(sent_s), _no_lease, None)

    def _add_watch(self, watch: ServedWatch) -> None:
        self._watches[watch.number] = watch
        if self._fatal is not None:
            watch.deliver(WatchFailed(error=self._fatal))
        elif self._link is not None:
            self._send_watch(self._link, watch)

    def _send_watch(self, link: Link, watch: ServedWatch) -> None:
        link.write({"op": "watch", "watch": watch.number, "prefix": watch.prefix})
        link.expect(self.settings.read_timeout_s)

    def _forget(self, watch: ServedWatch) -> None:
        if self._watches.pop(watch.number, None) is not None and self._link is not None:
            self._link.write({"op": "unwatch", "watch": watch.number})

    def _find_past(self) -> tuple[list[View], list[LeaseTerms]]:
        """What this node knows of the store, for one that has lost it."""
        views = [view for watch in self._watches.values() if (view := watch.view) is not None]
        return views, [lease.terms for lease in self._leases.values() if lease.is_held]

    async def _serve(self) -> None:
        """Be connected, for ever. A final failure is told to all."""
        try:
            while True:
                await self._connecting.retry(self._be_connected)
        except (StoreError, ConfigError) as error:
            self._fatal = error
            for watch in self._watches.values():
                watch.deliver(WatchFailed(error=error))
            self._requests.fail_all(error)

    async def _be_connected(self) -> None:
        """Connect, and follow until the connection breaks. Raises StoreError when it did not work."""
        link = await self._connecting.connect()
        began_s = self.clock.now_s()
        try:
            self._link = link
            self._requests.connection_made()
            for watch in self._watches.values():
                self._send_watch(link, watch)
            self._requests.send(link)
            while True:
                for lease in list(self._leases.values()):
                    lease.send_renewal(link, self.settings.read_timeout_s)
                message = await link.read()
                link.heard()
                self._take(link, message)
        except (LinkError, WireError) as error:
            if self.clock.now_s() - began_s < _SHORT_LIFE_S:
                raise self._connecting.failed(error) from None
        finally:
            self._link = None
            for lease in self._leases.values():
                lease.connection_lost()
            link.close()

    def _take(self, link: Link, message: dict[str, Any]) -> None:
        try:
            match message["op"]:
                case "told":
                    watch = self._watches.get(int(message["watch"]))
                    if watch is not None:
                        watch.take(message)
                case "done":
                    self._requests.take_answer(message)
                case "renewed":
                    lease = self._leases.get(str(message["lease"]))
                    if lease is not None:
                        lease.renewed(is_held=message["is_held"] is True)
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"a message that is none: {error!r}") from None
        self._leases = {name: lease for name, lease in self._leases.items() if not lease.is_over}
        self._requests.send(link)

    async def _stop(self, timeout_s: float) -> None:
        self._connecting.is_ending = True
        for watch in list(self._watches.values()):
            self._forget(watch)
        if self._fatal is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._requests.wait_empty()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._requests.fail_all(StoreError("the store was closed before the write was done", retryable=False))


def _no_lease() -> StoreError:
    return StoreError("the store speaks of a lease where there is none", retryable=False)
