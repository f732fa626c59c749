"""The rendezvous store on etcd v3. Importing this imports gRPC: use `opening.open_etcd_store`."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from elastictrain.clock import Clock, Deadline
from elastictrain.errors import InternalError, StoreError
from elastictrain.rendezvous.etcd import io_thread
from elastictrain.rendezvous.etcd.client import Client
from elastictrain.rendezvous.etcd.failures import Action, EtcdError
from elastictrain.rendezvous.etcd.leases import EtcdLease
from elastictrain.rendezvous.etcd.probe import find_loopback_only
from elastictrain.rendezvous.etcd.settings import ENDPOINT_OPTION, EtcdSettings
from elastictrain.rendezvous.etcd.watching import EtcdWatch
from elastictrain.rendezvous.etcd.writing import Writer
from elastictrain.rendezvous.store import Inbox, Lease, Value, copy_value

T = TypeVar("T")
_CLOSE_MARGIN_S = 10.0


class EtcdStore:
    """Keeps the promises of `Store` on an etcd cluster. Any thread may call it.

    Two threads in all, shared by every store of the process. Futures are completed on one of them: their callbacks must
    not block. One store is one caller in the sense of P5.

    How long things last: a write fails, retryably, after `settings.write_timeout_s`; a watch and a renewal go on for
    ever once etcd has answered. Before that, what the user must change fails everything with a ConfigError, and an etcd
    that nobody finds fails everything with a StoreError when the join time-out is over.
    """

    def __init__(self, rpc: Any, settings: EtcdSettings, clock: Clock, on_trouble: Callable[[str], None]) -> None:
        self.settings = settings
        self.clock = clock
        self.report = on_trouble
        self._lock = threading.Lock()
        self._is_closed = False
        self._posted: list[Callable[[], object]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._watches: dict[EtcdWatch, asyncio.Task[None]] = {}
        self._leases: set[EtcdLease] = set()
        self._loop = io_thread.acquire()
        self.client = Client(rpc, settings, clock, on_trouble)
        self.writer = Writer(self, secrets.token_hex(6))
        self.post(self._start)

    def _start(self) -> None:
        self.start_task(self.writer.serve())
        if self.settings.is_multi_node:
            self.start_task(self._warn_of_loopback())

    # ---------------------------------------------------------------- the port

    def create(self, key: str, value: Value, *, lease: Lease | None = None) -> Future[bool]:
        return self._write("create", key, value, lease, lambda copy, held, by: self.writer.create(key, copy, held, by))

    def put(self, key: str, value: Value, *, lease: Lease | None = None) -> Future[None]:
        return self._write("put", key, value, lease, lambda copy, held, by: self.writer.put(key, copy, held, by))

    def delete(self, key: str) -> Future[None]:
        return self._submit(f"delete of {key}", lambda by: self.writer.delete(key, by))

    def lease(self, ttl_s: float) -> EtcdLease:
        """Ask for a lease. Raises StoreError for one that never ends: etcd has none."""
        lease = EtcdLease(self, ttl_s)
        self.post(lambda: self._leases.add(lease))
        self._submit("grant of a lease", lease.ensure_granted)
        return lease

    def watch(self, prefix: str, inbox: Inbox, *, without: str = "", but: str = "") -> EtcdWatch:
        watch = EtcdWatch(self, prefix, inbox, without=without, but=but)
        self.post(lambda: self._add_watch(watch))
        return watch

    def close(self, timeout_s: float = 2.0) -> None:
        """End everything. Blocks up to `timeout_s` for writes that wait, then fails them, and leaves no thread or
        descriptor behind. Leases that were not revoked run out. Idempotent; not from a callback of a future."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            ended = asyncio.run_coroutine_threadsafe(self._stop(timeout_s), self._loop)
            ended.result(timeout_s + _CLOSE_MARGIN_S)
        finally:
            io_thread.release()

    # ---------------------------------------------------------------- for the parts of the store

    def post(self, action: Callable[[], object]) -> None:
        """Have the I/O thread call `action`; nothing happens once the store is closed. Any thread."""
        with self._lock:
            if not self._is_closed:
                self._post(action)

    def revoke(self, lease: EtcdLease) -> Future[None]:
        return self._submit("end of a lease", lambda by: self.writer.revoke(lease, by))

    def start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run `work` on the I/O thread until it ends or the store is closed. I/O thread only, as all that follows."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return task

    def forget(self, watch: EtcdWatch) -> None:
        task = self._watches.pop(watch, None)
        if task is not None:
            task.cancel()
            watch.stop()

    def wake_watchers(self) -> None:
        """Wake every owner of a watch: something changed that no key tells of."""
        for watch in self._watches:
            watch.wake()

    def held_leases(self) -> list[EtcdLease]:
        self._leases = {lease for lease in self._leases if not lease.is_over}
        return [lease for lease in self._leases if lease.is_held]

    async def is_alive(self, lease: EtcdLease) -> bool:
        """Ask etcd for the lease, once. Raises EtcdError."""
        request = self.client.rpc.LeaseTimeToLiveRequest(ID=lease.id)
        try:
            answer = await self.client.call_once("LeaseTimeToLive", request, timeout_s=self.settings.attempt_timeout_s)
        except EtcdError as error:
            if error.action is Action.LEASE_LOST:
                return False
            raise
        return bool(answer.TTL > 0)

    async def is_lost(self, lease: EtcdLease) -> bool:
        """Tell whether a lease that etcd does not know is lost; it is not where etcd had lost all its data, and this
        node has put it back."""
        await self.verify()
        return not await self.client.retry(lambda: self.is_alive(lease))

    async def verify(self) -> None:
        """Find out whether etcd has lost its data; return when what it has lost has been put back."""
        for watch in list(self._watches):
            await watch.verify()

    async def put_back_lease(self, lease_id: int, ttl_s: float) -> None:
        request = self.client.rpc.LeaseGrantRequest(TTL=int(ttl_s), ID=lease_id)
        try:
            await self.client.call("LeaseGrant", request)
        except EtcdError as error:
            if error.action is not Action.LEASE_EXISTS:
                raise

    # ---------------------------------------------------------------- inside

    def _post(self, action: Callable[[], object]) -> None:
        """With the lock held. The I/O thread is woken once for all that is posted until it comes to it."""
        self._posted.append(action)
        if len(self._posted) == 1:
            self._loop.call_soon_threadsafe(self._do_posted)

    def _do_posted(self) -> None:
        with self._lock:
            actions, self._posted = self._posted, []
        for action in actions:
            action()

    def _write(
        self,
        what: str,
        key: str,
        value: Value,
        lease: Lease | None,
        run: Callable[[Value, EtcdLease | None, Deadline], Awaitable[T]],
    ) -> Future[T]:
        if lease is not None and not isinstance(lease, EtcdLease):
            raise InternalError(f"{key}: a lease of {type(lease).__name__} in a store on etcd")
        try:
            copy = copy_value(key, value)
        except StoreError as error:
            refused: Future[T] = Future()
            refused.set_exception(error)
            return refused
        return self._submit(f"{what} of {key}", lambda by: run(copy, lease, by))

    def _submit(self, what: str, run: Callable[[Deadline], Awaitable[T]]) -> Future[T]:
        future: Future[T] = Future()
        limit_s = self.settings.write_timeout_s
        deadline = Deadline.after(f"limit of {limit_s:g} s for the {what}", limit_s, self.clock)
        with self._lock:
            if self._is_closed:
                future.set_exception(StoreError("the etcd store is closed", retryable=False))
            else:
                self._post(lambda: self.writer.submit(future, deadline, run))
        return future

    def _add_watch(self, watch: EtcdWatch) -> None:
        self._watches[watch] = self.start_task(watch.serve())

    def _end_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, StoreError):
            self.report(f"a task of the etcd store failed: {error!r}")

    async def _stop(self, timeout_s: float) -> None:
        for watch in list(self._watches):
            self.forget(watch)
        try:
            async with asyncio.timeout(timeout_s):
                await self.writer.wait_empty()
        except TimeoutError:
            pass
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.writer.fail_all(StoreError("the etcd store was closed before the write was done", retryable=False))
        await self.client.close()

    async def _warn_of_loopback(self) -> None:
        for endpoint in self.settings.endpoints:
            if await find_loopback_only(endpoint):
                self.report(
                    f"{ENDPOINT_OPTION} {endpoint.address} means each machine itself: other nodes cannot reach this "
                    "etcd by it; give an address that all nodes can reach"
                )
