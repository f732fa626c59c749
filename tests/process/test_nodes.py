"""Several agents meet at a real etcd: they train together, lose each other, come back, and leave a proof behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import BINARIES, NO_SERVER, Cluster, run_cluster
from support_nodes import TTL_S, Site, ranges

pytestmark = pytest.mark.skipif(not BINARIES, reason=NO_SERVER)


@pytest.fixture
def etcd() -> Iterator[Cluster]:
    with run_cluster() as cluster:
        yield cluster


# In the larger run nodes do not see each other: keepers do, and decide for all.
few_and_many = pytest.mark.parametrize("site", ["1:3", "1:40"], indirect=True, ids=["all see all", "keepers"])


@pytest.fixture
def site(request: pytest.FixtureRequest, etcd: Cluster, tmp_path: Path) -> Iterator[Site]:
    made = Site(etcd, tmp_path, epochs=14, nnodes=getattr(request, "param", "1:3"))
    yield made
    made.close()


@few_and_many
def test_survivors_keep_their_processes_when_the_first_node_is_killed_and_another_comes(site: Site) -> None:
    for name in ("a", "b"):
        site.start(name)
    first = site.wait_round(2)
    site.wait_steps(8)
    agents = {one["node"]: one["pid"] for one in site.ledger("node_started")}
    # The node of rank 0, which also serves the store of the process group.
    victim = next(one["seats"][0][2] for one in site.ledger("round") if one["generation"] == first)
    (survivor,) = set(agents) - {victim}
    pids = {one["pid"] for one in site.ledger("worker_started") if one["node"] == survivor}
    os.kill(agents[victim], signal.SIGKILL)
    alone = site.wait_round(1, after=first)
    site.wait_steps(4)
    site.start("c")
    site.wait_round(2, after=alone)
    codes = {name: site.ends(name) for name, node in site.nodes.items() if node.pid != agents[victim]}
    assert set(codes.values()) == {0}, site.logs()
    started = {one["pid"] for one in site.ledger("worker_started") if one["node"] == survivor}
    assert started == pids, "the survivor's worker is still the same process"
    assert len(list(site.records.glob("end-*"))) == 2
    assert all(times == 1 for times in ranges(site).values())
    site.prove(14)
    assert list(site.etcd.values("/elastictrain/")) == ["/elastictrain/job/closed"]


@few_and_many
def test_node_leaves_without_a_failed_step_when_it_gets_sigterm(site: Site) -> None:
    for name in ("a", "b"):
        site.start(name)
    first = site.wait_round(2)
    site.wait_steps(5)
    site.nodes["b"].send_signal(signal.SIGTERM)
    assert site.ends("b") == 75, site.logs()
    site.wait_round(1, after=first)
    assert site.ends("a") == 0, site.logs()
    assert not [one for one in site.ledger("broken") if one["cause"] not in ("leave", "planned")], "nobody was aborted"
    site.prove(14)


@pytest.mark.parametrize("slow", ["stays", "leaves"])
def test_node_leaves_at_a_common_step_when_another_is_a_step_further(site: Site, slow: str) -> None:
    """One node is between two steps nearly all the time, and the other waits for it inside the next one."""
    for name in ("stays", "leaves"):
        site.start(name, environ={"TEST_PAUSE_S": "0.5" if name == slow else "0"})
    first = site.wait_round(2)
    site.wait_steps(3)
    began_s = time.monotonic()
    site.nodes["leaves"].send_signal(signal.SIGTERM)
    assert site.ends("leaves") == 75, site.logs()
    assert time.monotonic() - began_s < 15, "long before the grace period of 30 s is over"
    site.wait_round(1, after=first)
    assert not site.ledger("broken"), "nobody was aborted"


def test_late_node_says_so_and_ends_well_when_the_run_is_over(etcd: Cluster, tmp_path: Path) -> None:
    site = Site(etcd, tmp_path, epochs=1, nnodes="1:2", pause_s=0.0)
    try:
        site.start("a")
        assert site.ends("a") == 0, site.logs()
        site.start("late")
        assert site.ends("late") == 0, site.logs()
        assert "the run is finished" in site.log("late")
        site.prove(1)
    finally:
        site.close()


def test_node_is_refused_with_both_values_when_its_options_differ(site: Site) -> None:
    site.start("a")
    site.wait_round(1)
    site.start("b", nnodes="1:2")
    assert site.ends("b") == 2
    assert "max_nodes=2" in site.log("b")
    assert "max_nodes=3" in site.log("b")
    assert "Traceback" not in site.log("b")


def test_second_run_is_refused_when_it_has_the_id_of_one_that_runs(site: Site, tmp_path: Path) -> None:
    site.start("a")
    site.wait_round(1)
    other = tmp_path / "another"
    site.start("b", "--run-dir", str(other))
    assert site.ends("b") == 2
    assert f"run_dir={other}" in site.log("b")
    assert f"run_dir={site.run_dir}" in site.log("b")
    assert "another run id" in site.log("b")
    steps = site.newest_step()
    site.wait_steps(3)
    assert site.newest_step() > steps
    assert len(site.ledger("round")) == 1, "the first run goes on undisturbed"


def test_generations_go_on_when_all_nodes_and_etcd_have_lost_everything(site: Site) -> None:
    for name in ("a", "b"):
        site.start(name)
    site.wait_round(2)
    site.wait_steps(8)
    for node in site.nodes.values():
        node.kill()
        node.wait()
    newest = max(one["generation"] for one in site.ledger("round"))
    site.etcd.wipe()
    for name in ("c", "d"):
        site.start(name)
    site.wait_round(2, after=newest)
    assert [site.ends(name) for name in ("c", "d")] == [0, 0], site.logs()
    lives: dict[int, set[str]] = {}
    for one in site.ledger("round"):
        lives.setdefault(one["generation"], set()).add(str(one["seats"]))
    assert all(len(seats) == 1 for seats in lives.values()), "a number names one round, over all lives of the run"
    site.prove(14)


def test_password_reaches_etcd_and_nothing_else_when_it_asks_for_one(tmp_path: Path) -> None:
    with run_cluster() as etcd:
        etcd.enable_auth("trainer", "s3cret-word", prefix="/elastictrain/")
        site = Site(etcd, tmp_path, epochs=1, nnodes="1:1", pause_s=0.0)
        environ = {"ELASTICTRAIN_ETCD_PASSWORD": "s3cret-word"}
        try:
            site.start("a", "--rdzv-conf", f"ttl={TTL_S},user=trainer", environ=environ)
            assert site.ends("a") == 0, site.logs()
            site.start("b", "--rdzv-conf", "user=trainer", environ={"ELASTICTRAIN_ETCD_PASSWORD": "wrong"})
            assert site.ends("b") == 2, site.logs()
        finally:
            site.close()
    assert "Traceback" not in site.log("b")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"s3cret-word" not in path.read_bytes(), path
