"""A watch that outlives its connection, etcd's compaction, and the loss of etcd's data.

A broken stream is opened again behind the last revision that was seen. That is right only while etcd still has the same
past. It has where a known key still lies there with its marks and revision; else all are read and compared:

- All that lies at a known revision is as it is known: the same past, and the new Snapshot says what has changed.
- Something contradicts it: etcd was restarted empty, or from a backup. Nothing happened to the nodes, so nothing shall
  happen to the run: a node that holds a lease puts the keys that it knew back, on their leases, with their former
  numbers (`envelope.Was`). Whichever node comes first does it for all; a dead one's lease runs out as always. A new
  base added to etcd's new count keeps revisions growing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from elastictrain.errors import ConfigError, StoreError
from elastictrain.rendezvous.etcd.connection import Stream
from elastictrain.rendezvous.etcd.envelope import Envelope, Was, decode
from elastictrain.rendezvous.etcd.failures import Action, EtcdError
from elastictrain.rendezvous.store import Inbox, KeyEvent, Snapshot, WatchFailed, WatchItem

if TYPE_CHECKING:
    from elastictrain.rendezvous.etcd.etcd_store import EtcdStore

# Far more than the changes that one node may have seen and the one that puts the keys back has not.
_BASE_STEP = 1 << 20
# A stream that lived shorter did not work: the next one has to wait its turn.
_SHORT_LIFE_S = 1.0


@dataclass(slots=True)
class Span:
    """Keys that lie next to each other, and up to where etcd has told of them: etcd watches each span for itself."""

    first: bytes
    end: bytes
    seen_raw: int = 0
    resume_raw: int = 0

    def __contains__(self, key: bytes) -> bool:
        return self.first <= key and (key < self.end or self.end == b"\0")


def spans_of(prefix: str, without: str, but: str) -> list[Span]:
    """The spans that make up the keys under `prefix`, without those under `without` but for `but`."""
    first, end = prefix.encode(), range_end(prefix.encode())
    if not without:
        return [Span(first, end)]
    hole = without.encode()
    spans = [Span(first, hole), Span(range_end(hole), end)]
    return [*spans, Span(but.encode(), but.encode() + b"\0")] if but else spans


@dataclass(frozen=True, slots=True)
class Listing:
    """Keys read at one revision."""

    header: Any
    kvs: list[Any]


@dataclass(frozen=True, slots=True)
class Known:
    """A key as this watch knows it: etcd's own numbers, its lease, and what was told of it.

    `event` is None for a value that no elastictrain wrote; it is kept for the comparison and not told.
    """

    raw_created: int
    raw_revision: int
    lease_id: int
    envelope: Envelope | None
    event: KeyEvent | None


class _Resync(Exception):  # noqa: N818 - no error: it only leads out of the stream
    """All keys must be read anew."""


class EtcdWatch:
    """A watch of an EtcdStore; runs as a task of the I/O thread until closed."""

    def __init__(self, store: EtcdStore, prefix: str, inbox: Inbox, *, without: str = "", but: str = "") -> None:
        self.prefix = prefix
        self._spans = spans_of(prefix, without, but)
        self._span_of: dict[int, Span] = {}
        self._is_partial, self._own_key = bool(without), but
        self._store = store
        self._client = store.client
        self._inbox = inbox
        self._lock = threading.Lock()
        self._is_closed = False
        self._known: dict[str, Known] | None = None
        self._cluster_id = 0
        self._base = 0
        self._newest = 0
        self._connection_number = 0
        self._is_verified = True
        self._is_ended = False
        self._verifying: list[asyncio.Future[None]] = []
        self._stream: Stream | None = None

    def close(self) -> None:
        """End the watch. Any thread; nothing is delivered after this returned."""
        with self._lock:
            self._is_closed = True
        self._store.post(lambda: self._store.forget(self))

    def wake(self) -> None:
        self._inbox.wake()

    # ---------------------------------------------------------------- on the I/O thread

    async def serve(self) -> None:
        """Deliver, for ever. A final failure is delivered too."""
        try:
            while True:
                await self._client.retry(self._subscribe)
        except (StoreError, ConfigError) as error:
            self._deliver(WatchFailed(error=error))
            self.stop()

    async def verify(self) -> None:
        """Find out whether etcd has lost its data; return when what it has lost has been put back."""
        if self._known is None or self._is_ended:
            return
        # The stream goes on meanwhile.
        before = [replace(span) for span in self._spans], dict(self._known), self._cluster_id
        answer = await self._client.retry(self._read_all)
        if not _is_other_past(answer, *before):
            return
        verified: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._verifying.append(verified)
        self._is_verified = False
        if self._stream is not None:
            self._stream.close()
        if not self._is_ended:
            await verified

    def stop(self) -> None:
        """Let those go who wait for `verify`: the watch's task is ended."""
        self._is_ended = True
        self._release()

    async def _subscribe(self) -> None:
        """Catch up, then follow the stream until it breaks. Raises EtcdError when it did not come about."""
        client = self._client
        if self._known is None or not self._is_verified or not await self._has_same_past():
            await self._resync()
        began_s = self._store.clock.now_s()
        timeout_s = self._store.settings.attempt_timeout_s
        requests = [self._request(span) for span in self._spans]
        self._span_of = {}
        stream, first = await client.open_watch(requests[0], timeout_s=timeout_s)
        try:
            if stream.connection.number != self._connection_number:
                raise EtcdError("the connection was given up", action=Action.RETRY)
            self._stream = stream
            for request in requests[1:]:
                await stream.write(request, timeout_s=timeout_s)
            self._take_answer(first)
            while self._is_verified:
                self._take_answer(await stream.read())
        except _Resync:
            self._is_verified = False
        except EtcdError as error:
            if error.action is Action.RECONNECT:
                client.give_up(stream.connection)
            if not self._is_verified:
                return
            if not error.retryable or self._store.clock.now_s() - began_s < _SHORT_LIFE_S:
                raise
        finally:
            self._stream = None
            stream.close()

    def _request(self, span: Span) -> Any:
        rpc = self._client.rpc
        create = rpc.WatchCreateRequest(
            key=span.first, range_end=span.end, start_revision=span.resume_raw, progress_notify=True
        )
        return rpc.WatchRequest(create_request=create)

    def _take_answer(self, answer: Any) -> None:
        if answer.canceled:
            if answer.compact_revision > 0:
                raise _Resync
            raise EtcdError(f"the watch was ended: {answer.cancel_reason or 'no reason given'}", action=Action.RETRY)
        if answer.created:
            # The requests are answered in their order.
            self._span_of[answer.watch_id] = self._spans[len(self._span_of)]
        span = self._span_of[answer.watch_id]
        for event in answer.events:
            self._take_event(event, span)
        if answer.events:
            # Only now: an answer holds whole revisions, and one revision may change several keys.
            span.seen_raw = max(span.seen_raw, *(event.kv.mod_revision for event in answer.events))
            span.resume_raw = max(span.resume_raw, span.seen_raw + 1)
        elif not answer.created:
            # An answer without events says up to where there was nothing to tell.
            span.resume_raw = max(span.resume_raw, answer.header.revision + 1)

    def _take_event(self, event: Any, span: Span) -> None:
        known, kv = self._known, event.kv
        if known is None or kv.mod_revision <= span.seen_raw:
            return  # seen before the stream broke
        key = kv.key.decode()
        if event.type == event.DELETE:
            gone = known.pop(key, None)
            if gone is not None and gone.event is not None:
                self._tell(KeyEvent(key=key, value=None, revision=self._base + kv.mod_revision, created_revision=0))
            return
        made = self._read(kv)
        if made.envelope is not None and made.envelope.was is not None and made.envelope.was.base > self._base:
            raise _Resync  # another node put the keys back, by another base
        known[key] = made
        if made.event is not None:
            self._tell(made.event)

    def _read(self, kv: Any) -> Known:
        """Number a key's value. A key that is still the one known keeps the number of its creation."""
        key, envelope = kv.key.decode(), decode(kv.value)
        before = self._known.get(key) if self._known is not None else None
        event = None
        if envelope is None:
            self._store.report(f"etcd holds something else than elastictrain's values at {key}: it is ignored")
        else:
            created, revision = self._base + kv.create_revision, self._base + kv.mod_revision
            if envelope.was is not None:
                created = envelope.was.created
                revision = revision if envelope.was.revision is None else envelope.was.revision
            elif before is not None and before.event is not None and before.raw_created == kv.create_revision:
                created = before.event.created_revision
            event = KeyEvent(key=key, value=envelope.value, revision=revision, created_revision=created)
        return Known(kv.create_revision, kv.mod_revision, kv.lease, envelope, event)

    def _tell(self, event: KeyEvent) -> None:
        self._newest = max(self._newest, event.revision)
        self._deliver(event)

    def _deliver(self, item: WatchItem) -> None:
        with self._lock:
            if not self._is_closed:
                self._inbox.deliver(item)

    def _release(self) -> None:
        waiting, self._verifying = self._verifying, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # ---------------------------------------------------------------- the past

    async def _has_same_past(self) -> bool:
        """Tell whether etcd is known for sure to be the one that was watched before: one key, of those without a lease
        the one unchanged for longest, lies there as it was. Put back by some node, it would have a new base."""
        number = self._client.connection_number
        if number == self._connection_number:
            return True
        witnesses = [item for item in (self._known or {}).items() if item[1].envelope is not None]
        if not witnesses:
            return False
        key, known = min(witnesses, key=lambda item: (item[1].lease_id != 0, item[1].raw_revision))
        request = self._client.rpc.RangeRequest(key=key.encode())
        answer = await self._client.call_once("Range", request, timeout_s=self._store.settings.attempt_timeout_s)
        if not any(_is_as_known(kv, known) for kv in answer.kvs):
            return False
        self._connection_number = number
        return True

    async def _resync(self) -> None:
        """Read all keys, put them back if need be, and deliver a Snapshot."""
        number = self._client.connection_number
        answer = await self._read_all()
        new_base = 0
        if self._known is not None and _is_other_past(answer, self._spans, self._known, self._cluster_id):
            new_base, self._known = await self._restore()
            answer = await self._read_all()
        found = max((one.was.base for one in map(_envelope, answer.kvs) if one is not None and one.was), default=0)
        # The base that lies in etcd is everybody's; the own one only counts where nobody has put anything back.
        self._base = found if found > self._base else max(self._base, new_base)
        known = {kv.key.decode(): self._read(kv) for kv in answer.kvs}
        self._known = known
        self._cluster_id = answer.header.cluster_id
        for span in self._spans:
            span.seen_raw = answer.header.revision
            span.resume_raw = answer.header.revision + 1
        self._connection_number = number
        self._is_verified = True
        self._newest = max(self._newest, self._base + answer.header.revision)
        entries = tuple(one.event for one in known.values() if one.event is not None)
        self._deliver(Snapshot(revision=self._newest, entries=entries, is_partial=self._is_partial))
        self._release()

    async def _read_all(self) -> Listing:
        rpc, timeout_s = self._client.rpc, 2 * self._store.settings.attempt_timeout_s
        requests = [rpc.RangeRequest(key=span.first, range_end=span.end) for span in self._spans]
        if len(requests) == 1:
            answer = await self._client.call_once("Range", requests[0], timeout_s=timeout_s)
            return Listing(answer.header, list(answer.kvs))
        read = rpc.TxnRequest(success=[rpc.RequestOp(request_range=request) for request in requests])
        answer = await self._client.call_once("Txn", read, timeout_s=timeout_s)
        return Listing(answer.header, [kv for one in answer.responses for kv in one.response_range.kvs])

    async def _restore(self) -> tuple[int, dict[str, Known]]:
        """Put back what this node knew, if it is a member; gives the base of the new count and what was known."""
        known = self._with_own_writes()
        base = self._newest + _BASE_STEP
        held = self._store.held_leases()
        if not held:
            self._store.report("etcd has lost its data; this node holds no lease and puts nothing back")
            return base, known
        self._store.report(f"etcd has lost its data: {len(known)} keys of {self.prefix} are put back")
        ttl_s = max(lease.ttl_s for lease in held)
        for lease_id in {lease.id for lease in held} | {one.lease_id for one in known.values() if one.lease_id}:
            await self._store.put_back_lease(lease_id, ttl_s)
        # What all watch comes first: by it all nodes agree on the base.
        for key, one in sorted(known.items(), key=lambda item: (item[0] == self._own_key, item[0])):
            if one.envelope is None or one.event is None:
                continue
            was = Was(created=one.event.created_revision, revision=one.event.revision, base=base)
            envelope = Envelope(by=one.envelope.by, value=one.envelope.value, was=was)
            present = await self._store.writer.restore(key, envelope, one.lease_id)
            if present is not None and present.was is not None and present.was.base > self._base:
                base = present.was.base  # another node was faster: its base is everybody's
        return base, known

    def _with_own_writes(self) -> dict[str, Known]:
        """What the watch knew, and beyond it what this node wrote itself and had answered before the end."""
        known = dict(self._known or {})
        for key, own in self._store.writer.own.items():
            before = known.get(key)
            is_covered = any(key.encode() in span for span in self._spans)
            if not is_covered or own.envelope is None or own.lease is None or not own.lease.is_held:
                continue
            if before is not None and before.raw_revision >= own.revision:
                continue
            revision = self._base + own.revision
            is_same = before is not None and before.event is not None
            created = before.event.created_revision if is_same and before is not None and before.event else revision
            event = KeyEvent(key=key, value=own.envelope.value, revision=revision, created_revision=created)
            self._newest = max(self._newest, revision)
            known[key] = Known(own.revision, own.revision, own.lease.id, own.envelope, event)
        return known


def range_end(prefix: bytes) -> bytes:
    """The first key behind all that begin with `prefix`, as etcd wants it."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


def _is_other_past(answer: Listing, spans: Sequence[Span], known: Mapping[str, Known], cluster_id: int) -> bool:
    """Tell whether all keys, read through etcd's leader, contradict what it had told before."""
    if answer.header.revision < max(span.seen_raw for span in spans):
        return True
    present = {kv.key.decode(): kv for kv in answer.kvs}
    if answer.header.cluster_id != cluster_id and known.keys() - present.keys():
        return True
    return any(
        kv.mod_revision <= span.seen_raw and kv.key in span and not _is_as_known(kv, known.get(key))
        for span in spans
        for key, kv in present.items()
    )


def _envelope(kv: Any) -> Envelope | None:
    return decode(kv.value)


def _is_as_known(kv: Any, known: Known | None) -> bool:
    if known is None or known.raw_revision != kv.mod_revision:
        return False
    # A new count may reach the same number for the same key, but not with the same marks.
    return _envelope(kv) == known.envelope
