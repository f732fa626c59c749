"""Many nodes over one embedded store, with links that delay, repeat, reorder, or are cut; workers are played.

Everything is real but the network and the training: drivers, protocol cores, store, leases.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from elastictrain.clock import Clock, ManualClock
from elastictrain.rendezvous import events as ev
from elastictrain.rendezvous.driver import Driver
from elastictrain.rendezvous.embedded import EmbeddedStore
from elastictrain.rendezvous.records import Keys, Settings
from elastictrain.rendezvous.store import Inbox, KeyEvent, Lease, Snapshot, Value, Watch, WatchItem
from elastictrain.topology import Candidate, Round


class CrashError(Exception):
    """The node dies before its next write."""


class HeldInbox(Inbox):
    """Keeps what the store delivers until the test lets it through to the node."""

    def __init__(self, target: Inbox) -> None:
        super().__init__()
        self.target = target
        self.held: list[WatchItem] = []
        self.delivered: list[KeyEvent] = []

    def deliver(self, item: WatchItem) -> None:
        self.held.append(item)

    def release(self, count: int) -> None:
        taken, self.held = self.held[:count], self.held[count:]
        for item in taken:
            if isinstance(item, KeyEvent):
                self.delivered.append(item)
            self.target.deliver(item)

    def repeat(self, index: int) -> None:
        """Deliver again something that was delivered before."""
        if self.delivered:
            self.target.deliver(self.delivered[index % len(self.delivered)])

    def swap(self, index: int) -> bool:
        """Let two changes of different keys overtake each other."""
        if len(self.held) < 2:
            return False
        at = index % (len(self.held) - 1)
        first, second = self.held[at : at + 2]
        if isinstance(first, Snapshot) or isinstance(second, Snapshot):
            return False
        if isinstance(first, KeyEvent) and isinstance(second, KeyEvent) and first.key == second.key:
            return False
        self.held[at : at + 2] = [second, first]
        return True


@dataclass(eq=False)
class LinkedLease:
    link: Link
    ttl_s: float
    real: Lease | None = None
    known_s: float = float("inf")

    def keep_alive(self) -> None:
        if not self.link.is_cut and self.real is not None:
            self.real.keep_alive()

    def expires_at_s(self) -> float:
        """What the node knows; of an end it learns only when it is not cut off."""
        if self.real is not None and not self.link.is_cut:
            self.known_s = self.real.expires_at_s()
        return self.known_s

    def revoke(self) -> Future[None]:
        def revoke() -> Future[None]:
            assert self.real is not None
            return self.real.revoke()

        return self.link.send(revoke)


class Link:
    """One node's connection to the store: a Store that can be cut, and that can let its node die at a write."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.store = store
        self.is_cut = False
        self.num_writes = 0
        self.crash_at: int | None = None
        self.inbox: HeldInbox | None = None
        self._queue: list[tuple[Callable[[], Future[Any]], Future[Any]]] = []

    def send(self, call: Callable[[], Future[Any]]) -> Future[Any]:
        if self.num_writes == self.crash_at:
            raise CrashError
        self.num_writes += 1
        if not self.is_cut:
            return call()
        future: Future[Any] = Future()
        self._queue.append((call, future))
        return future

    def heal(self) -> None:
        self.is_cut = False
        queue, self._queue = self._queue, []
        for call, future in queue:
            answered = call()
            error = answered.exception()
            if error is None:
                future.set_result(answered.result())
            else:
                future.set_exception(error)

    def create(self, key: str, value: Value, *, lease: Lease | None = None) -> Future[bool]:
        return self.send(lambda: self.store.create(key, value, lease=self._real(lease)))

    def put(self, key: str, value: Value, *, lease: Lease | None = None) -> Future[None]:
        return self.send(lambda: self.store.put(key, value, lease=self._real(lease)))

    def delete(self, key: str) -> Future[None]:
        return self.send(lambda: self.store.delete(key))

    def lease(self, ttl_s: float) -> LinkedLease:
        lease = LinkedLease(self, ttl_s)

        def grant() -> Future[None]:
            lease.real = self.store.lease(ttl_s)
            done: Future[None] = Future()
            done.set_result(None)
            return done

        self.send(grant)
        return lease

    def watch(self, prefix: str, inbox: Inbox, *, without: str = "", but: str = "") -> Watch:
        """A new watch takes the place of the one before, and of what that had still to deliver."""
        if self.inbox is not None:
            self.inbox.close()
        self.inbox = HeldInbox(inbox)
        return self.store.watch(prefix, self.inbox, without=without, but=but)

    @staticmethod
    def _real(lease: Lease | None) -> Lease | None:
        return lease.real if isinstance(lease, LinkedLease) else None


