from __future__ import annotations

import math
import select
from collections.abc import Callable, Iterator

import pytest
from etcd_server import BINARIES, NO_SERVER, Cluster, run_cluster
from store_contract import StoreContract, Watcher, answer
from waiting import wait_until

from elastictrain.clock import SystemClock
from elastictrain.errors import StoreError
from elastictrain.rendezvous.etcd.etcd_store import EtcdStore
from elastictrain.rendezvous.etcd.opening import open_etcd_store
from elastictrain.rendezvous.store import Inbox, KeyEvent

CLOCK = SystemClock()


pytestmark = pytest.mark.skipif(not BINARIES, reason=NO_SERVER)


@pytest.fixture(scope="module", params=sorted(BINARIES))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with run_cluster(request.param) as running:
        yield running


@pytest.fixture
def store(cluster: Cluster) -> Iterator[EtcdStore]:
    cluster.wipe()
    store = open_etcd_store(cluster.settings(), CLOCK)
    yield store
    store.close()


class TestEtcdStore(StoreContract):
    ttl_s = 2.0

    @pytest.fixture
    def store(self, cluster: Cluster) -> Iterator[EtcdStore]:
        cluster.wipe()
        store = open_etcd_store(cluster.settings(), CLOCK)
        yield store
        store.close()

    @pytest.fixture
    def expire(self, cluster: Cluster) -> Callable[[], None]:
        def let_pass() -> None:
            wait_until(lambda: cluster.num_leases() == 0)

        return let_pass

    @pytest.fixture
    def half_expire(self) -> Callable[[], None]:
        def let_pass() -> None:
            until_s = CLOCK.now_s() + self.ttl_s / 2
            wait_until(lambda: CLOCK.now_s() >= until_s)

        return let_pass

    def test_l2_expiry_counts_from_the_sending_when_the_answer_is_late(
        self, cluster: Cluster, store: EtcdStore
    ) -> None:
        """The server hangs for a while with the renewal in its queue, and its answer comes late."""
        lease = store.lease(5.0)
        assert lease.expires_at_s() == math.inf
        wait_until(lambda: lease.expires_at_s() < math.inf)
        assert lease.ttl_s == 5.0
        first_s = lease.expires_at_s()
        assert CLOCK.now_s() + 4.0 < first_s <= CLOCK.now_s() + 5.0
        cluster.members[0].stop()
        sent_s = CLOCK.now_s()
        lease.keep_alive()
        wait_until(lambda: CLOCK.now_s() >= sent_s + 0.5)
        cluster.members[0].resume()
        wait_until(lambda: lease.expires_at_s() > first_s)
        assert lease.expires_at_s() < sent_s + 0.25 + 5.0

    def test_lease_tells_what_was_granted_when_etcd_has_whole_seconds(self, store: EtcdStore) -> None:
        lease = store.lease(1.5)
        answer(store.put("/run/a", {}, lease=lease))
        assert lease.ttl_s == 2.0

    def test_lease_is_refused_when_it_never_ends(self, store: EtcdStore) -> None:
        with pytest.raises(StoreError, match="expected more than 0 s and an end"):
            store.lease(math.inf)

    def test_owner_wakes_when_its_lease_is_found_lost(
        self, cluster: Cluster, store: EtcdStore, watcher: Watcher
    ) -> None:
        """No key hangs on the lease, so no event tells of its end."""
        lease = store.lease(2.0)
        answer(store.put("/run/a", {}, lease=lease))
        answer(store.put("/run/a", {}))
        watcher.take(3)
        cluster.ask("Lease", "LeaseRevoke", ID=lease.id)
        lease.keep_alive()
        wait_until(lambda: lease.expires_at_s() == -math.inf)
        assert select.select([watcher.inbox], [], [], 5.0)[0]
        assert watcher.inbox.drain() == []

    def test_two_stores_see_each_other_when_they_share_an_etcd(self, cluster: Cluster, store: EtcdStore) -> None:
        other = open_etcd_store(cluster.settings(), CLOCK)
        watcher = Watcher(other, "/run/")
        try:
            watcher.snapshot()
            assert answer(store.create("/run/a", {"by": "store"})) is True
            assert answer(other.create("/run/a", {"by": "other"})) is False
            assert watcher.event().value == {"by": "store"}
            answer(other.put("/run/a", {"by": "other"}))
            answer(store.put("/run/a", {"by": "store", "n": 2}))
            assert [watcher.event().value for _ in range(2)] == [{"by": "other"}, {"by": "store", "n": 2}]
        finally:
            watcher.close()
            other.close()

    def test_foreign_value_is_ignored_when_it_lies_under_the_prefix(self, cluster: Cluster, store: EtcdStore) -> None:
        cluster.ask("KV", "Put", key=b"/run/stray", value=b"\xff not ours")
        watcher = Watcher(store, "/run/")
        try:
            assert watcher.snapshot().entries == ()
            cluster.ask("KV", "Put", key=b"/run/stray", value=b"{}")
            cluster.ask("KV", "DeleteRange", key=b"/run/stray")
            answer(store.put("/run/a", {}))
            assert watcher.event().key == "/run/a"
        finally:
            watcher.close()

    def test_snapshot_replaces_the_changes_when_they_were_compacted_away(
        self, cluster: Cluster, store: EtcdStore, watcher: Watcher
    ) -> None:
        """The watch breaks, and etcd forgets what happened meanwhile before it is back."""
        answer(store.put("/run/a", {"n": 0}))
        watcher.take(2)
        (watch,) = store._watches
        cluster.ask("KV", "Put", key=b"/run/b", value=b'{"v":1,"by":"x/1","value":{"n":1}}')
        watcher.take(1)
        # What a watch asks for that was away for long: the changes behind a revision that is forgotten.
        watch._spans[0].resume_raw = watch._spans[0].seen_raw = 1
        revision = cluster.ask("KV", "Range", key=b"/run/b").header.revision
        cluster.ask("KV", "Compact", request="CompactionRequest", revision=revision)
        assert watch._stream is not None
        store.post(watch._stream.close)
        assert sorted(entry.key for entry in watcher.snapshot().entries) == ["/run/a", "/run/b"]
        answer(store.put("/run/c", {}))
        assert watcher.event().key == "/run/c"

    def test_partial_watch_tells_each_change_once_when_its_stream_broke(
        self, cluster: Cluster, store: EtcdStore
    ) -> None:
        """etcd watches each span of keys for itself: one may be told of further than another."""
        watcher = Watcher(store, "/run/", without="/run/members/", but="/run/members/a")
        try:
            assert watcher.snapshot().is_partial
            (watch,) = store._watches
            names = ["/run/config", "/run/members/a", "/run/round/1"]
            for number in range(6):
                for key in [*names, "/run/members/b"]:
                    answer(store.put(key, {"n": number}))
                if number % 2:
                    wait_until(lambda: watch._stream is not None)
                    stream = watch._stream
                    assert stream is not None
                    store.post(stream.close)
            told = [(one.key, one.value) for one in watcher.take(18) if isinstance(one, KeyEvent)]
            for name in names:
                assert [value for key, value in told if key == name] == [{"n": number} for number in range(6)]
            assert watcher.inbox.drain() == []
        finally:
            watcher.close()

    def test_store_is_refused_everything_when_closed(self, cluster: Cluster) -> None:
        store = open_etcd_store(cluster.settings(), CLOCK)
        answer(store.put("/run/a", {}))
        lease = store.lease(5.0)
        inbox = Inbox()
        watch = store.watch("/run/", inbox)
        store.close()
        store.close()
        lease.keep_alive()
        watch.close()
        inbox.close()
        with pytest.raises(StoreError, match="is closed"):
            answer(store.put("/run/a", {}))
