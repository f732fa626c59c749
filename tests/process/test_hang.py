"""Workers that live and do nothing: they are found, killed and replaced; what only takes long is let be."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support_runs import events, finish, run_words, started, wait_for

LIMIT_S = 1


@pytest.mark.parametrize(
    ("kind", "why"),
    [("stop", "stopped by a signal"), ("spin", "in a step, waiting for nobody"), ("sleep", "waiting for nobody")],
)
def test_hung_worker_is_replaced_and_the_others_keep_their_processes(tmp_path: Path, kind: str, why: str) -> None:
    options = ["--hang-timeout", str(LIMIT_S)]
    words = run_words(tmp_path, "--fail", kind, "--fail-rank", "1", "--epochs", "2", nproc=3, options=options)
    job = finish(tmp_path, *words)
    assert job.process.returncode == 0, job.err()
    run_dir = tmp_path / "run"
    (failure,) = events(run_dir, "failure")
    assert failure["rank"] == 1
    assert failure["error_type"] == "hang"
    assert why in failure["message"]
    if kind != "stop":
        assert "in fail" in failure["traceback"], "the line where it hung"
    assert events(run_dir, "broken")[0]["cause"] == "worker_hung"
    assert len(events(run_dir, "worker_started")) == 4, "one replacement, nobody else"
    assert finish(tmp_path, "verify", tmp_path / "run", leg="verify").process.returncode == 0
    assert "every sample of 2 epochs committed exactly once" in finish(tmp_path, "verify", run_dir, leg="again").out()


@pytest.mark.parametrize("extra", [("--fail", "hold"), ("--evaluate-s", "3")])
def test_worker_is_let_be_when_it_evaluates_or_holds_the_interpreter_for_long(
    tmp_path: Path, extra: tuple[str, ...]
) -> None:
    words = run_words(tmp_path, *extra, nproc=2, options=["--hang-timeout", str(LIMIT_S)])
    job = finish(tmp_path, *words)
    assert job.process.returncode == 0, job.err()
    assert events(tmp_path / "run", "failure") == []
    assert len(events(tmp_path / "run", "round")) == 1


def test_worker_that_was_stopped_for_a_moment_is_let_be(tmp_path: Path) -> None:
    words = run_words(tmp_path, "--epochs", "4", "--pause-s", "0.05", nproc=2, options=["--hang-timeout", "20"])
    with started(tmp_path, *words) as job:
        pid = wait_for(job, "worker_started", 2)[1]["pid"]
        wait_for(job, "commit", 5)
        os.kill(pid, signal.SIGSTOP)
        steps = len(events(tmp_path / "run", "commit"))
        os.kill(pid, signal.SIGCONT)
        wait_for(job, "commit", steps + 3)
        assert job.wait() == 0, job.err()
    assert events(tmp_path / "run", "failure") == []


def test_workers_are_let_be_when_the_agent_was_stopped_with_them(tmp_path: Path) -> None:
    words = run_words(tmp_path, "--epochs", "6", "--pause-s", "0.05", nproc=2, options=["--hang-timeout", str(LIMIT_S)])
    with started(tmp_path, *words) as job:
        wait_for(job, "commit", 5)
        everybody = job.pids()
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        stopped_s = LIMIT_S + 4.0
        try:
            signal.sigtimedwait([], stopped_s)
        finally:
            for pid in everybody:
                os.kill(pid, signal.SIGCONT)
        assert job.wait() == 0, job.err()
    assert events(tmp_path / "run", "failure") == []


def test_mistyped_limit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    job = finish(tmp_path, *run_words(tmp_path, options=["--hang-timeout", "soon"]))
    assert job.process.returncode == 2
    assert "--hang-timeout" in job.err()
    assert not (tmp_path / "run").exists()
