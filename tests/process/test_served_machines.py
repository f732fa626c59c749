"""Machines of their own, with a network that fails, meet without etcd."""

from __future__ import annotations

from pathlib import Path

import pytest
from network import listening, run_network, why_not
from support_nodes import Site, ranges
from waiting import wait_until

PORT = 29400
pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.mark.slow
def test_machine_that_is_cut_off_is_left_behind_and_comes_back(tmp_path: Path) -> None:
    """Also: the store listens where the name says and nowhere else, and others reach it there."""
    with run_network() as network:
        hosts = {name: network.add(name) for name in "abc"}
        site = Site(None, tmp_path, epochs=40, nnodes="2:3")
        site.endpoint = hosts["a"].address
        try:
            for name in "abc":
                site.start(name, wrapper=hosts[name].prefix)
            first = site.wait_round(3)
            site.wait_steps(5)
            assert f"serves the store to the others at {hosts['a'].address}:{PORT}" in site.log("a")
            for name in "abc":
                where = {address for address, port in listening(site.nodes[name].pid) if port == PORT}
                assert where == ({hosts["a"].address} if name == "a" else set())
            agents = {one["pid"]: one["node"] for one in site.ledger("node_started")}
            nodes = {name: agents[site.nodes[name].pid] for name in "abc"}
            kept = {one["pid"] for one in site.ledger("worker_started")}
            assert len(kept) == 3
            network.cut(hosts["c"])
            without = site.wait_round(2, after=first)
            site.wait_steps(5)
            made = next(one for one in site.ledger("round") if one["generation"] == without)
            assert {seat[2] for seat in made["seats"]} == {nodes["a"], nodes["b"]}
            wait_until(lambda: "is away" in site.log("c"), 30, site.logs)
            network.heal()
            site.wait_round(3, after=without)
            assert {site.ends(name) for name in site.nodes} == {0}, site.logs()
            assert {one["pid"] for one in site.ledger("worker_started")} == kept, "all workers are still the same"
            assert all(times == 1 for times in ranges(site).values())
            site.prove(40)
        finally:
            site.close()
