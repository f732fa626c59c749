"""Scripts that do not import elastictrain run as under torchrun: environment, arguments, output, restarts."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support_runs import PLAIN, environment, events, finish, started
from waiting import wait_until

ODD_ARGUMENTS = ["", "--help", "--nnodes", "3", "-m", "--", "zwölf ☃", "a b", "--", "x=1", "\t\n"]
AS_TORCHRUN = [
    "LOCAL_RANK",
    "RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "LOCAL_WORLD_SIZE",
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "OMP_NUM_THREADS",
]


def given(folder: Path, rank: int = 0, attempt: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"given-{rank}-{attempt}.json").read_text())
    return found


def test_environment_equals_that_of_torchrun_when_two_workers_record_it(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    options = ["--nproc-per-node", "2", "--max-restarts", "3", "--role", "trainer"]
    for folder in (ours, theirs):
        folder.mkdir()
    env = environment(PLAIN_FOLDER=str(theirs), PLAIN_ONLY_RECORD="1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", *options, str(PLAIN), *ODD_ARGUMENTS[:2]]
    subprocess.run(torchrun, env=env, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    env = {"PLAIN_FOLDER": str(ours), "PLAIN_ONLY_RECORD": "1"}
    job = finish(tmp_path, "run", *options, "--run-dir", "run", PLAIN, *ODD_ARGUMENTS[:2], env=env)
    assert job.process.returncode == 0, job.err()
    for rank in (0, 1):
        mine, torchs = given(ours, rank), given(theirs, rank)
        for name in AS_TORCHRUN:
            assert mine["environ"].get(name) == torchs["environ"].get(name), name
        for name in ("argv", "path", "name", "file", "cwd", "threads"):
            assert mine[name] == torchs[name], name
        missing = torchs["environ"].keys() - mine["environ"].keys()
        assert missing <= {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
        assert int(mine["environ"]["MASTER_PORT"]) > 0


@pytest.mark.parametrize("way", ["script", "module", "command", "spawn", "run-path"])
def test_arguments_arrive_byte_for_byte_when_started_in_each_way(tmp_path: Path, way: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(PLAIN.read_text())
    start = {
        "script": [str(PLAIN)],
        "module": ["-m", "package.train"],
        "command": ["--no-python", sys.executable, str(PLAIN)],
        "spawn": ["--start-method", "spawn", str(PLAIN)],
        "run-path": ["--run_path", str(PLAIN)],
    }[way]
    env = {"PLAIN_FOLDER": str(tmp_path), "PLAIN_ONLY_RECORD": "1"}
    job = finish(tmp_path, "run", "--run-dir", "run", *start, *ODD_ARGUMENTS, env=env)
    assert job.process.returncode == 0, job.err()
    seen = given(tmp_path)
    assert seen["argv"][1:] == ODD_ARGUMENTS
    assert seen["name"] == "__main__"
    assert seen["argv"][0] == (str(tmp_path / "package" / "train.py") if way == "module" else str(PLAIN))
    assert seen["path"] == str(tmp_path if way == "module" else PLAIN.parent)


def test_ddp_restarts_and_ends_well_when_one_rank_or_the_other_is_killed_ten_times(tmp_path: Path) -> None:
    chance = random.Random(5)
    env = {"PLAIN_FOLDER": str(tmp_path), "PLAIN_STEPS": "40", "PLAIN_PAUSE_S": "0.02"}
    options = ["--nproc-per-node", "2", "--max-restarts", "10", "--run-dir", "run"]
    with started(tmp_path, "run", *options, PLAIN, env=env) as job:
        for attempt in range(10):
            rank = attempt % 2
            sign = tmp_path / (f"trains-{rank}-{attempt}" if attempt % 3 else f"given-{rank}-{attempt}.json")
            wait_until(sign.exists, 30, job.err)
            threading.Event().wait(chance.uniform(0.0, 0.1))
            os.kill(given(tmp_path, rank, attempt)["pid"], signal.SIGKILL)
        assert job.wait() == 0, job.err()
    assert sorted(path.name for path in tmp_path.glob("end-*")) == ["end-0-10", "end-1-10"]
    assert len(events(tmp_path / "run", "failure")) == 10
    first, last = given(tmp_path)["environ"], given(tmp_path, 0, 10)["environ"]
    assert last["TORCHELASTIC_RESTART_COUNT"] == "10"
    assert first["RANK"] == last["RANK"]


def test_run_ends_with_1_when_the_restarts_are_used_up(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nopen(f\"try-{os.environ['TORCHELASTIC_RESTART_COUNT']}\", 'w')\nsys.exit(7)\n")
    job = finish(tmp_path, "run", "--max-restarts=2", "--run-dir", "run", script)
    assert job.process.returncode == 1
    assert sorted(path.name for path in tmp_path.glob("try-*")) == ["try-0", "try-1", "try-2"]
    assert "exit code 7" in job.err().splitlines()[-1]
    assert "all 2 restarts" in events(tmp_path / "run", "run_stopped")[0]["reason"]


def test_variables_of_torchrun_count_when_options_are_not_given(tmp_path: Path) -> None:
    env = {
        "PLAIN_FOLDER": str(tmp_path),
        "PLAIN_ONLY_RECORD": "1",
        "PET_NPROC_PER_NODE": "2",
        "PET_ROLE": "fromenv",
        "OMP_NUM_THREADS": "2",
    }
    job = finish(tmp_path, "run", "--role", "given", "--run-dir", "run", PLAIN, env=env)
    assert job.process.returncode == 0, job.err()
    seen = given(tmp_path, 1)
    assert seen["environ"]["WORLD_SIZE"] == "2"
    assert seen["environ"]["ROLE_NAME"] == "given", "an option goes before a variable"
    assert (seen["environ"]["OMP_NUM_THREADS"], seen["threads"]) == ("2", 2), "what the user set is kept"


def test_threads_are_left_alone_when_there_is_one_worker(tmp_path: Path) -> None:
    job = finish(
        tmp_path, "run", "--run-dir", "run", PLAIN, env={"PLAIN_FOLDER": str(tmp_path), "PLAIN_ONLY_RECORD": "1"}
    )
    assert job.process.returncode == 0, job.err()
    assert "OMP_NUM_THREADS" not in given(tmp_path)["environ"]


def test_output_goes_where_torchrun_puts_it_when_streams_are_chosen(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "for stream, name in ((sys.stdout, 'out'), (sys.stderr, 'err')):\n"
        "    print(name, os.environ['RANK'], file=stream)\n"
        "print('no newline', end='')\n"
    )
    head = ["run", "--nproc-per-node", "3", "--rdzv-id", "seven", "--run-dir", "run"]
    options = ["--redirects", "1:3,2:0", "--tee", "0:3", "--log-dir", "streams", "--local-ranks-filter", "0,1"]
    job = finish(tmp_path, *head, *options, script)
    assert job.process.returncode == 0, job.err()
    assert job.out() == "[default0]:out 0\n[default0]:no newline\n"
    own = [line for line in job.err().splitlines() if not line.startswith("[elastictrain]")]
    assert own == ["[default0]:err 0"]
    logs = {
        str(path.relative_to(tmp_path / "streams")): path.read_text()
        for path in (tmp_path / "streams").rglob("*")
        if path.is_file()
    }
    assert logs == {
        "seven/attempt_0/0/stdout.log": "out 0\nno newline",
        "seven/attempt_0/0/stderr.log": "err 0\n",
        "seven/attempt_0/1/stdout.log": "out 1\nno newline",
        "seven/attempt_0/1/stderr.log": "err 1\n",
    }


def test_plain_workers_get_sigterm_when_the_agent_does_and_the_run_exits_75(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys, threading\n"
        "def stop(*_):\n"
        "    open('stopped-' + os.environ['RANK'], 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "open('up-' + os.environ['RANK'], 'w').close()\n"
        "threading.Event().wait(600)\n"
    )
    with started(tmp_path, "run", "--nproc-per-node", "2", "--run-dir", "run", script) as job:
        wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2, 60, job.err)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(20) == 75, job.err()
    assert len(list(tmp_path.glob("stopped-*"))) == 2
    assert not events(tmp_path / "run", "run_finished")
