"""Wrong input: one line that says what was expected, what was seen and what to do; exit code 2; nothing is started."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_runs import finish, one_line

GOOD = "open('started', 'w').close()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to start in: good and bad scripts; the command's own output goes elsewhere."""
    inside = tmp_path / "inside"
    (inside / "pkg").mkdir(parents=True)
    (inside / "train.py").write_text(GOOD)
    (inside / "broken.py").write_text(GOOD + "for x in range(3)\n    pass\n")
    (inside / "file").write_text("")
    return inside


def refuse(folder: Path, *words: str | Path, code: int = 2, env: dict[str, str] | None = None) -> str:
    """Run a command that must be refused, and give its one line; the folder it ran in must be as before."""
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    job = finish(folder.parent, *words, cwd=folder, timeout_s=20, env=env)
    assert job.process.returncode == code, job.err()
    assert job.out() == ""
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before, "something was written"
    line = one_line(job.err())
    assert "Traceback" not in line
    return line


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run", "tarin.py"], ["tarin.py", "nothing there", "did you mean train.py?"]),
        (["run", "broken.py"], ["broken.py:2", "SyntaxError", "for x in range(3)"]),
        (["run", "pkg"], ["pkg", "a folder"]),
        (["run"], ["expected a script"]),
        (["run", "-m", "no.such.module"], ["no.such.module"]),
        (["run", "--no-python", "no-such-command"], ["no-such-command"]),
        (["run", "--nproc-per-nod", "2", "train.py"], ["--nproc-per-nod", "did you mean --nproc-per-node?"]),
        (["run", "--nproc-per-node", "0", "train.py"], ["--nproc-per-node", "'0'"]),
        (["run", "--nproc-per-node=-1", "train.py"], ["--nproc-per-node", "'-1'"]),
        (["run", "--nproc-per-node", "two", "train.py"], ["--nproc-per-node", "'two'"]),
        (["run", "--nnodes", "3:2", "train.py"], ["--nnodes", "3:2"]),
        (["run", "--max-restarts", "x", "train.py"], ["--max-restarts", "'x'"]),
        (["run", "--checkpoint-every", "often", "train.py"], ["--checkpoint-every", "'often'", "500steps"]),
        (["run", "--keep", "0", "train.py"], ["--keep", "'0'"]),
        (["run", "--run-dir", "file", "train.py"], ["--run-dir", "a file"]),
        (["run", "--run-dir", "file/below", "train.py"], ["--run-dir", "file/below"]),
        (["run", "--metrics-port", "70000", "train.py"], ["--metrics-port", "70000"]),
        (["run", "--metrics-host", "256.1.1.1", "train.py"], ["--metrics-host", "256.1.1.1"]),
        (["run", "--redirects", "7", "train.py"], ["--redirects", "'7'"]),
        (["run", "--signals-to-handle", "SIGNONE", "train.py"], ["SIGNONE"]),
        (["run", "--rdzv-backend", "carrier-pigeon", "train.py"], ["--rdzv-backend", "carrier-pigeon"]),
        (["resume", "nowhere"], ["nowhere", "nothing there"]),
        (["resume", "file"], ["a file"]),
        (["resume", "pkg"], ["pkg", "no run directory"]),
        (["resume"], ["RUN_DIR"]),
        (["resume", "pkg", "--at-step", "-3"], ["--at-step"]),
        (["verify", "pkg"], ["pkg"]),
        (["status", "nowhere"], ["nowhere"]),
        (["checkpoints", "list", "nowhere"], ["nowhere"]),
        (["train.py"], ["did you mean `elastictrain run train.py`?"]),
        ([], ["expected a command"]),
    ],
    ids=lambda value: (
        "-".join(value)[:40] if isinstance(value, list) and all(isinstance(v, str) for v in value) else ""
    ),
)
def test_command_is_refused_with_one_line_when_its_input_is_wrong(
    folder: Path, words: list[str], parts: list[str]
) -> None:
    line = refuse(folder, *words)
    for part in parts:
        assert part in line


def test_run_is_refused_when_a_variable_is_wrong(folder: Path) -> None:
    assert "PET_NNODES" in refuse(folder, "run", "train.py", env={"PET_NNODES": "3:2"})
    assert "ELASTICTRAIN_RUNDIR" in refuse(folder, "run", "train.py", env={"ELASTICTRAIN_RUNDIR": "x"})


def test_run_is_refused_when_the_metrics_port_is_taken(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = refuse(folder, "run", "--metrics-port", str(port), "train.py")
    assert f"seen {port}" in line
    assert "--metrics-port" in line


def test_run_is_refused_when_the_folder_holds_another_run(folder: Path) -> None:
    first = finish(folder.parent, "run", "--run-dir", folder / "run", "train.py", cwd=folder)
    assert first.process.returncode == 0, first.err()
    (folder / "started").unlink()
    line = refuse(folder, "run", "--run-dir", "run", "train.py")
    assert f"elastictrain resume {folder / 'run'}" in line
    (folder / "run" / "run.json").unlink()
    assert "run.json is gone" in refuse(folder, "run", "--run-dir", "run", "train.py")
    (folder / "run" / "run.json").write_text('{"version": 1, "run')
    assert "run.json" in refuse(folder, "resume", "run")


@pytest.fixture
def read_only(folder: Path) -> Iterator[Path]:
    """A folder on a read-only mount, or without permission for one who is not root."""
    target = folder / "sealed"
    target.mkdir()
    if os.geteuid() != 0:
        target.chmod(0o500)
        yield target
        target.chmod(0o700)
        return
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", target], check=False).returncode:
        pytest.skip("this machine allows no mounts")
    yield target
    subprocess.run(["umount", "-l", target], check=True)


def test_run_is_refused_when_the_run_directory_cannot_be_written(folder: Path, read_only: Path) -> None:
    line = refuse(folder, "run", "--run-dir", read_only / "run", "train.py")
    assert "--run-dir" in line
    assert "can be written" in line