@dataclass(eq=False)
class Node:
    """A node with played workers: it does what the outputs of its driver say, at the times the test chooses."""

    cluster: Cluster
    node_id: str
    link: Link
    driver: Driver
    expected: int
    workers: dict[str, int | None] = field(default_factory=dict)
    """Worker id -> the generation that it runs, None while it is parked or warm."""
    num_started: int = 0
    entered: list[int] = field(default_factory=list)
    step: int = 0
    to_park: int = 0
    to_answer: int = 0
    settled: int = 0
    is_closed: bool = False
    outputs: list[ev.Output] = field(default_factory=list)
    reported: ev.LocalChanged | None = None
    over: ev.Output | None = None

    @property
    def held(self) -> HeldInbox:
        assert self.link.inbox is not None
        return self.link.inbox

    def warm(self) -> None:
        """A worker that was starting becomes warm, or, when none is, a new one does."""
        self.expected = max(0, self.expected - 1)
        self.workers[f"{self.node_id}.w{self.num_started}"] = None
        self.num_started += 1
        self.report()

    def candidates(self) -> tuple[Candidate, ...]:
        idle = [worker_id for worker_id, generation in self.workers.items() if generation is None]
        return tuple(
            Candidate(worker_id=worker_id, node_id=self.node_id, local_rank=int(worker_id.rpartition("w")[2]))
            for worker_id in idle
        )

    def report(self) -> None:
        running = [generation for generation in self.workers.values() if generation is not None]
        newest = max(self.entered, default=0)
        self.settled = max(self.settled, min(running) - 1 if running else newest)
        idle = self.candidates()
        change = ev.LocalChanged(
            candidates=idle, settled=self.settled, expected=self.expected, wants_in=bool(idle) and bool(running)
        )
        if change != self.reported:
            self.reported = change
            self.driver.handle(change)

    def kill_worker(self, worker_id: str) -> None:
        generation = self.workers.pop(worker_id)
        if generation is not None:
            self.driver.handle(ev.LocalBroken(generation=generation, cause="worker_died", worker_id=worker_id))
        self.report()

    def park(self) -> None:
        """The workers of an ended generation have stopped."""
        for worker_id, generation in self.workers.items():
            if generation is not None and generation <= self.to_park:
                self.workers[worker_id] = None
        self.report()

    def answer(self) -> None:
        if self.to_answer:
            self.driver.handle(ev.LocalPosition(generation=self.to_answer, step=self.step))
            self.cluster.positions.setdefault(self.to_answer, []).append(self.step)
            self.to_answer = 0

    def poll(self) -> None:
        for output in self.driver.poll():
            self.outputs.append(output)
            self._obey(output)

    def _obey(self, output: ev.Output) -> None:
        match output:
            case ev.EnterRound(round=made):
                assert made.generation > max(self.entered, default=0), "a generation is entered once, in order"
                assert made == self.cluster.rounds()[made.generation], "the Round is the one in the store"
                self.entered.append(made.generation)
                for seat in made.seats:
                    if seat.node_id == self.node_id and seat.worker_id in self.workers:
                        assert self.workers[seat.worker_id] is None, "only a parked worker enters"
                        self.workers[seat.worker_id] = made.generation
                    elif seat.node_id == self.node_id:
                        broken = ev.LocalBroken(
                            generation=made.generation, cause="worker_died", worker_id=seat.worker_id
                        )
                        self.driver.handle(broken)
                self.report()
            case ev.Fence(generation=generation, cause=cause):
                self.to_park = max(self.to_park, generation)
                if cause == "lease_lost":
                    self.park()  # the lease leaves just the time for this
            case ev.ReportPosition(generation=generation):
                self.to_answer = generation
            case ev.StopAt(generation=generation, step=step):
                assert self.cluster.stops.setdefault(generation, step) == step, "all stop behind the same step"
                assert step >= max(self.cluster.positions[generation]), "nobody has begun a later step"
                self.to_park = max(self.to_park, generation)
            case ev.RunClosed() | ev.Left() | ev.Refused():
                self.over = output
                self.workers.clear()
            case ev.Waiting():
                pass

    def end(self) -> None:
        """Stop without a word, and free the file descriptors of this process."""
        self.over = self.over or ev.Left(reason="crashed")
        self.workers.clear()
        self.driver._watch.close()
        self.driver._inbox.close()
        self.held.close()


class NoProbe:
    """A look at a host that is over as soon as it began."""

    def close(self) -> None:
        pass


