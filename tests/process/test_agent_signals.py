"""Signals to the agent: it stops at a step, saves it and says how to go on; a second one ends everything at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support_runs import (
    Job,
    environment,
    events,
    finish,
    read_ledger,
    run_words,
    standing_commits,
    started,
    steps_by_records,
    wait_for,
)
from waiting import wait_until

STUCK = ("--pause-s", "60", "--pause-from", "2")  # behind its second step the script does something else for a minute
LONG = ("--epochs", "200", "--pause-s", "0.01")


def checkpoints(folder: Path) -> list[str]:
    return sorted(
        path.name for path in (folder / "run" / "checkpoints").glob("step-*") if (path / "manifest.json").exists()
    )


def test_agent_saves_the_last_step_and_exits_75_when_told_sigterm(tmp_path: Path) -> None:
    with started(tmp_path, *run_words(tmp_path, "--epochs", "3", "--pause-s", "0.03"), leg="first") as job:
        wait_for(job, "commit", 5)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(20) == 75, job.err()
    stopped = events(tmp_path / "run", "run_stopped")[0]
    step = stopped["step"]
    assert 5 <= step < 39
    assert stopped["exit_code"] == 75
    assert checkpoints(tmp_path) == [f"step-{step:010d}"]
    assert "elastictrain resume" in job.err().splitlines()[-1]
    assert not events(tmp_path / "run", "broken"), "no collective fails on a planned stop"

    job = finish(tmp_path, "resume", tmp_path / "run", leg="second")
    assert job.process.returncode == 0, job.err()
    commits = [entry["step"] for entry in events(tmp_path / "run", "commit")]
    assert commits == list(range(1, 40)), "no step is lost and none is done twice"
    steps = steps_by_records(tmp_path, ["first", "second"])
    seen = Counter(number for ids, _ in steps.values() for number in ids)
    assert seen == Counter(dict.fromkeys(range(101), 3))


def test_agent_saves_and_exits_130_when_told_sigint(tmp_path: Path) -> None:
    with started(tmp_path, *run_words(tmp_path, *LONG)) as job:
        wait_for(job, "commit", 3)
        os.kill(job.process.pid, signal.SIGINT)
        assert job.wait(20) == 130, job.err()
    step = events(tmp_path / "run", "run_stopped")[0]["step"]
    assert checkpoints(tmp_path) == [f"step-{step:010d}"]
    assert "Traceback" not in job.err()


def test_agent_ends_at_once_when_a_second_signal_comes(tmp_path: Path) -> None:
    """The workers are between two steps for a minute, so that they cannot stop."""
    with started(tmp_path, *run_words(tmp_path, *STUCK, options=["--checkpoint-every", "1steps"])) as job:
        wait_for(job, "commit", 2)
        job.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "SIGTERM: stopping" in job.err())
        job.process.send_signal(signal.SIGTERM)
        told_s = time.monotonic()
        assert job.wait(10) == 143, job.err()
        assert time.monotonic() - told_s < 2
        assert not job.pids()
    assert checkpoints(tmp_path) == ["step-0000000001"]


def test_agent_ends_with_its_newest_checkpoint_when_the_grace_period_is_over(tmp_path: Path) -> None:
    options = ["--checkpoint-every", "1steps", "--grace-period-s", "0.5"]
    with started(tmp_path, *run_words(tmp_path, *STUCK, options=options)) as job:
        wait_for(job, "commit", 2)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(10) == 143, job.err()
        assert "--grace-period-s is over" in job.err()
        assert not job.pids()


def test_agent_exits_75_when_sigterm_comes_while_workers_start(tmp_path: Path) -> None:
    with started(tmp_path, *run_words(tmp_path, *LONG)) as job:
        wait_until(lambda: "metrics at" in job.err(), 60)
        wait_for(job, "node_started")
        job.process.send_signal(signal.SIGTERM)
        code = job.wait(20)
        # Between the endpoint and the loop the signal still has its default meaning; nothing is left either way.
        assert code in (75, -signal.SIGTERM), job.err()
        wait_until(lambda: not job.pids(), 5)
    assert not events(tmp_path / "run", "commit")


def test_agent_saves_the_committed_step_when_sigterm_meets_a_failure(tmp_path: Path) -> None:
    with started(tmp_path, *run_words(tmp_path, *LONG, nproc=3), leg="first") as job:
        wait_for(job, "commit", 5)
        victim = events(tmp_path / "run", "worker_started")[0]["pid"]
        os.kill(victim, signal.SIGKILL)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(20) == 75, job.err()
    step = events(tmp_path / "run", "run_stopped")[0]["step"]
    assert standing_commits(read_ledger(tmp_path / "run"))[-1]["step"] == step
    assert checkpoints(tmp_path)[-1] == f"step-{step:010d}"


@pytest.mark.skipif(os.geteuid() != 0, reason="unshare --pid needs root")
def test_agent_stops_and_reaps_when_it_is_process_one(tmp_path: Path) -> None:
    """In a container nobody else adopts orphans, and a signal without a handler never arrives."""
    script = tmp_path / "orphans.py"
    script.write_text(
        "import os, subprocess, threading, elastictrain\n"
        "run = elastictrain.init()\n"
        "if run.local_rank == 0:\n"
        "    for _ in range(3):\n"
        "        subprocess.run(['sh', '-c', 'setsid sh -c \"exit 0\" & setsid sleep 0.1 & exit 0'])\n"
        "open('up-' + str(run.local_rank), 'w').close()\n"
        "threading.Event().wait(600)\n"
    )
    if subprocess.run(["unshare", "-fp", "--mount-proc", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no PID namespaces")
    words = ["run", "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), str(script)]
    command = ["unshare", "-fp", "--mount-proc", "--kill-child", sys.executable, "-m", "elastictrain", *words]
    env = environment(TEST_LEG="one", TEST_FOLDER=str(tmp_path))
    with (tmp_path / "one.err").open("wb") as err, (tmp_path / "one.out").open("wb") as out:
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=out, stderr=err)
    job = Job(process, tmp_path, "one")
    try:
        wait_until(lambda: (tmp_path / "up-0").exists() and (tmp_path / "up-1").exists(), 60, job.err)
        agent = child_of(process.pid)
        wait_until(lambda: not zombies_below(agent), 5, lambda: zombies_below(agent))
        os.kill(agent, signal.SIGTERM)
        assert process.wait(20) == 75, job.err()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def zombies_below(pid: int) -> list[int]:
    """Descendants that ended and were not waited for."""
    found = []
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        for child in children:
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                found.append(child)
            found.extend(zombies_below(child))
    except OSError:
        pass
    return found
