from __future__ import annotations

import math
import select
from collections.abc import Callable

import pytest
from store_contract import StoreContract, Watcher

from elastictrain.clock import ManualClock
from elastictrain.rendezvous.embedded import EmbeddedStore


class TestEmbeddedStore(StoreContract):
    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    def store(self, clock: ManualClock) -> EmbeddedStore:  # type: ignore[override]
        return EmbeddedStore(clock)

    @pytest.fixture
    def expire(self, clock: ManualClock, store: EmbeddedStore) -> Callable[[], None]:  # type: ignore[override]
        def let_pass() -> None:
            clock.advance(self.ttl_s)
            store.expire_leases()

        return let_pass

    @pytest.fixture
    def half_expire(self, clock: ManualClock) -> Callable[[], None]:  # type: ignore[override]
        return lambda: clock.advance(self.ttl_s / 2)

    def test_l2_lease_is_held_until_the_time_it_names(self, clock: ManualClock, store: EmbeddedStore) -> None:
        lease = store.lease(4.0)
        assert lease.expires_at_s() == store.next_expiry_s() == 4.0
        clock.advance(3.0)
        lease.keep_alive()
        assert lease.expires_at_s() == 7.0

    def test_lease_never_expires_when_its_ttl_is_infinite(
        self, clock: ManualClock, store: EmbeddedStore, watcher: Watcher
    ) -> None:
        lease = store.lease(math.inf)
        store.put("/run/a", {}, lease=lease).result()
        clock.advance(1e9)
        store.expire_leases()
        assert store.next_expiry_s() is None
        assert len(watcher.take(2)) == 2
        lease.revoke().result()
        assert watcher.event().value is None

    def test_inbox_reads_ready_once_per_delivery(self, store: EmbeddedStore, watcher: Watcher) -> None:
        watcher.snapshot()
        assert watcher.inbox.drain() == []
        watcher.inbox.wake()
        watcher.inbox.wake()
        assert select.select([watcher.inbox], [], [], 0)[0]
        assert watcher.inbox.drain() == []
        assert not select.select([watcher.inbox], [], [], 0)[0]
