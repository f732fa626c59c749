"""Several agents meet without etcd: one of them serves the store, dies, and comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_nodes import TTL_S, Site, ranges
from waiting import wait_until

# What other machines are: they cannot serve the store in its place.
ELSEWHERE = {"is_host": "false"}
SECRET = "s3cret-word-of-this-test"


@contextlib.contextmanager
def run_site(folder: Path, **options: Any) -> Iterator[Site]:
    site = Site(None, folder, **{"epochs": 14, **options})
    try:
        yield site
    finally:
        site.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with run_site(tmp_path) as made:
        yield made


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def workers_of(site: Site, *names: str) -> set[int]:
    """Pids of all workers that these agents have ever started."""
    pids = {one["node"]: one["pid"] for one in site.ledger("node_started")}
    nodes = {node for node, pid in pids.items() if pid in {site.nodes[name].pid for name in names}}
    return {one["pid"] for one in site.ledger("worker_started") if one["node"] in nodes}


def prove(site: Site, epochs: int = 14) -> None:
    assert all(times == 1 for times in ranges(site).values())
    site.prove(epochs)


@pytest.mark.slow
def test_survivors_wait_and_go_on_in_their_processes_when_the_serving_node_is_killed_and_comes_back(
    tmp_path: Path,
) -> None:
    with run_site(tmp_path, epochs=18, nnodes="2:3") as site:
        site.start("a")
        for name in ("b", "c"):
            site.start(name, conf=ELSEWHERE)
        first = site.wait_round(3)
        site.wait_steps(8)
        kept = workers_of(site, "b", "c")
        assert len(kept) == 2
        site.kill("a")
        for name in ("b", "c"):
            wait_until(lambda name=name: "is away" in site.log(name), 20, site.logs)  # type: ignore[misc]
        pause(1.5 * TTL_S)
        step = site.newest_step()
        pause(0.5)
        assert site.newest_step() == step, "nobody goes on alone"
        assert {one["generation"] for one in site.ledger("round")} == {first}
        site.start("a again")
        site.wait_round(3, after=first)  # maybe after one of the two survivors
        assert {site.ends(name) for name in site.nodes} == {0}, site.logs()
        assert workers_of(site, "b", "c") == kept, "the survivors' workers are still the same processes"
        generations = [one["generation"] for one in site.ledger("round") if one["node"] in survivors_of(site)]
        assert min(generations) == first
        assert len(site.ledger("resumed")) == 0, "nobody went back to a checkpoint"
        prove(site, 18)


def survivors_of(site: Site) -> set[str]:
    pids = {site.nodes[name].pid for name in ("b", "c")}
    return {one["node"] for one in site.ledger("node_started") if one["pid"] in pids}


def test_another_agent_of_the_machine_serves_when_the_serving_one_is_killed(site: Site) -> None:
    for name in ("a", "b"):
        site.start(name)
    first = site.wait_round(2)
    site.wait_steps(8)
    serving = next(name for name in "ab" if "serves the store" in site.log(name))
    (other,) = {"a", "b"} - {serving}
    kept = workers_of(site, other)
    site.kill(serving)
    alone = site.wait_round(1, after=first)
    site.wait_steps(3)
    site.start("c")
    site.wait_round(2, after=alone)
    assert {site.ends(name) for name in site.nodes} == {0}, site.logs()
    assert workers_of(site, other) == kept
    prove(site)


def test_training_goes_on_and_a_lost_worker_waits_when_the_serving_agent_is_stopped(tmp_path: Path) -> None:
    with run_site(tmp_path, nnodes="2:2") as site:
        site.start("a")
        site.start("b", conf=ELSEWHERE)
        first = site.wait_round(2)
        site.wait_steps(5)
        (victim,) = workers_of(site, "b")
        (kept,) = workers_of(site, "a")
        site.nodes["a"].send_signal(signal.SIGSTOP)
        try:
            before = site.newest_step()
            pause(1.5 * TTL_S)
            site.wait_steps(3)
            assert site.newest_step() > before
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda: site.ledger("broken"), 20, site.logs)
            pause(1.0)
            assert {one["generation"] for one in site.ledger("round")} == {first}
        finally:
            site.nodes["a"].send_signal(signal.SIGCONT)
        site.wait_round(2, after=first)
        assert {site.ends(name) for name in site.nodes} == {0}, site.logs()
        assert workers_of(site, "a") == {kept}
        assert len(workers_of(site, "b")) == 2
        prove(site)


@pytest.mark.slow
def test_the_others_train_on_when_the_serving_node_leaves(tmp_path: Path) -> None:
    with run_site(tmp_path, nnodes="1:3") as site:
        site.start("a")
        for name in ("b", "c"):
            site.start(name, conf=ELSEWHERE)
        first = site.wait_round(3)
        site.wait_steps(5)
        kept = workers_of(site, "b", "c")
        site.nodes["a"].send_signal(signal.SIGTERM)
        assert site.ends("a") == 75, site.logs()
        site.wait_round(2, after=first)
        site.wait_steps(5)
        assert {site.ends(name) for name in ("b", "c")} == {0}, site.logs()
        assert workers_of(site, "b", "c") == kept
        assert not [one for one in site.ledger("broken") if one["cause"] not in ("leave", "planned")]
        prove(site)


@pytest.mark.slow
def test_run_goes_on_at_once_when_all_nodes_were_killed(tmp_path: Path) -> None:
    """The last rank 0 is seen to be dead, so no survivor is waited for, who would get more than a minute."""
    with run_site(tmp_path, nnodes="2:2") as site:
        for name in ("a", "b"):
            site.start(name)
        first = site.wait_round(2)
        site.wait_steps(5)
        for name in ("a", "b"):
            site.kill(name)
        for name in ("c", "d"):
            site.start(name)
        site.wait_round(2, after=first)
        assert {site.ends(name) for name in site.nodes} == {0}, site.logs()
        assert any("the run was here before" in site.log(name) for name in ("c", "d"))
        site.prove(14)


def test_secret_reaches_nothing_when_the_nodes_share_one(tmp_path: Path) -> None:
    with run_site(tmp_path, nnodes="2:2", epochs=2) as site:
        file = tmp_path.with_name(f"{tmp_path.name}.secret")
        file.write_text(f"{SECRET}\n")
        site.start("a", environ={"ELASTICTRAIN_RDZV_SECRET": SECRET})
        site.start("b", conf={"secret_file": str(file)})
        site.wait_round(2)
        for pid in workers_of(site, "a"):
            # What the worker's own interpreter sees; the first environment of the process is not its own to read.
            assert SECRET not in Path(f"/proc/{pid}/cmdline").read_text()
        assert {site.ends(name) for name in site.nodes} == {0}, site.logs()
        assert "can join this run" not in site.logs()
        site.prove(2)
        file.unlink()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (SECRET, "", "asks for a secret, and this node has none"),
        ("", SECRET, "this node has a secret, and the store at"),
        (SECRET, f"{SECRET}2", "the secret of this node is not that of the store"),
    ],
    ids=["none", "only one", "another"],
)
def test_node_is_refused_in_one_line_when_its_secret_is_not_that_of_the_store(
    tmp_path: Path, first: str, second: str, says: str
) -> None:
    def environ(secret: str) -> dict[str, str]:
        return {"ELASTICTRAIN_RDZV_SECRET": secret} if secret else {}

    with run_site(tmp_path, nnodes="1:2") as site:
        site.start("a", environ=environ(first))
        site.wait_round(1)
        assert ("can join this run" in site.log("a")) == (not first)
        site.start("b", environ=environ(second))
        assert site.ends("b") == 2, site.logs()
        assert len([line for line in site.log("b").splitlines() if says in line]) == 1, site.log("b")
        assert "secret_file=FILE" in site.log("b")
        assert "Traceback" not in site.log("b")
        assert SECRET not in site.logs()
        site.wait_steps(2)


def test_node_is_refused_in_one_line_when_its_port_is_taken(tmp_path: Path) -> None:
    with run_site(tmp_path, nnodes="1:2") as site, socket.create_server(("localhost", 0)) as server:
        site.endpoint = f"localhost:{server.getsockname()[1]}"
        site.start("silent")
        ends = threading.Thread(target=answer_as_a_web_server, args=(server,), daemon=True)
        assert site.ends("silent") == 2, site.logs()
        ends.start()
        site.start("web")
        assert site.ends("web") == 2, site.logs()
        assert "taken by something that does not answer as elastictrain's store" in site.log("silent")
        assert "expected elastictrain's store, seen a greeting that begins with b'HTTP/1.1'" in site.log("web")
        for name in ("silent", "web"):
            assert site.endpoint in site.log(name)
            assert "Traceback" not in site.log(name)
        server.shutdown(socket.SHUT_RDWR)
        ends.join(5)


def answer_as_a_web_server(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            client, _ = server.accept()
            with client:
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
