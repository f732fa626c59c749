"""The writes of one node to etcd: one after the other, each taking effect once however often it had to be sent.

A request whose answer was lost may have taken effect, may yet take effect (a member that hung and wakes up carries out
what lies in its queue), or may not. Therefore every write is a compare-and-set on the revision of its key: of all its
copies only one can succeed, and a late one finds the revision changed. The mark in the envelope tells a writer, which
finds the revision changed, whether it was its own write that changed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elastictrain.clock import Deadline
from elastictrain.errors import ConfigError, StoreError
from elastictrain.rendezvous.etcd.envelope import Envelope, Was, decode
from elastictrain.rendezvous.etcd.failures import Action, EtcdError
from elastictrain.rendezvous.store import LeaseLostError, Value

if TYPE_CHECKING:
    from elastictrain.rendezvous.etcd.etcd_store import EtcdStore
    from elastictrain.rendezvous.etcd.leases import EtcdLease


@dataclass(frozen=True, slots=True)
class OwnWrite:
    """What this node wrote last to a key; `revision` is etcd's own count, 0 for a key that is not there."""

    revision: int
    envelope: Envelope | None = None
    lease: EtcdLease | None = None

    @property
    def was(self) -> Was | None:
        """What a write over it has to hand on."""
        was = self.envelope.was if self.envelope is not None else None
        return None if was is None else Was(created=was.created, revision=None, base=was.base)


_NOT_THERE = OwnWrite(0)


@dataclass(frozen=True, slots=True)
class _Job:
    """A write that waits for its turn."""

    future: Future[Any]
    deadline: Deadline
    run: Callable[[Deadline], Awaitable[Any]]