class Cluster:
    """The nodes, their store and their common clock. `refuses`: the machines of dead nodes say so when asked."""

    def __init__(self, settings: Settings, *, refuses: bool = True) -> None:
        self.settings = settings
        self.refuses = refuses
        self.clock = ManualClock()
        self.store = EmbeddedStore(self.clock)
        self.keys = Keys(settings.run_id)
        self.nodes: list[Node] = []
        self.positions: dict[int, list[int]] = {}
        self.stops: dict[int, int] = {}
        self.is_ordered = True
        self.num_joined = 0

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.over is None]

    def join(self, *, expected: int, crash_at: int | None = None) -> Node:
        node_id = f"n{self.num_joined}"
        self.num_joined += 1
        link = Link(self.store)
        link.crash_at = crash_at
        driver = Driver(
            link,
            self.settings,
            clock=self.clock,
            node_id=node_id,
            host=f"{node_id}.local",
            store_port=29500,
            prober=self.probe,
        )
        node = Node(self, node_id, link, driver, expected)
        self.nodes.append(node)
        driver.handle(ev.NodeReady(expected=expected))
        return node

    def probe(self, host: str, port: int, *, timeout_s: float, clock: Clock, on_gone: Callable[[], None]) -> NoProbe:
        (target,) = [node for node in self.nodes if f"{node.node_id}.local" == host]
        if target.over is not None and self.refuses:
            on_gone()
        return NoProbe()

    def rounds(self) -> dict[int, Round]:
        entries = self.store._entries
        found = (Round.from_json(entries[key].value) for key in entries if key.startswith(f"{self.keys.prefix}round/"))
        return {made.generation: made for made in found}

    def guard(self, node: Node, action: Callable[[], None]) -> None:
        """Run an action of a node, which may die in it."""
        try:
            if node.over is None:
                action()
        except CrashError:
            node.end()

    def poll(self, node: Node) -> None:
        self.guard(node, node.poll)

    def tick(self, seconds: float) -> None:
        """Let time pass in steps that are short beside the lease."""
        step_s = self.settings.ttl_s / 8
        for _ in range(max(1, round(seconds / step_s))):
            self.clock.advance(step_s)
            for node in self.alive:
                due_s = node.driver.next_deadline_s()
                if due_s is not None and due_s <= self.clock.now_s():
                    self.poll(node)
            self.store.expire_leases()

    def calm(self, *, num_ticks: int = 80) -> None:
        """End all trouble; every node does its part until nothing changes any more."""
        for node in self.alive:
            node.link.heal()
        for _ in range(num_ticks):
            for node in self.alive:
                self.guard(node, node.answer)
                self.guard(node, node.park)
                if node.expected:
                    self.guard(node, node.warm)
                node.held.release(len(node.held.held))
                self.poll(node)
            self.tick(self.settings.ttl_s / 8)

    def check(self) -> None:
        """What holds at every moment."""
        rounds = self.rounds()
        assert sorted(rounds) == list(range(1, len(rounds) + 1)), "generations grow by one"
        for made in rounds.values():
            assert [seat.rank for seat in made.seats] == list(range(made.world_size)), "ranks are 0..n-1"
            assert len({seat.worker_id for seat in made.seats}) == made.world_size, "a worker sits once"
            assert len({seat.stream for seat in made.seats}) == made.world_size, "a stream is used once"
            assert made.world_size >= self.settings.min_world_size, "the minimum of workers is kept"
            assert self.settings.min_nodes <= len(made.node_ids) <= self.settings.max_nodes, "the node limits are kept"
        if self.is_ordered:
            for generation in list(rounds)[:-1]:
                assert not self.can_commit(rounds[generation]), f"generation {generation} lives beside a newer one"

    def can_commit(self, made: Round) -> bool:
        running = {worker_id: generation for node in self.alive for worker_id, generation in node.workers.items()}
        return all(running.get(seat.worker_id) == made.generation for seat in made.seats)

    def check_calm(self) -> None:
        """What holds when the trouble is over."""
        self.check()
        if f"{self.keys.prefix}closed" in self.store._entries:
            assert not self.alive, "everybody has heard that the run is closed"
            return
        ready = [node for node in self.alive if node.workers]
        largest = sum(sorted((len(node.workers) for node in ready), reverse=True)[: self.settings.max_nodes])
        if len(ready) < self.settings.min_nodes or largest < self.settings.min_world_size:
            assert not any(generation is not None for node in self.alive for generation in node.workers.values())
            return
        smallest = sum(sorted(len(node.workers) for node in ready)[: self.settings.max_nodes])
        rounds = self.rounds()
        if not rounds or not self.can_commit(rounds[max(rounds)]):
            assert smallest < self.settings.min_world_size, self.story()
            return
        made = rounds[max(rounds)]
        assert len(made.node_ids) == min(len(ready), self.settings.max_nodes), self.story()
        seated = [node for node in ready if node.node_id in made.node_ids]
        assert made.world_size == sum(len(node.workers) for node in seated), self.story()

    def story(self) -> str:
        lines = []
        for node in self.nodes:
            lines.append(f"{node.node_id}: over={node.over} workers={node.workers} {node.driver.state}")
            lines += [f"    {reason}" for reason in node.driver.story]
        return "\n".join(["", *lines])

    def close(self) -> None:
        for node in self.nodes:
            node.end()
