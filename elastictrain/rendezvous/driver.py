"""The shell around the protocol core: it carries events in, writes out to the store, and outputs to the agent.

It has no thread and no loop of its own: the agent's selector waits for `fileno()` and for `next_deadline_s()`, then
calls `poll()`. All calls come from that one thread; none blocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from elastictrain.clock import Clock
from elastictrain.errors import InternalError, StoreError
from elastictrain.rendezvous import events as ev
from elastictrain.rendezvous.host_probe import HostProbe
from elastictrain.rendezvous.protocol import State, advance, check_invariants, next_deadline_s, start
from elastictrain.rendezvous.records import Broken, Closed, Keeper, Keys, Member, Plan, Settings, Stop
from elastictrain.rendezvous.state import FINAL_PHASES, has_keepers, outage_patience_s
from elastictrain.rendezvous.store import (
    Inbox,
    KeyEvent,
    Lease,
    LeaseLostError,
    Snapshot,
    Store,
    WatchFailed,
    WatchItem,
)
from elastictrain.topology import Round

_STORY_LENGTH = 30
_NUMBERED = frozenset({"round", "plan", "stop", "broken"})
# Nothing is decided by what is older than the newest; people who look into the store may want to see how it came.
_KEPT_GENERATIONS = 16


class Probe(Protocol):
    """A running look at a host; see `HostProbe`."""

    def close(self) -> None: ...


class Prober(Protocol):
    """Starts one."""

    def __call__(
        self, host: str, port: int, *, timeout_s: float, clock: Clock, on_gone: Callable[[], None]
    ) -> Probe: ...


class Driver:
    """One node's part in the rendezvous.

    `host` and `store_port` are where this node offers to host a process group's store. The node takes part from the
    moment it handles NodeReady. Close it, or the file descriptor leaks and the others wait for the lease to run out.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        clock: Clock,
        node_id: str,
        host: str,
        store_port: int,
        prober: Prober = HostProbe,
    ) -> None:
        self._store = store
        self._prober = prober
        self._probe: Probe | None = None
        self._gone: deque[int] = deque()
        self._settings = settings
        self._clock = clock
        self._keys = Keys(settings.run_id)
        self._member_key = self._keys.member(node_id)
        self._state = start(settings, node_id=node_id, host=host, store_port=store_port)
        self._story: deque[str] = deque(maxlen=_STORY_LENGTH)
        self._outputs: list[ev.Output] = []
        self._pending: list[tuple[ev.Write, Future[Any]]] = []
        self._names: set[str] = set()
        self._lease: Lease | None = None
        self._keep_alive_at_s = math.inf
        self._inbox = Inbox()
        hidden = self._keys.members if has_keepers(self._state) else ""
        self._watch = store.watch(self._keys.prefix, self._inbox, without=hidden, but=self._member_key)

    @property
    def state(self) -> State:
        """What the node knows now; immutable."""
        return self._state

    @property
    def story(self) -> tuple[str, ...]:
        """Reasons of the last transitions, oldest first."""
        return tuple(self._story)

    @property
    def num_nodes_waiting(self) -> int:
        """Members with workers that wait for a seat while the newest Round runs."""
        seated = set(self._state.round.node_ids) if self._state.round is not None else set()
        members = (seen.member for seen in self._state.members.values())
        return sum(1 for one in members if one.candidates and (one.wants_in or one.node_id not in seated))

    def fileno(self) -> int:
        """File descriptor that is readable when `poll` has something to do."""
        return self._inbox.fileno()

    def next_deadline_s(self) -> float | None:
        """Monotonic time at which `poll` must be called even if nothing is readable, None for never."""
        times = [self._keep_alive_at_s, self._fence_at_s()]
        core_s = next_deadline_s(self._state)
        if core_s is not None:
            times.append(core_s)
        earliest_s = min(times)
        return None if earliest_s == math.inf else max(earliest_s, 0.0)  # a lost lease is due since ever

    def handle(self, event: ev.Event) -> None:
        """Take in an event of the local node. Its outputs come with the next `poll`, which `fileno()` then asks for.

        Raises InternalError on an event that cannot be.
        """
        self._advance(event)
        if self._outputs:
            self._inbox.wake()

    def poll(self) -> list[ev.Output]:
        """Take in what the store has pushed and what is due; returns what the agent has to do, in order.

        Raises StoreError when the store refuses for good or holds nonsense, ConfigError for a Round of another version.
        """
        self._keep_lease()
        while True:
            is_changed = self._reap()
            while self._gone:
                self._advance(ev.HostGone(generation=self._gone.popleft()))
                is_changed = True
            for event in self._events(self._inbox.drain()):
                self._advance(event)
                is_changed = True
            due_s = next_deadline_s(self._state)
            if not is_changed and due_s is not None and self._clock.now_s() >= due_s:
                self._advance(ev.DeadlineReached())
                due_again_s = next_deadline_s(self._state)
                is_changed = due_again_s != due_s
            # An answer that came just before the drain has lost its wake-up to it.
            is_answered = any(future.done() for _, future in self._pending)
            if not is_changed and not is_answered and not self._keep_lease():
                outputs, self._outputs = self._outputs, []
                return outputs

    def close(self) -> None:
        """Give up the lease, so that the others learn at once that this node is gone, and the watch. Idempotent."""
        self._watch.close()
        self._end_probe()
        self._give_up_lease()
        self._inbox.close()

    # ---------------------------------------------------------------- the core

    def _advance(self, event: ev.Event) -> None:
        transition = advance(self._state, event, now_s=self._clock.now_s())
        before, self._state = self._state, transition.state
        self._story.append(transition.reason)
        try:
            check_invariants(self._state, before)
        except InternalError as error:
            error.add_note("\n".join(self._story))
            raise
        for effect in transition.effects:
            if isinstance(effect, ev.Write):
                self._write(effect)
            elif isinstance(effect, ev.ProbeHost):
                self._probe_host(effect)
            elif isinstance(effect, ev.WatchAll):
                # Changes between the end of the one and the Snapshot of the other are in the Snapshot.
                self._watch.close()
                self._watch = self._store.watch(self._keys.prefix, self._inbox)
            else:
                self._outputs.append(effect)

    def _events(self, items: list[WatchItem]) -> list[ev.Event]:
        """Turn what the watch delivered into events; changes in a row become one, so that they cost one decision."""
        events: list[ev.Event] = []
        changes: list[ev.StoreChange] = []
        for item in items:
            match item:
                case KeyEvent():
                    changes.extend(self._decode(item))
                case Snapshot(entries=entries, revision=revision, is_partial=is_partial):
                    changes.clear()  # the snapshot is newer than all that came before it
                    listed = tuple(change for entry in entries for change in self._decode(entry))
                    events.append(ev.SnapshotSeen(changes=listed, revision=revision, is_partial=is_partial))
                case WatchFailed(error=error):
                    raise error
        if changes:
            events.append(ev.StoreChanged(changes=tuple(changes)))
        return events

    def _decode(self, event: KeyEvent) -> tuple[ev.StoreChange, ...]:
        if event.value is None:
            self._names.discard(event.key)
        else:
            self._names.add(event.key)
        kind, _, name = event.key.removeprefix(self._keys.prefix).partition("/")
        value: Mapping[str, Any] | None = event.value
        if value is None:
            # Only of keys on a lease has the end a meaning.
            match kind:
                case "members":
                    return (ev.MemberGone(node_id=name, revision=event.revision),)
                case "keeper" if name.isdecimal():
                    return (ev.KeeperGone(number=int(name), revision=event.revision),)
                case "config":
                    return (ev.ConfigSeen(config=None),)
                case _:
                    return ()
        match kind:
            case "members":
                member = Member.from_json(value)
                if member.node_id != name:
                    raise StoreError(f"{event.key} holds member {member.node_id!r}: expected {name!r}", retryable=False)
                seen = ev.MemberSeen(member=member, revision=event.revision, created_revision=event.created_revision)
                return (seen,)
            case "round":
                return (ev.RoundSeen(round=Round.from_json(value), revision=event.revision),)
            case "broken":
                return (ev.BrokenSeen(broken=Broken.from_json(value)),)
            case "plan":
                return (ev.PlanSeen(plan=Plan.from_json(value)),)
            case "stop":
                return (ev.StopSeen(stop=Stop.from_json(value)),)
            case "keeper":
                return (ev.KeeperSeen(keeper=Keeper.from_json(value), revision=event.revision),)
            case "closed":
                return (ev.ClosedSeen(closed=Closed.from_json(value)),)
            case "config":
                return (ev.ConfigSeen(config=value),)
            case _:
                return ()  # a key of a later version

    # ---------------------------------------------------------------- the store

    def _write(self, write: ev.Write) -> None:
        future = self._submit(write)
        if future is not None:
            self._pending.append((write, future))
            future.add_done_callback(lambda done: self._wake_for(write, done))

    def _wake_for(self, write: ev.Write, done: Future[Any]) -> None:
        """Of a write that has succeeded the watch tells; only a Round has a sequel of its own."""
        if isinstance(write, ev.CreateRound) or done.cancelled() or done.exception() is not None:
            self._inbox.wake()

    def _submit(self, write: ev.Write) -> Future[Any] | None:
        store, keys = self._store, self._keys
        match write:
            case ev.PutMember(member=member):
                return store.put(self._member_key, member.to_json(), lease=self._held_lease())
            case ev.RejoinMember(member=member):
                self._give_up_lease()
                return store.put(self._member_key, member.to_json(), lease=self._held_lease())
            case ev.DeleteMember():
                self._give_up_lease()
                return None
            case ev.CreateConfig(config=config):
                return store.create(keys.config, config, lease=self._held_lease())
            case ev.CreateRound(round=made):
                return store.create(keys.round(made.generation), made.to_json())
            case ev.CreatePlan(plan=plan):
                return store.create(keys.plan(plan.generation), plan.to_json())
            case ev.CreateStop(stop=stop):
                return store.create(keys.stop(stop.generation), stop.to_json())
            case ev.CreateKeeper(keeper=keeper):
                return store.create(keys.keeper(keeper.number), keeper.to_json(), lease=self._held_lease())
            case ev.CreateBroken(broken=broken):
                return store.create(keys.broken(broken.generation), broken.to_json())
            case ev.CreateClosed(closed=closed):
                done = store.create(keys.closed, closed.to_json(), lease=store.lease(self._settings.closed_ttl_s))
                self._forget_run()
                return done

    def _forget_run(self) -> None:
        """Delete what the run has written, but for its end and its members. Writes take effect in their order, so that
        no node can come between and take the run for a new one."""
        kept = (self._keys.closed, self._keys.members)
        for key in sorted(name for name in self._names if not name.startswith(kept)):
            self._store.delete(key)

    def _prune(self, newest: int) -> None:
        """Delete what has been said of generations up to `newest`; whoever makes a Round does it for all."""
        for name in sorted(self._names):
            kind, _, number = name.removeprefix(self._keys.prefix).partition("/")
            if kind in _NUMBERED and number.isdecimal() and int(number) <= newest:
                self._store.delete(name)

    def _reap(self) -> bool:
        """Look at the writes that are done: repeat what may succeed, tell the core of a lost lease (then True)."""
        done = [(write, future) for write, future in self._pending if future.done()]
        self._pending = [(write, future) for write, future in self._pending if not future.done()]
        is_lease_lost = False
        for write, future in done:
            error = future.exception()
            if error is None and isinstance(write, ev.CreateRound) and future.result():
                self._prune(write.round.generation - _KEPT_GENERATIONS)
            if error is None or self._state.phase in FINAL_PHASES:
                continue
            if isinstance(error, LeaseLostError):
                is_lease_lost = is_lease_lost or self._is_newest_put(write) or isinstance(write, ev.CreateConfig)
            elif not isinstance(error, StoreError) or not error.retryable:
                raise error
            elif not isinstance(write, ev.PutMember | ev.RejoinMember):
                self._write(write)
            elif self._is_newest_put(write):
                # Repeating an older put would undo the newer one.
                self._write(ev.PutMember(member=write.member))
        if is_lease_lost:
            self._give_up_lease()
            self._advance(ev.LeaseLost())
        return is_lease_lost

    def _is_newest_put(self, write: ev.Write) -> bool:
        return isinstance(write, ev.PutMember | ev.RejoinMember) and write.member == self._state.put

    # ---------------------------------------------------------------- the host of a Round whose nodes are silent

    def _probe_host(self, wanted: ev.ProbeHost) -> None:
        def on_gone() -> None:
            self._gone.append(wanted.generation)
            self._inbox.wake()

        self._end_probe()
        self._probe = self._prober(
            wanted.host, wanted.port, timeout_s=self._settings.outage_timeout_s, clock=self._clock, on_gone=on_gone
        )

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    # ---------------------------------------------------------------- the lease

    def _held_lease(self) -> Lease:
        if self._lease is None:
            self._lease = self._store.lease(self._settings.ttl_s)
            self._keep_alive_at_s = self._clock.now_s() + self._settings.ttl_s / 3
        return self._lease

    def _give_up_lease(self) -> None:
        if self._lease is not None:
            self._lease.revoke()
            self._lease = None
            self._keep_alive_at_s = math.inf

    def _fence_at_s(self) -> float:
        """When the workers must be stopped unless a renewal is answered: a quarter of the lease is left for it."""
        if self._lease is None or self._settings.ttl_s == math.inf:
            return math.inf
        expires_at_s = self._lease.expires_at_s()
        if expires_at_s == -math.inf:
            return expires_at_s
        return expires_at_s - self._settings.ttl_s / 4 + outage_patience_s(self._state)

    def _keep_lease(self) -> bool:
        """Renew what is due; True when the lease is over and the core was told."""
        if self._lease is None:
            return False
        now_s = self._clock.now_s()
        if now_s >= self._keep_alive_at_s:
            self._lease.keep_alive()
            self._keep_alive_at_s = now_s + self._settings.ttl_s / 3
        if now_s < self._fence_at_s():
            return False
        self._give_up_lease()
        self._advance(ev.LeaseLost())
        return True