class Writer:
    """The queue of writes. `submit` is called on the I/O thread."""

    def __init__(self, store: EtcdStore, name: str) -> None:
        self.own: dict[str, OwnWrite] = {}
        self._store = store
        self._client = store.client
        self._rpc = store.client.rpc
        self._name = name
        self._num_marks = 0
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()

    def submit(self, future: Future[Any], deadline: Deadline, run: Callable[[Deadline], Awaitable[Any]]) -> None:
        """Queue a write behind those before it; `future` gets its result or error."""
        self._jobs.put_nowait(_Job(future, deadline, run))

    async def serve(self) -> None:
        """Carry out the queue, for ever."""
        while True:
            job = await self._jobs.get()
            try:
                await self._carry_out(job)
            finally:
                self._jobs.task_done()

    async def wait_empty(self) -> None:
        """Wait until all that was submitted is done."""
        await self._jobs.join()

    def fail_all(self, error: StoreError) -> None:
        """Fail what waits."""
        while not self._jobs.empty():
            _fail(self._jobs.get_nowait().future, error)
            self._jobs.task_done()

    async def _carry_out(self, job: _Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        try:
            job.future.set_result(await job.run(job.deadline))
        except asyncio.CancelledError:
            _fail(job.future, StoreError("the etcd store was closed before the write was done", retryable=False))
            raise
        except (StoreError, ConfigError) as error:
            _fail(job.future, error)
        except Exception as error:  # a bug of ours: its caller must see it, and the queue must go on
            _fail(job.future, error)

    # ---------------------------------------------------------------- the writes

    async def create(self, key: str, value: Value, lease: EtcdLease | None, deadline: Deadline) -> bool:
        rpc, mark = self._rpc, self._mark()
        envelope = Envelope(by=mark, value=value)
        is_absent = rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=key.encode(), create_revision=0
        )
        answer = await self._transact(is_absent, key, envelope, lease, deadline)
        found = _key_value(answer)
        known = decode(found.value) if found is not None else None
        is_ours = answer.succeeded or (known is not None and known.by == mark)
        if is_ours and lease is not None:
            revision = answer.header.revision if found is None else found.mod_revision
            self.own[key] = OwnWrite(revision, envelope, lease)
        return is_ours

    async def put(self, key: str, value: Value, lease: EtcdLease | None, deadline: Deadline) -> None:
        mark = self._mark()
        known = self.own.get(key, _NOT_THERE)
        while True:
            envelope = Envelope(by=mark, value=value, was=known.was)
            answer = await self._transact(self._unchanged(key, known), key, envelope, lease, deadline)
            found = _key_value(answer)
            if answer.succeeded:
                self.own[key] = OwnWrite(answer.header.revision, envelope, lease)
                return
            if found is None:
                # Our key is gone: dropped, or lost with all others, and then it is put back with its old numbers first.
                await self._store.verify()
                restored = self.own.get(key, _NOT_THERE)
                known = restored if restored != known else _NOT_THERE
                continue
            current = decode(found.value)
            known = OwnWrite(found.mod_revision, current)
            if current is not None and current.by == mark:
                self.own[key] = OwnWrite(known.revision, current, lease)
                return

    async def delete(self, key: str, deadline: Deadline) -> None:
        rpc = self._rpc
        known = self.own.pop(key, _NOT_THERE)
        remove = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key.encode()))
        while True:
            request = rpc.TxnRequest(compare=[self._unchanged(key, known)], success=[remove], failure=[self._read(key)])
            answer = await self._client.call("Txn", request, deadline=deadline)
            found = _key_value(answer)
            if answer.succeeded or found is None:
                return
            known = OwnWrite(found.mod_revision)

    async def revoke(self, lease: EtcdLease, deadline: Deadline) -> None:
        lease.is_over = True
        try:
            await self._client.call("LeaseRevoke", self._rpc.LeaseRevokeRequest(ID=lease.id), deadline=deadline)
        except EtcdError as error:
            if error.action is not Action.LEASE_LOST:
                raise

    async def restore(self, key: str, envelope: Envelope, lease_id: int) -> Envelope | None:
        """Put a key back that etcd has lost, unless it is there; gives what is there then."""
        rpc = self._rpc
        is_absent = rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=key.encode(), create_revision=0
        )
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=key.encode(), value=envelope.encode(), lease=lease_id))
        request = rpc.TxnRequest(compare=[is_absent], success=[put], failure=[self._read(key)])
        answer = await self._client.call("Txn", request)
        found = _key_value(answer)
        present = envelope if found is None else decode(found.value)
        own = self.own.get(key)
        if own is not None:
            revision = answer.header.revision if found is None else found.mod_revision
            self.own[key] = OwnWrite(revision, present, own.lease)
        return present

    async def _transact(
        self, compare: Any, key: str, envelope: Envelope, lease: EtcdLease | None, deadline: Deadline
    ) -> Any:
        """Write if the comparison holds, read if not. Raises LeaseLostError once the lease is gone for good."""
        rpc, data = self._rpc, envelope.encode()
        while True:
            if lease is not None:
                await lease.ensure_granted(deadline)
            put = rpc.PutRequest(key=key.encode(), value=data, lease=0 if lease is None else lease.id)
            request = rpc.TxnRequest(
                compare=[compare], success=[rpc.RequestOp(request_put=put)], failure=[self._read(key)]
            )
            try:
                return await self._client.call("Txn", request, deadline=deadline)
            except EtcdError as error:
                if error.action is not Action.LEASE_LOST or lease is None:
                    raise
                if await self._store.is_lost(lease):
                    lease.end()
                    raise LeaseLostError(f"{key}: the lease it was to be written under has expired") from None

    def _unchanged(self, key: str, known: OwnWrite) -> Any:
        rpc = self._rpc
        return rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=key.encode(), mod_revision=known.revision
        )

    def _read(self, key: str) -> Any:
        return self._rpc.RequestOp(request_range=self._rpc.RangeRequest(key=key.encode()))

    def _mark(self) -> str:
        self._num_marks += 1
        return f"{self._name}/{self._num_marks}"


def _key_value(answer: Any) -> Any:
    """What the read in a transaction's answer has found, None when it wrote instead or found nothing."""
    for response in answer.responses:
        if response.HasField("response_range") and response.response_range.kvs:
            return response.response_range.kvs[0]
    return None


def _fail(future: Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
