"""The rendezvous under arbitrary orders of accidents."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rendezvous_cluster import Cluster, Node

from elastictrain.rendezvous import events as ev
from elastictrain.rendezvous.records import Settings

MAX_NODES = 4
PICK = st.integers(min_value=0, max_value=99)


class RendezvousMachine(RuleBasedStateMachine):
    """One to four nodes at a time; after every accident the invariants hold, and in the end a Round is formed."""

    cluster: Cluster

    @initialize(
        min_nodes=st.integers(1, 2),
        extra_nodes=st.integers(0, 2),
        min_world_size=st.integers(1, 3),
        workers=st.lists(st.integers(1, 2), min_size=2, max_size=3),
        is_running=st.sampled_from([True, True, True, False]),
        refuses=st.booleans(),
        has_keepers=st.booleans(),
    )
    def begin(
        self,
        min_nodes: int,
        extra_nodes: int,
        min_world_size: int,
        workers: list[int],
        is_running: bool,
        refuses: bool,
        has_keepers: bool,
    ) -> None:
        rendezvous = Settings(
            run_id="run",
            min_nodes=min_nodes,
            max_nodes=min_nodes + extra_nodes,
            min_world_size=min_world_size,
            join_timeout_s=1e6,
            last_call_timeout_s=5.0,
            takeover_s=1.0,
            ttl_s=8.0,
            outage_timeout_s=16.0,
            see_all_up_to=0 if has_keepers else MAX_NODES,
        )
        self.cluster = Cluster(rendezvous, refuses=refuses)
        for expected in workers:
            self.cluster.join(expected=expected)
        if is_running:
            self.cluster.calm(num_ticks=10)

    def pick(self, index: int) -> Node:
        return self.cluster.alive[index % len(self.cluster.alive)]

    def has_nodes(self) -> bool:
        return bool(self.cluster.alive)

    @precondition(lambda self: len(self.cluster.alive) < MAX_NODES)
    @rule(expected=st.integers(0, 2))
    def join(self, expected: int) -> None:
        self.cluster.join(expected=expected)

    @precondition(has_nodes)
    @rule(index=PICK)
    def warm(self, index: int) -> None:
        node = self.pick(index)
        if len(node.workers) < 3:
            node.warm()

    @precondition(has_nodes)
    @rule(index=PICK)
    def fail_to_start(self, index: int) -> None:
        node = self.pick(index)
        if node.expected:
            node.expected -= 1
            node.report()

    @precondition(lambda self: len(self.cluster.alive) > 1)
    @rule(index=PICK)
    def crash(self, index: int) -> None:
        self.pick(index).end()

    @precondition(lambda self: len(self.cluster.alive) > 1)
    @rule(index=PICK)
    def leave(self, index: int) -> None:
        self.pick(index).driver.handle(ev.LeaveRun(reason="preempted"))

    @precondition(has_nodes)
    @rule(index=PICK, worker=PICK)
    def kill_worker(self, index: int, worker: int) -> None:
        node = self.pick(index)
        if node.workers:
            node.kill_worker(sorted(node.workers)[worker % len(node.workers)])

    @precondition(has_nodes)
    @rule(index=PICK)
    def cut(self, index: int) -> None:
        self.pick(index).link.is_cut = True

    @precondition(lambda self: len(self.cluster.alive) > 1)
    @rule()
    def cut_members(self) -> None:
        """The nodes that train together lose the store, and only they, for longer than their leases last."""
        rounds = self.cluster.rounds()
        for node in self.cluster.alive:
            if rounds and node.node_id in rounds[max(rounds)].node_ids:
                node.link.is_cut = True
        for _ in range(4):
            self.cluster.tick(4.0)
            self.deliver_everywhere()

    @precondition(has_nodes)
    @rule(index=PICK)
    def heal(self, index: int) -> None:
        self.pick(index).link.heal()

    @precondition(has_nodes)
    @rule(index=PICK)
    def park(self, index: int) -> None:
        self.pick(index).park()

    @precondition(has_nodes)
    @rule(index=PICK, steps=st.integers(0, 3))
    def answer(self, index: int, steps: int) -> None:
        node = self.pick(index)
        node.step += steps
        node.answer()

    @precondition(has_nodes)
    @rule(index=PICK, count=st.integers(1, 10))
    def deliver(self, index: int, count: int) -> None:
        node = self.pick(index)
        if not node.link.is_cut:
            node.held.release(count)
        node.poll()

    @rule()
    def deliver_everywhere(self) -> None:
        for _ in range(3):
            for node in self.cluster.alive:
                if not node.link.is_cut:
                    node.held.release(len(node.held.held))
                node.poll()

    @rule()
    def work(self) -> None:
        for node in self.cluster.alive:
            node.answer()
            node.park()
        self.deliver_everywhere()

    @precondition(lambda self: len(self.cluster.alive) < MAX_NODES)
    @rule()
    def recover(self) -> None:
        self.cluster.calm(num_ticks=10)

    @precondition(has_nodes)
    @rule(index=PICK, which=PICK)
    def deliver_again(self, index: int, which: int) -> None:
        self.pick(index).held.repeat(which)

    @precondition(has_nodes)
    @rule(index=PICK, which=PICK)
    def overtake(self, index: int, which: int) -> None:
        if self.pick(index).held.swap(which):
            self.cluster.is_ordered = False

    @rule(seconds=st.sampled_from([1.0, 3.0, 7.0, 9.0, 25.0]))
    def wait(self, seconds: float) -> None:
        self.cluster.tick(seconds)

    @precondition(lambda self: len(self.cluster.rounds()) > 5)
    @rule(index=PICK)
    def close(self, index: int) -> None:
        if self.cluster.alive:
            self.pick(index).driver.handle(ev.CloseRun(reason="done"))

    @invariant()
    def check(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()

    def teardown(self) -> None:
        if hasattr(self, "cluster"):
            try:
                self.cluster.calm()
                self.cluster.check_calm()
            finally:
                self.cluster.close()


RendezvousMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestRendezvousMachine = RendezvousMachine.TestCase


# ---------------------------------------------------------------- a node dies between any two of its writes


def settle(cluster: Cluster) -> None:
    cluster.calm(num_ticks=12)


def play_start(cluster: Cluster, first: Node) -> None:
    settle(cluster)


def play_worker_death(cluster: Cluster, first: Node) -> None:
    settle(cluster)
    if first.workers:
        cluster.guard(first, lambda: first.kill_worker(sorted(first.workers)[0]))
    settle(cluster)


def play_join(cluster: Cluster, first: Node) -> None:
    settle(cluster)
    cluster.join(expected=1)
    settle(cluster)
    cluster.guard(first, first.warm)
    settle(cluster)


def play_leave(cluster: Cluster, first: Node) -> None:
    settle(cluster)
    cluster.guard(first, lambda: first.driver.handle(ev.LeaveRun(reason="preempted")))
    settle(cluster)


def play_lease_loss(cluster: Cluster, first: Node) -> None:
    settle(cluster)
    first.link.is_cut = True
    cluster.tick(2 * cluster.settings.ttl_s)
    settle(cluster)


def make_cluster(crash_at: int | None, see_all_up_to: int) -> tuple[Cluster, Node]:
    rendezvous = Settings(
        run_id="run",
        max_nodes=3,
        join_timeout_s=1e6,
        last_call_timeout_s=2.0,
        takeover_s=1.0,
        ttl_s=8.0,
        outage_timeout_s=16.0,
        see_all_up_to=see_all_up_to,
    )
    cluster = Cluster(rendezvous)
    # The crash counts from the first write, so the node has to join before it can be armed.
    first = cluster.join(expected=2, crash_at=crash_at)
    cluster.join(expected=1)
    return cluster, first


@pytest.mark.parametrize("see_all_up_to", [MAX_NODES, 0], ids=["all see all", "keepers"])
@pytest.mark.parametrize("play", [play_start, play_worker_death, play_join, play_leave, play_lease_loss])
def test_rendezvous_converges_when_a_node_dies_between_any_two_writes(
    play: Callable[[Cluster, Node], None], see_all_up_to: int
) -> None:
    """Whatever prefix of its writes a node got out, the others and its replacement form a Round."""
    cluster, first = make_cluster(None, see_all_up_to)
    try:
        play(cluster, first)
        num_writes = first.link.num_writes
    finally:
        cluster.close()
    assert num_writes >= 3
    for crash_at in range(num_writes):
        cluster, first = make_cluster(crash_at, see_all_up_to)
        try:
            play(cluster, first)
            assert first.over is not None, f"the node was to die at write {crash_at}"
            cluster.check()
            cluster.join(expected=2)
            cluster.calm()
            cluster.check_calm()
            made = cluster.rounds()[max(cluster.rounds())]
            assert cluster.can_commit(made)
            assert first.node_id not in made.node_ids
        finally:
            cluster.close()


# ---------------------------------------------------------------- all nodes of a Round lose the store


def make_cut_off(*, max_nodes: int, refuses: bool) -> tuple[Cluster, list[Node], Node]:
    """Nodes that train together have lost the store; another one waits, and sees their leases end."""
    rendezvous = Settings(
        run_id="run",
        max_nodes=max_nodes,
        join_timeout_s=1e6,
        last_call_timeout_s=2.0,
        takeover_s=1.0,
        ttl_s=8.0,
        outage_timeout_s=40.0,
    )
    cluster = Cluster(rendezvous, refuses=refuses)
    members = [cluster.join(expected=1) for _ in range(max_nodes)]
    settle(cluster)
    other = cluster.join(expected=1)
    settle(cluster)
    for node in members:
        node.link.is_cut = True
    spend(cluster, 10.0)
    return cluster, members, other


def spend(cluster: Cluster, seconds: float) -> None:
    """Let time pass; who is not cut off hears of everything at once."""
    for _ in range(round(seconds)):
        cluster.tick(1.0)
        for node in cluster.alive:
            if not node.link.is_cut:
                node.held.release(len(node.held.held))
                node.answer()
                node.park()
            cluster.poll(node)
    cluster.check()


def test_nodes_that_train_together_go_on_without_the_store_and_nobody_replaces_them_meanwhile() -> None:
    cluster, members, other = make_cut_off(max_nodes=2, refuses=True)
    try:
        assert not any(node.node_id in other.driver.state.members for node in members), "their leases have run out"
        assert list(cluster.rounds()) == [1]
        assert cluster.can_commit(cluster.rounds()[1]), "they train on"
        spend(cluster, 25.0)
        assert list(cluster.rounds()) == [1]
        assert cluster.can_commit(cluster.rounds()[1])
        spend(cluster, 30.0)
        assert cluster.rounds()[2].node_ids == (other.node_id,), "after the time-out the waiting node goes on"
        cluster.calm()
        cluster.check_calm()
    finally:
        cluster.close()


def test_nodes_that_train_together_are_replaced_at_once_when_their_host_is_proven_dead() -> None:
    cluster, members, other = make_cut_off(max_nodes=2, refuses=True)
    try:
        spend(cluster, 2.0)
        assert list(cluster.rounds()) == [1]
        for node in members:
            node.end()
        late = cluster.join(expected=1)
        late.warm()
        spend(cluster, 6.0)  # the waiting node has asked too early and knows nothing; the new one asks
        assert cluster.rounds()[2].node_ids == (other.node_id, late.node_id)
    finally:
        cluster.close()


def test_node_that_trains_alone_stops_by_its_lease_and_is_replaced_at_once() -> None:
    cluster, (alone,), other = make_cut_off(max_nodes=1, refuses=False)
    try:
        assert cluster.rounds()[2].node_ids == (other.node_id,)
        assert all(generation is None for generation in alone.workers.values())
    finally:
        cluster.close()


def test_nodes_come_back_to_the_round_they_never_left_when_the_store_had_stood_still() -> None:
    """An etcd without a quorum drops no lease."""
    rendezvous = Settings(run_id="run", max_nodes=2, last_call_timeout_s=2.0, ttl_s=8.0, outage_timeout_s=40.0)
    cluster = Cluster(rendezvous)
    try:
        members = [cluster.join(expected=1) for _ in range(2)]
        settle(cluster)
        leases = list(cluster.store._leases)
        for node in members:
            node.link.is_cut = True
        for lease in leases:
            lease.deadline_s += 30.0
        spend(cluster, 30.0)
        settle(cluster)
        assert list(cluster.rounds()) == [1]
        assert cluster.can_commit(cluster.rounds()[1])
    finally:
        cluster.close()
