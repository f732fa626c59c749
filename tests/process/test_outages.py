"""etcd fails while nodes train together: training goes on, and what happened meanwhile is dealt with afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from etcd_server import BINARIES, NO_SERVER, Cluster, run_cluster
from support_nodes import TTL_S, Site, ranges
from waiting import wait_until

pytestmark = pytest.mark.skipif(not BINARIES, reason=NO_SERVER)

# Well beyond the lease, and beyond three quarters of it, where a node that trains alone stops.
OUTAGE_S = 3.0 * TTL_S


@pytest.fixture
def trio() -> Iterator[Cluster]:
    with run_cluster(num_members=3) as cluster:
        yield cluster


def start_two(etcd: Cluster, folder: Path, epochs: int) -> Site:
    site = Site(etcd, folder, epochs=epochs, nnodes="2:3")
    try:
        for name in ("a", "b"):
            site.start(name)
        site.wait_round(2)
        site.wait_steps(3)
    except BaseException:
        site.close()
        raise
    return site


def train_through(site: Site, seconds: float) -> None:
    """Let an outage last; training must go on from its beginning to its end, on the same generation."""
    rounds = len(site.ledger("round"))
    ends = threading.Event()
    timer = threading.Timer(seconds, ends.set)
    timer.start()
    try:
        while not ends.is_set():
            site.wait_steps(5)
    finally:
        timer.cancel()
        timer.join()
    assert len(site.ledger("round")) == rounds, site.logs()
    assert not site.ledger("broken"), site.logs()


def finish(site: Site, epochs: int) -> None:
    """Kill a worker, see it replaced by a round of the survivors, and see the run through to its proof."""
    rounds = {one["generation"] for one in site.ledger("round")}
    pids = {one["pid"]: one for one in site.ledger("worker_started")}
    assert len(pids) == 2, "no worker was started anew"
    os.kill(min(pids), signal.SIGKILL)
    site.wait_round(2, after=max(rounds))
    assert {site.ends(name) for name in site.nodes} == {0}, site.logs()
    kept = {one["pid"] for one in site.ledger("worker_started")}
    assert kept >= set(pids)
    assert len(kept) == 3, "one replacement, and the other worker stayed"
    assert all(times == 1 for times in ranges(site).values())
    site.prove(epochs)


def kill_leader(etcd: Cluster) -> Callable[[], None]:
    leader = etcd.leader()
    leader.kill()
    return etcd.start


def hang_leader(etcd: Cluster) -> Callable[[], None]:
    leader = etcd.leader()
    leader.stop()
    return leader.resume


def lose_quorum(etcd: Cluster) -> Callable[[], None]:
    for member in etcd.members[:2]:
        member.kill()
    return etcd.start


def hang_all(etcd: Cluster) -> Callable[[], None]:
    for member in etcd.members:
        member.stop()

    def resume() -> None:
        for member in etcd.members:
            member.resume()

    return resume


def stop_all(etcd: Cluster) -> Callable[[], None]:
    etcd.kill()
    return etcd.start


def lose_all(etcd: Cluster) -> Callable[[], None]:
    etcd.kill()
    for member in etcd.members:
        member.wipe()
    return etcd.start


@pytest.mark.slow
@pytest.mark.parametrize("fault", [kill_leader, hang_leader, lose_quorum, stop_all, lose_all])
def test_training_goes_on_without_a_change_when_etcd_fails(
    trio: Cluster, tmp_path: Path, fault: Callable[[Cluster], Callable[[], None]]
) -> None:
    site = start_two(trio, tmp_path, 24)
    try:
        repair = fault(trio)
        train_through(site, OUTAGE_S)
        repair()
        finish(site, 24)
        if fault not in (kill_leader, hang_leader):
            assert "training goes on, a change of membership waits" in site.logs()
            assert "answers again" in site.logs()
    finally:
        site.close()


@pytest.mark.slow
def test_training_goes_on_when_the_quorum_is_lost_for_half_a_minute(trio: Cluster, tmp_path: Path) -> None:
    site = start_two(trio, tmp_path, 60)
    try:
        repair = lose_quorum(trio)
        train_through(site, 30.0)
        repair()
        finish(site, 60)
    finally:
        site.close()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [stop_all, lose_all])
def test_worker_killed_while_etcd_is_away_is_replaced_when_it_is_back(
    trio: Cluster, tmp_path: Path, fault: Callable[[Cluster], Callable[[], None]]
) -> None:
    site = start_two(trio, tmp_path, 14)
    try:
        pids = {one["pid"]: one["node"] for one in site.ledger("worker_started")}
        repair = fault(trio)
        train_through(site, 2.0)
        os.kill(min(pids), signal.SIGKILL)
        wait_until(lambda: site.ledger("failure"), 20, site.logs)
        steps = site.newest_step()
        repair()
        site.wait_round(2, after=1)
        assert {site.ends(name) for name in site.nodes} == {0}, site.logs()
        assert steps < site.newest_step()
        assert max(pids) in {one["pid"] for one in site.ledger("worker_started")}
        assert len(site.ledger("worker_started")) == 3
        site.prove(14)
    finally:
        site.close()


@pytest.mark.slow
def test_nodes_keep_their_processes_when_etcd_hangs_and_drops_their_leases_on_waking(
    trio: Cluster, tmp_path: Path
) -> None:
    site = start_two(trio, tmp_path, 24)
    try:
        repair = hang_all(trio)
        train_through(site, OUTAGE_S)
        repair()
        site.wait_steps(5)
        assert {site.ends(name) for name in site.nodes} == {0}, site.logs()
        assert len(site.ledger("worker_started")) == 2, "the processes are the same, whatever became of the leases"
        assert all(times == 1 for times in ranges(site).values())
        site.prove(24)
    finally:
        site.close()


@pytest.mark.slow
def test_node_that_trains_alone_stops_by_its_lease_and_goes_on_when_etcd_is_back(trio: Cluster, tmp_path: Path) -> None:
    site = Site(trio, tmp_path, epochs=14, nnodes="1:3")
    try:
        site.start("a")
        site.wait_round(1)
        site.wait_steps(3)
        repair = stop_all(trio)
        wait_until(lambda: site.ledger("broken"), 20, site.logs)
        steps = site.newest_step()
        threading.Event().wait(1.0)
        assert site.newest_step() <= steps + 1, "nothing is committed behind the fence"
        repair()
        assert site.ends("a") == 0, site.logs()
        assert len(site.ledger("worker_started")) == 1
        site.prove(14)
    finally:
        site.close()
