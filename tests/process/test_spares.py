"""Spares take the places of lost workers: at once, as the workers of these places in every respect, and at no risk."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from etcd_server import BINARIES, NO_SERVER, run_cluster
from support_nodes import Site, ranges
from support_runs import Job, events, find_marked, finish, read_ledger, started, steps_by_records, wait_for
from waiting import wait_until

from elastictrain.priority import FIRST_TO_END, LOWEST_NICE, can_take_back_nice, own_nice, own_oom_score

SCRIPT = Path(__file__).with_name("support_spares.py")
SAMPLES, BATCH = 101, 8
SLOW_S = 1.5
WAIT_S = 40.0


@contextlib.contextmanager
def training(
    folder: Path, *script_args: str, spares: str = "1", nproc: int = 2, options: tuple[str, ...] = ()
) -> Iterator[Job]:
    """A run of support_spares.py, which trains slowly until `hurry`."""
    folder.mkdir(exist_ok=True)
    (folder / "records").mkdir()
    words = ["run", "--nproc-per-node", str(nproc), "--run-dir", str(folder / "run"), "--spares", spares, *options]
    with started(folder, *words, SCRIPT, "--out", str(folder / "records"), *script_args) as job:
        yield job


def hurry(job: Job) -> None:
    (job.folder / "records" / "hurry").touch()


def told(job: Job, moment: str, pid: int) -> dict[str, Any]:
    return json.loads((job.folder / "records" / f"{moment}-{pid}.json").read_text())


def worker_at(job: Job, local_rank: int) -> int:
    """The pid of the newest worker of a place."""
    return [one["pid"] for one in events(job.folder / "run", "worker_started") if one["local_rank"] == local_rank][-1]


def wait_committed(job: Job, more: int) -> None:
    seen = len(events(job.folder / "run", "commit"))
    wait_for(job, "commit", seen + more)


def assert_undisturbed(job: Job, epochs: int = 16) -> None:
    """The run has ended well, and what it trained on is the data set once for each epoch, in the records' words too."""
    assert job.wait() == 0, job.err()
    command = [sys.executable, "-m", "elastictrain", "verify", str(job.folder / "run")]
    verified = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert verified.returncode == 0, verified.stdout
    steps = steps_by_records(job.folder, ["run"])
    assert sorted(steps) == list(range(1, epochs * (SAMPLES // BATCH + 1) + 1))
    per_epoch = SAMPLES // BATCH + 1
    for epoch in range(epochs):
        ids = sorted(number for step in range(per_epoch) for number in steps[epoch * per_epoch + step + 1][0])
        assert ids == list(range(SAMPLES)), f"epoch {epoch}"


def weights(job: Job) -> dict[str, torch.Tensor]:
    return torch.load(job.folder / "records" / "final.pt", weights_only=True)


def assert_same_weights(one: Job, other: Job) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    with training(tmp_path_factory.mktemp("undisturbed"), "--pause-s", "0", spares="0") as job:
        assert_undisturbed(job)
    return job


def lose_one(job: Job, *, source: str) -> dict[str, Any]:
    """Kill the worker of place 1 once the run is under way; gives the record of its replacement."""
    wait_for(job, "commit", 10)
    if source == "spare":
        wait_for(job, "spare_ready")
    os.kill(worker_at(job, 1), signal.SIGKILL)
    (replaced,) = wait_for(job, "replaced")
    wait_committed(job, 5)
    hurry(job)
    return replaced


def test_world_is_whole_much_sooner_when_a_spare_waits_than_without(undisturbed: Job, tmp_path: Path) -> None:
    seconds = {}
    for source, spares in (("spare", "1"), ("new", "0")):
        with training(tmp_path / source, "--slow-s", str(SLOW_S), spares=spares, options=("--tee", "3")) as job:
            replaced = lose_one(job, source=source)
            assert_undisturbed(job)
        assert_same_weights(job, undisturbed)
        run_dir = job.folder / "run"
        begun = events(run_dir, "worker_started")
        assert [one["local_rank"] for one in begun].count(0) == 1, "the survivor is the process it was"
        assert len(begun) == 3
        ends = {int(path.name.removeprefix("end-")) for path in (job.folder / "records").glob("end-*")}
        assert ends == {worker_at(job, 0), worker_at(job, 1)}
        sizes = [one["world_size"] for one in events(run_dir, "round")]
        assert sizes in ([2, 1, 2], [2, 2]), "a spare may be there before the survivor stands still"
        assert source == "spare" or sizes == [2, 1, 2]
        assert (replaced["source"], replaced["local_rank"]) == (source, 1)
        seconds[source] = replaced["seconds"]
    assert seconds["new"] >= SLOW_S
    assert seconds["spare"] < seconds["new"] / 3

    spare = events(tmp_path / "spare" / "run", "spare_ready")[0]
    begun = events(tmp_path / "spare" / "run", "worker_started")
    assert begun[-1]["pid"] == spare["pid"], "the replacement is the process that waited"
    assert begun[-1]["spare"] is True
    assert begun[-1]["attempt"] == 1
    assert not events(tmp_path / "new" / "run", "spare_ready")
    assert_output_moved(tmp_path / "spare", spare["pid"])


def assert_output_moved(folder: Path, pid: int) -> None:
    """What the spare printed lies in a file of its own; from its place on it prints where this place does."""
    (log,) = (folder / "run" / "logs").glob("spares-*.log")
    assert f"before {pid}\n" in log.read_text()
    assert f"after {pid}\n" not in log.read_text()
    assert (folder / "run" / "logs" / "attempt_1" / "1" / "stdout.log").read_text() == f"after {pid}\n"
    shown = (folder / "run.out").read_text().splitlines()
    assert f"[default1]:after {pid}" in shown
    assert not [line for line in shown if f"before {pid}" in line]


def test_spare_is_nobody_until_it_is_the_worker_of_a_place(tmp_path: Path) -> None:
    """Environment, priority and standing with the system: those of a spare while it waits, then those of a worker."""
    with training(tmp_path) as job:
        (spare,) = wait_for(job, "spare_ready")
        before = told(job, "before", spare["pid"])
        lose_one(job, source="spare")
        assert job.wait() == 0, job.err()
    assert not {"LOCAL_RANK", "RANK", "ROLE_RANK", "TORCHELASTIC_RESTART_COUNT"} & before["environ"].keys()
    assert before["environ"]["WORLD_SIZE"] == before["environ"]["LOCAL_WORLD_SIZE"] == "2"
    assert before["nices"] == [LOWEST_NICE if can_take_back_nice() else own_nice()]
    assert before["autogroup"] in {"0", str(LOWEST_NICE)}
    assert before["oom_score"] == FIRST_TO_END

    after = told(job, "after", spare["pid"])
    environ = after["environ"]
    assert (environ["LOCAL_RANK"], environ["ROLE_RANK"], environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "1", "1")
    assert after["local_rank"] == 1
    assert after["rank"] >= 2, "a number outside the world until it enters"
    assert set(after["nices"]) == {own_nice()}
    assert len(after["nices"]) > 1, "all threads of the process, not just its first"
    assert (after["autogroup"], after["oom_score"]) == ("0", own_oom_score())
    survivor = told(job, "after", worker_at(job, 0))
    assert environ.keys() == survivor["environ"].keys()


def test_status_and_metrics_show_a_spare_while_it_waits(tmp_path: Path) -> None:
    with training(tmp_path, "--epochs", "30", "--slow-spare-s", "3", spares="2") as job:
        spares = {one["worker_id"]: one for one in wait_for(job, "spare_ready", 2)}
        command = [sys.executable, "-m", "elastictrain", "status", str(tmp_path / "run")]
        shown = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True, timeout=30).stdout)
        assert {one["worker_id"]: one["pid"] for one in shown["spares"]} == {
            name: one["pid"] for name, one in spares.items()
        }
        assert all(one["memory_bytes"] > 1 << 20 for one in shown["spares"])
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        assert text.count("waits in init()") == 2
        (facts,) = (tmp_path / "run" / "agents").glob("*.json")
        url = json.loads(facts.read_text())["metrics_url"]

        def metrics() -> list[str]:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return [line for line in answer.read().decode().splitlines() if line.startswith("elastictrain_")]

        def waiting() -> list[str]:
            return [line.split()[-1] for line in metrics() if line.startswith("elastictrain_spares{")]

        assert waiting() == ["2.0"]
        os.kill(worker_at(job, 0), signal.SIGKILL)
        (replaced,) = wait_for(job, "replaced")
        assert waiting() == ["1.0"], "the next one takes some seconds to start"
        counted = [line for line in metrics() if line.startswith("elastictrain_replacement_seconds_count{")]
        assert [line.split()[-1] for line in counted if 'source="spare"' in line] == ["1.0"]
        assert [line.split()[-1] for line in counted if 'source="new"' in line] == ["0.0"]
        assert replaced["worker_id"] in spares
        wait_for(job, "spare_ready", 3)
        entered, refilled = (events(tmp_path / "run", name)[-1]["seq"] for name in ("replaced", "spare_ready"))
        assert entered < refilled, "another spare, after the first was in"
        hurry(job)
        assert job.wait() == 0, job.err()


def test_spare_that_is_killed_is_replaced_and_charged_to_nobody(tmp_path: Path) -> None:
    """Not one failure is allowed. Each spare that is lost makes the next one wait longer."""
    with training(tmp_path, "--epochs", "24", options=("--max-restarts", "0")) as job:
        for number in (1, 2):
            spare = wait_for(job, "spare_ready", number)[-1]
            os.kill(spare["pid"], signal.SIGKILL)
            lost = wait_for(job, "spare_lost", number)[-1]
            assert lost["pid"] == spare["pid"]
            assert "SIGKILL" in lost["reason"]
        wait_for(job, "spare_ready", 3)
        hurry(job)
        assert_undisturbed(job, epochs=24)
    run_dir = tmp_path / "run"
    losses, ready = events(run_dir, "spare_lost"), events(run_dir, "spare_ready")
    pauses = [ready[number + 1]["mono"] - ready[number + 1]["seconds"] - losses[number]["mono"] for number in (0, 1)]
    assert pauses[0] >= 1.0
    assert pauses[1] >= 2.0
    for name in ("failure", "broken", "worker_exited", "spares_off"):
        assert not [one for one in events(run_dir, name) if one.get("cause") != "finished"], name
    assert len(events(run_dir, "worker_started")) == 2


def test_each_place_gets_somebody_when_two_workers_are_killed_and_one_spare_waits(tmp_path: Path) -> None:
    with training(tmp_path, "--slow-s", "0.5", nproc=3) as job:
        wait_for(job, "spare_ready")
        for local_rank in (1, 2):
            os.kill(worker_at(job, local_rank), signal.SIGKILL)
        replaced = wait_for(job, "replaced", 2)
        hurry(job)
        assert_undisturbed(job)
    assert [one["source"] for one in replaced] == ["spare", "new"]
    assert {one["local_rank"] for one in replaced} == {1, 2}
    assert [one["world_size"] for one in events(tmp_path / "run", "round")][-1] == 3


def test_only_worker_begins_again_in_a_spare_when_it_is_killed(tmp_path: Path) -> None:
    """Of one place a spare knows everything but the number of the attempt."""
    options = ("--checkpoint-every", "5steps")
    with training(tmp_path, nproc=1, options=options) as job:
        (spare,) = wait_for(job, "spare_ready")
        wait_for(job, "checkpoint")
        os.kill(worker_at(job, 0), signal.SIGKILL)
        (replaced,) = wait_for(job, "replaced")
        hurry(job)
        assert_undisturbed(job)
    assert replaced["source"] == "spare"
    assert events(tmp_path / "run", "resumed")[0]["path"]
    environ = told(job, "before", spare["pid"])["environ"]
    assert (environ["LOCAL_RANK"], environ["RANK"]) == ("0", "0")
    assert "TORCHELASTIC_RESTART_COUNT" not in environ


def test_spares_are_given_up_when_the_script_can_run_only_as_often_as_there_are_places(
    tmp_path: Path, unused_ports: int
) -> None:
    """The spare finds its port taken. The run is not disturbed, and a lost worker is replaced as without spares."""
    with training(tmp_path, "--port", str(unused_ports)) as job:
        (off,) = wait_for(job, "spares_off")
        assert "Address already in use" in off["reason"]
        (log,) = (tmp_path / "run" / "logs").glob("spares-*.log")
        assert str(log) in off["reason"]
        assert log.read_text().count("Address already in use") == 2
        os.kill(worker_at(job, 1), signal.SIGKILL)
        (replaced,) = wait_for(job, "replaced")
        hurry(job)
        assert_undisturbed(job)
    assert replaced["source"] == "new"
    assert len(events(tmp_path / "run", "failure")) == 1, "the killed worker alone"
    assert job.err().count("no more spares") == 1


@pytest.fixture
def unused_ports() -> int:
    """The first of two ports beside each other that nobody listens at."""
    import socket

    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
                return port


def test_run_stops_as_it_would_without_when_it_is_asked_to_and_a_spare_waits(tmp_path: Path) -> None:
    with training(tmp_path) as job:
        (spare,) = wait_for(job, "spare_ready")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 75, job.err()
        assert not job.pids()
    assert not events(tmp_path / "run", "failure")
    assert not events(tmp_path / "run", "spare_lost")
    assert str(spare["pid"]) not in {path.name for path in Path("/proc").iterdir()}
    hurry(job)
    done = finish(tmp_path, "resume", tmp_path / "run", leg="resumed", env={"TEST_LEG": "run"})
    assert done.process.returncode == 0, done.err()


def test_spare_ends_at_once_when_the_agent_is_killed(tmp_path: Path) -> None:
    """Also one that has not come to `init()` yet."""
    for slow_s in (0, 30):
        with training(tmp_path / str(slow_s), "--pause-s", "0.2", "--slow-spare-s", str(slow_s)) as job:
            if slow_s:
                began = (job.folder / "records").glob
                wait_until(lambda began=began: len(list(began("before-*"))) == 3, WAIT_S)
            else:
                wait_for(job, "spare_ready")
            os.kill(job.process.pid, signal.SIGKILL)
            wait_until(lambda job=job: not job.pids(), 5)


def test_script_that_does_not_join_is_started_once_for_each_place(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import os, pathlib, threading\n"
        f"pathlib.Path({str(tmp_path)!r}, f'plain-{{os.getpid()}}').touch()\n"
        "threading.Event().wait(4)\n"
    )
    job = finish(tmp_path, "run", "--nproc-per-node", "2", "--run-dir", tmp_path / "run", "--spares", "1", script)
    assert job.process.returncode == 0, job.err()
    assert len(list(tmp_path.glob("plain-*"))) == 2


def test_no_spare_is_left_when_training_ends(tmp_path: Path) -> None:
    with training(tmp_path, spares="auto") as job:
        (spare,) = wait_for(job, "spare_ready")
        hurry(job)
        assert_undisturbed(job)
    assert not find_marked("TEST_LEG=run", tmp_path)
    assert {one["event"] for one in read_ledger(tmp_path / "run")} & {"failure", "spare_lost", "broken"} == set()
    assert not list((tmp_path / "records").glob(f"end-{spare['pid']}"))


PROGRAM = """
import os, pathlib, sys, threading
import torch
import elastictrain


def train(folder):
    run = elastictrain.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    dataset = torch.utils.data.TensorDataset(torch.ones(40, 2))
    for step in run.steps(dataset, 4, epochs=30):
        with step as (batch,):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if not (pathlib.Path(folder) / "hurry").exists():
            threading.Event().wait(0.1)


def train_at(local_rank, folder):
    train(folder)


if __name__ == "__main__":
    folder, which, spares = sys.argv[1:]
    function = {"train": train, "train_at": train_at}[which]
    elastictrain.launch(function, args=(folder,), nproc_per_node=2, run_dir=f"{folder}/run", spares=spares)
    print("launch returned")
"""


@contextlib.contextmanager
def launched(folder: Path, which: str) -> Iterator[Job]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with (folder / "run.out").open("wb") as out, (folder / "run.err").open("wb") as err:
        command = [sys.executable, str(program), str(folder), which, "1"]
        process = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield Job(process, folder, "run")
    finally:
        process.kill()
        process.wait()


def test_launched_function_has_a_spare_unless_it_gets_its_local_rank(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("train", "train_at")]
    for folder in folders:
        folder.mkdir()
    with launched(folders[0], "train") as job:
        (spare,) = wait_for(job, "spare_ready")
        os.kill(worker_at(job, 1), signal.SIGKILL)
        (replaced,) = wait_for(job, "replaced")
        (folders[0] / "hurry").touch()
        assert job.wait() == 0, job.err()
        assert "launch returned" in job.out()
    assert replaced["worker_id"] == spare["worker_id"]
    with launched(folders[1], "train_at") as job:
        wait_for(job, "commit", 40)
        (folders[1] / "hurry").touch()
        assert job.wait() == 0, job.err()
    assert "spares: no effect here" in job.err()
    assert not [one for one in read_ledger(folders[1] / "run") if "spare" in one["event"]]


@pytest.mark.skipif(not BINARIES, reason=NO_SERVER)
def test_spare_of_a_node_takes_the_place_of_its_worker_when_nodes_train_together(tmp_path: Path) -> None:
    with run_cluster() as cluster:
        site = Site(cluster, tmp_path, epochs=30, pause_s=0.05)
        try:
            for name in ("a", "b"):
                site.start(name, "--spares", "1")
            site.wait_round(2)
            wait_until(lambda: len(site.ledger("spare_ready")) == 2, WAIT_S, site.logs)
            victim, other = site.ledger("worker_started")
            os.kill(victim["pid"], signal.SIGKILL)
            (replaced,) = wait_until(lambda: site.ledger("replaced"), WAIT_S, site.logs)
            assert {site.ends(name) for name in site.nodes} == {0}, site.logs()
        finally:
            site.close()
    begun = site.ledger("worker_started")
    assert (replaced["node"], replaced["source"]) == (victim["node"], "spare")
    assert [one["pid"] for one in begun if one["node"] == other["node"]] == [other["pid"]]
    assert {one["pid"] for one in site.ledger("spare_ready") if one["node"] == victim["node"]} & {
        one["pid"] for one in begun
    }
    assert all(times == 1 for times in ranges(site).values())
    site.prove(30)
