"""What a failing script costs: survivors go on, the true cause is told last, and a run that cannot go on ends."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_runs import (
    TRAIN,
    events,
    finish,
    read_ledger,
    run_words,
    standing_commits,
    started,
    steps_by_records,
    wait_for,
)
from test_agent_killed import listening_ports

SLOW_STEPS = ("--pause-s", "0.1")


def assert_whole(folder: Path, num_epochs: int) -> None:
    """Every sample of every epoch was committed once, by the proof and by the workers' own records."""
    assert finish(folder, "verify", folder / "run", leg="verify").process.returncode == 0
    steps = steps_by_records(folder, ["run"])
    commits = standing_commits(read_ledger(folder / "run"))
    assert [commit["step"] for commit in commits] == list(range(1, 13 * num_epochs + 1))
    seen = Counter(number for commit in commits for number in steps[commit["step"]][0])
    assert seen == Counter(dict.fromkeys(range(101), num_epochs))


def test_run_survives_when_one_rank_ends_in_every_way_a_process_can(tmp_path: Path) -> None:
    kinds = ["kill", "abort", "segv", "memory", "exit3", "exit0", "raise", "thread"]
    words = run_words(tmp_path, "--epochs", "3", *SLOW_STEPS, "--fail", ",".join(kinds), "--fail-rank", "1")
    job = finish(tmp_path, *words)
    assert job.process.returncode == 0, job.err()
    assert [kind for kind in kinds if not (tmp_path / "records" / f"failed-{kind}").exists()] == []
    told = [entry["message"] for entry in events(tmp_path / "run", "failure")]
    expected = [
        r"signal 9 \(SIGKILL, possibly out of memory\)",
        r"signal 6 \(SIGABRT\)",
        r"signal 11 \(SIGSEGV\)",
        r"allocate",
        r"exit code 3",
        r"exit code 0 while the others train on",
        r"no such sample",
    ]
    assert len(told) == len(expected), told
    for pattern, message in zip(expected, told, strict=True):
        assert re.search(pattern, message), (pattern, message)
    assert "IndexError" in job.err(), "the exception of a thread is shown, as Python does it"
    assert_whole(tmp_path, 3)
    steps = [entry["step"] for entry in events(tmp_path / "run", "commit")]
    assert steps == sorted(set(steps))


def test_survivor_is_no_success_of_another_when_rank_0_leaves_early(tmp_path: Path) -> None:
    """sys.exit(0) of rank 0 in the middle: the others go on to the end, and its place is taken."""
    words = run_words(tmp_path, "--epochs", "1", *SLOW_STEPS, "--fail", "exit0", options=["--spares", "0"])
    job = finish(tmp_path, *words)
    assert job.process.returncode == 0, job.err()
    assert_whole(tmp_path, 1)
    sizes = [entry["world_size"] for entry in events(tmp_path / "run", "round")]
    assert sizes[:3] == [2, 1, 2]
    assert len(list((tmp_path / "records").glob("end-*"))) == 2


def test_run_ends_with_the_traceback_when_the_same_exception_comes_twice(tmp_path: Path) -> None:
    """A bad sample fails at whichever rank gets it: at one, and then at the one that takes its share over."""
    job = finish(tmp_path, *run_words(tmp_path, "--fail", "sample", nproc=3))
    assert job.process.returncode == 1
    failures = events(tmp_path / "run", "failure")
    assert 2 <= len(failures) <= 3
    assert {(entry["error_type"], entry["step"]) for entry in failures} == {("LookupError", failures[0]["step"])}
    last = job.err().splitlines()
    rank, step = failures[-1]["rank"], failures[-1]["step"]
    assert last[-1] == f"[elastictrain] first failure: rank {rank}, at step {step}: LookupError: sample 17 is bad"
    assert last[-2] == "LookupError: sample 17 is bad"
    tail = "\n".join(last[-12:])
    assert "Traceback (most recent call last):" in tail
    assert str(TRAIN) in tail
    assert "gloo" not in job.err().lower()
    assert "Connection" not in job.err()


def test_run_ends_with_the_traceback_when_the_script_cannot_import(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import elastictrain\nimport no_such_module_here\n")
    job = finish(tmp_path, "run", "--nproc-per-node", "2", "--run-dir", "run", script)
    assert job.process.returncode == 1
    assert re.fullmatch(
        r"\[elastictrain\] first failure: rank [01], before its first step: "
        r"ModuleNotFoundError: No module named 'no_such_module_here'",
        job.err().splitlines()[-1],
    )


def test_run_ends_with_code_2_when_the_script_uses_the_library_wrongly(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import elastictrain\nrun = elastictrain.init()\nrun.log(loss=1.0)\n")
    job = finish(tmp_path, "run", "--nproc-per-node", "2", "--run-dir", "run", script)
    assert job.process.returncode == 2
    assert len(events(tmp_path / "run", "failure")) == 1, "wrong use is not tried again"
    assert "call it inside `with step`" in job.err().splitlines()[-1]


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False).returncode:
        pytest.skip("this machine allows no mounts")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_training_goes_on_when_the_disk_is_full_and_the_run_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "run-disk", "1m") as disk:
        (tmp_path / "run").symlink_to(disk / "run")
        options = ["--checkpoint-every", "3steps", "--run-dir", str(disk / "run")]
        with started(tmp_path, *run_words(tmp_path, "--epochs", "2", *SLOW_STEPS, options=options)) as job:
            wait_for(job, "checkpoint", 2)
            filler = disk / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * 512)
            code = job.wait()
        ends = [path.read_text() for path in (tmp_path / "records").glob("end-*")]
        assert ends == ["26", "26"], "training itself reached its end"
        assert code == 1, job.err()
        assert "the disk is full" in job.err()
        assert "last checkpoint could not be saved" in job.err().splitlines()[-1]

        filler.unlink()
        after = finish(tmp_path, "resume", disk / "run", leg="after")
        assert after.process.returncode == 0, after.err()
        assert standing_commits(read_ledger(disk / "run"))[-1]["step"] == 26
        verified = finish(tmp_path, "verify", disk / "run", leg="verify")
        assert verified.process.returncode == 0, verified.out() + verified.err()


def test_training_goes_on_when_strangers_talk_to_every_port(tmp_path: Path) -> None:
    """All listeners are on the loopback address, and nothing that arrives there from a stranger stops the run."""
    touched = tmp_path / "executed"
    payloads = [
        b"\xff" * 4096,
        (2**62).to_bytes(8, "little") * 8,
        b"cos\nsystem\n(S'touch " + os.fsencode(touched) + b"'\ntR.",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A" * 70000,
        b"\x00",
        b"",
    ]
    with started(tmp_path, *run_words(tmp_path, "--epochs", "3", *SLOW_STEPS)) as job:
        wait_for(job, "commit", 3)
        ports = listening_ports(job.pids())
        assert len(ports) >= 2, "the store and the metrics at least"
        assert set(ports.values()) <= {"0100007F"}, ports
        with contextlib.ExitStack() as stack:
            for port in ports:
                for payload in payloads:
                    with contextlib.suppress(OSError):
                        stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=2))
                        stranger.sendall(payload)
            victim = max(entry["pid"] for entry in events(tmp_path / "run", "worker_started"))
            os.kill(victim, 9)  # with strangers inside, the next round must still come about
            assert job.wait() == 0, job.err()
    assert not touched.exists()
    assert len(events(tmp_path / "run", "broken")) == 1
    assert_whole(tmp_path, 3)
    assert threading.active_count() == 1
