"""When the agent is killed, nothing of its run lives on: workers, loader processes, grandchildren, ports, memory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support_runs import TRAIN, Job, events, run_words, started, wait_for
from waiting import wait_until

GONE_S = 2.0


def listening_ports(pids: list[int]) -> dict[int, str]:
    """Port → address (hex) at which one of the processes listens."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(link))
            except OSError:
                continue
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].rpartition(":")
                ports[int(port, 16)] = address
    return ports


def kill_agent_and_look(job: Job, num_processes: int, shared_before: set[str]) -> None:
    """SIGKILL the agent alone; everything that hung on it must be gone a moment later, and nothing else."""
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        pids = wait_until(lambda: found if len(found := job.pids()) >= num_processes else None, 30, job.err)
        ports = listening_ports(pids)
        assert ports
        servers = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
        for pid in set(pids) - {job.process.pid, *map(int, servers)}:
            # As torch leaves it when the process is killed between making a shared tensor's file and removing it.
            Path(f"/dev/shm/torch_{pid}_1234_0").touch()
        os.kill(job.process.pid, signal.SIGKILL)
        job.process.wait()
        wait_until(
            lambda: not job.pids(), GONE_S, lambda: [Path(f"/proc/{p}/cmdline").read_bytes() for p in job.pids()]
        )
        for port in ports:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
        assert not {name for name in os.listdir("/dev/shm") if name.startswith("torch_")} - shared_before
        assert stranger.poll() is None
    finally:
        stranger.communicate()


def test_nothing_lives_on_when_the_agent_is_killed_with_loader_processes(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    words = run_words(tmp_path, "--epochs", "200", "--pause-s", "0.02", "--num-workers", "2")
    with started(tmp_path, *words) as job:
        wait_for(job, "commit", 3)
        kill_agent_and_look(job, num_processes=1 + 1 + 2 + 4, shared_before=before)


def test_nothing_lives_on_when_the_agent_of_a_shell_wrapper_is_killed(tmp_path: Path) -> None:
    """A grandchild behind a shell, and one that has left the process group and the session."""
    before = set(os.listdir("/dev/shm"))
    (tmp_path / "records").mkdir()
    train = f"{sys.executable} {TRAIN} --out {tmp_path / 'records'} --epochs 200 --pause-s 0.02"
    line = f"setsid sleep 600 & {train}; echo over"
    words = ["run", "--run-dir", tmp_path / "run", "--nproc-per-node", "2", "--no-python", "bash", "-c", line]
    with started(tmp_path, *words) as job:
        wait_for(job, "commit", 2)
        kill_agent_and_look(job, num_processes=1 + 1 + 6, shared_before=before)


def test_run_ends_with_code_1_when_the_fork_server_is_killed(tmp_path: Path) -> None:
    with started(tmp_path, *run_words(tmp_path, "--epochs", "200", "--pause-s", "0.02")) as job:
        workers = {entry["pid"] for entry in wait_for(job, "worker_started", 2)}
        wait_for(job, "commit", 2)
        server = next(pid for pid in job.pids() if pid not in workers | {job.process.pid})
        os.kill(server, signal.SIGKILL)
        assert job.wait(10) == 1, job.err()
        assert not job.pids()
    assert "fork server" in events(tmp_path / "run", "run_stopped")[0]["reason"]
