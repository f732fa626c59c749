"""`elastictrain.launch`: a program written for torch.multiprocessing.spawn, with the call exchanged."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from support_runs import environment, events, finish, one_line
from waiting import wait_until

TUTORIAL = """\
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastictrain


def train(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model = DistributedDataParallel(nn.Conv2d(1, 2, 3))
    model(torch.ones(2, 1, 8, 8)).sum().backward()
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if rank == 1 and attempt == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    open(f"end-{rank}-{attempt}-{int(total)}", "w").close()


if __name__ == "__main__":
    elastictrain.launch(train, args=(2, sys.argv[1]), nproc_per_node=2, run_dir="run")
    print("launched", os.environ.get("OMP_NUM_THREADS"), "RANK" in os.environ)
"""


def run_program(folder: Path, text: str, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(text)
    command = [sys.executable, "program.py", *args]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_tutorial_program_recovers_when_one_of_its_functions_is_killed(tmp_path: Path) -> None:
    done = run_program(tmp_path, TUTORIAL, free_port())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "launched None False", "the caller's environment is as before"
    assert sorted(path.name for path in tmp_path.glob("end-*")) == ["end-0-1-2", "end-1-1-2"]
    assert len(events(tmp_path / "run", "failure")) == 1


def test_launch_trains_elastically_when_the_function_uses_the_library(tmp_path: Path) -> None:
    """launch in the main program, init in the function, arguments without the rank; and a program that goes on."""
    done = run_program(
        tmp_path,
        "import torch, elastictrain\n"
        "from torch.utils.data import TensorDataset\n"
        "def train(width):\n"
        "    run = elastictrain.init()\n"
        "    model = torch.nn.Linear(width, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    model, optimizer = run.prepare(model, optimizer)\n"
        "    for step in run.steps(TensorDataset(torch.ones(20, width)), batch_size=4):\n"
        "        with step as (x,):\n"
        "            model(x).sum().backward()\n"
        "            optimizer.step()\n"
        "            optimizer.zero_grad()\n"
        "if __name__ == '__main__':\n"
        "    elastictrain.launch(train, (3,), 2, run_dir='run', checkpoint_every='2steps')\n"
        "    print('goes on')\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "goes on\n"
    assert [entry["step"] for entry in events(tmp_path / "run", "commit")] == [1, 2, 3, 4, 5]
    assert finish(tmp_path, "verify", tmp_path / "run", leg="verify").process.returncode == 0


def test_launch_raises_the_error_last_when_the_function_fails(tmp_path: Path) -> None:
    done = run_program(
        tmp_path,
        "import elastictrain\n"
        "def train(rank):\n    raise ArithmeticError('nothing adds up')\n"
        "if __name__ == '__main__':\n"
        "    try:\n        elastictrain.launch(train, nproc_per_node=2, run_dir='run')\n"
        "    except elastictrain.errors.WorkerError as error:\n        print('caught', error)\n",
    )
    assert done.returncode == 0, done.stderr
    assert "ArithmeticError: nothing adds up" in done.stderr.splitlines()[-1]
    assert "caught the run in" in done.stdout
    assert "exit code 1" in done.stdout


def test_launch_raises_config_error_and_writes_nothing_when_options_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = run_program(
        tmp_path,
        "import elastictrain\n"
        "def train(rank): pass\n"
        "if __name__ == '__main__':\n"
        "    for options in ({'nproc_per_node': 0}, {'nnodes': '3:2'}, {'run_dir': 'taken'}, {'run_dirs': 'x'},\n"
        "                    {'checkpoint_every': 'often'}, {'metrics_port': 70000}):\n"
        "        try:\n            elastictrain.launch(train, **{'run_dir': 'run', **options})\n"
        "        except elastictrain.errors.ConfigError as error:\n            print(error)\n"
        "    try:\n        elastictrain.launch('train', run_dir='run')\n"
        "    except elastictrain.errors.ConfigError as error:\n        print(error)\n",
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done.stdout
    for line, word in zip(
        lines,
        [
            "--nproc-per-node",
            "--nnodes",
            "taken",
            "run_dirs",
            "--checkpoint-every",
            "--metrics-port",
            "takes a function",
        ],
        strict=True,
    ):
        assert word in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program.py", "taken"]


def test_nothing_lives_on_when_the_launching_program_is_killed(tmp_path: Path) -> None:
    """Its workers go; a child that the program had of its own is none of our business."""
    (tmp_path / "program.py").write_text(
        "import os, subprocess, sys, threading, elastictrain\n"
        "def train(rank):\n"
        "    open(f'up-{rank}-{os.getpid()}', 'w').close()\n"
        "    threading.Event().wait(600)\n"
        "if __name__ == '__main__':\n"
        "    own = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0)\n"
        "    open(f'own-{own.pid}', 'w').close()\n"
        "    elastictrain.launch(train, nproc_per_node=2, run_dir='run')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        wait_until(lambda: len(list(tmp_path.glob("up-*"))) == 2 or process.poll() is not None, 60)
        pids = [int(path.name.split("-")[2]) for path in tmp_path.glob("up-*")]
        own = int(next(tmp_path.glob("own-*")).name[4:])
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any(is_alive(pid) for pid in pids), 2)
        assert is_alive(own)
    finally:
        process.kill()
        process.communicate()  # closes the pipe at which the program's own child waits


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_import_is_quick_and_needs_no_torch_when_only_help_is_asked(tmp_path: Path) -> None:
    began_s = time.monotonic()
    job = finish(tmp_path, "run", "--help")
    assert job.process.returncode == 0
    assert "--nproc-per-node" in job.out()
    assert time.monotonic() - began_s < 5
    job = finish(tmp_path, "version-of-nothing")
    assert job.process.returncode == 2
    assert "expected a command" in one_line(job.err())
    assert os.listdir(tmp_path / ".") == os.listdir(tmp_path)
