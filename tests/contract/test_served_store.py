from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_contract import StoreContract, Watcher, answer
from store_server import CLOCK, connect, serve
from waiting import wait_until

from elastictrain.errors import StoreError
from elastictrain.rendezvous.served.served_store import ServedStore
from elastictrain.rendezvous.store import Inbox


def let_pass(seconds: float) -> None:
    until_s = CLOCK.now_s() + seconds
    wait_until(lambda: CLOCK.now_s() >= until_s, seconds + 5.0)


@pytest.fixture(params=[None, "a secret"], ids=["open", "secret"])
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    running = serve(secret=request.param)
    running.word = request.param
    yield running
    running.close(linger_s=0.0)


class TestServedStore(StoreContract):
    ttl_s = 1.5

    @pytest.fixture
    def store(self, server: Any) -> Iterator[ServedStore]:
        store = connect(server.port, secret=server.word)
        yield store
        store.close()

    @pytest.fixture
    def expire(self) -> Callable[[], None]:
        return lambda: let_pass(self.ttl_s * 1.2)

    @pytest.fixture
    def half_expire(self) -> Callable[[], None]:
        return lambda: let_pass(self.ttl_s / 2)

    def test_l2_expiry_counts_from_the_sending_when_renewed(self, store: ServedStore) -> None:
        began_s = CLOCK.now_s()
        lease = store.lease(5.0)
        assert lease.expires_at_s() == math.inf or lease.expires_at_s() < began_s + 10.0
        wait_until(lambda: lease.expires_at_s() < math.inf)
        first_s = lease.expires_at_s()
        assert began_s + 5.0 <= first_s <= CLOCK.now_s() + 5.0
        sent_s = CLOCK.now_s()
        lease.keep_alive()
        wait_until(lambda: lease.expires_at_s() > first_s)
        assert sent_s + 5.0 <= lease.expires_at_s() <= CLOCK.now_s() + 5.0

    def test_lease_is_refused_when_it_never_ends(self, store: ServedStore) -> None:
        with pytest.raises(StoreError, match="expected more than 0 s and an end"):
            store.lease(math.inf)

    def test_two_clients_see_each_other_when_they_share_a_server(self, server: Any, store: ServedStore) -> None:
        other = connect(server.port, secret=server.word)
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

    def test_create_has_one_winner_when_clients_race(self, server: Any) -> None:
        stores = [connect(server.port, secret=server.word) for _ in range(6)]
        try:
            for number in range(20):
                futures = [store.create(f"/run/{number}", {"by": place}) for place, store in enumerate(stores)]
                assert sorted(answer(future) for future in futures) == [False] * 5 + [True]
        finally:
            for store in stores:
                store.close()

    def test_keys_vanish_when_a_client_is_gone_without_a_word(
        self, server: Any, store: ServedStore, watcher: Watcher
    ) -> None:
        other = connect(server.port, secret=server.word)
        answer(other.put("/run/a", {}, lease=other.lease(self.ttl_s)))
        other.close()
        watcher.take(2)
        assert watcher.event().value is None

    def test_store_is_refused_everything_when_closed(self, server: Any) -> None:
        store = connect(server.port, secret=server.word)
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

    def test_value_is_refused_when_it_is_huge(self, store: ServedStore) -> None:
        with pytest.raises(StoreError, match="more than"):
            answer(store.put("/run/a", {"x": "y" * (1 << 21)}))
        answer(store.put("/run/a", {"x": "\ud800 y" * 1000}))
