"""The fixture that every test relies on catches what it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leaks import find_leaks, take_holdings
from waiting import wait_until

TESTS = Path(__file__).parent.parent
LEAKY = """
import os, socket, subprocess, sys
from multiprocessing import shared_memory
kept = []
CHILD = "import sys; print(1, flush=True); sys.stdin.read()"
ORPHAN = "import os, sys; os.fork() or (print(os.getpid(), flush=True), os.setsid(), sys.stdin.read())"

def test_tidy():
    with socket.create_server(("127.0.0.1", 0)), open("/etc/hostname"):
        subprocess.run([sys.executable, "-c", "pass"], check=True)
    memory = shared_memory.SharedMemory(create=True, size=64)
    memory.close()
    memory.unlink()

def test_descriptor():
    kept.append(open("/etc/hostname"))

def test_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_child():
    kept.append(subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    kept[-1].stdout.readline()

def test_orphan():
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pid = parent.stdout.readline()
    parent.wait()
    assert int(pid) > 1
    kept.append(parent)

def test_shared_memory():
    memory = shared_memory.SharedMemory(create=True, size=64, name="elastictrain-leak-probe")
    memory.close()

def test_shared_memory_is_gone():
    shared_memory.SharedMemory(name="elastictrain-leak-probe").unlink()
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("leaky")
    for name in ("conftest.py", "leaks.py", "waiting.py"):
        shutil.copy(TESTS / name, folder)
    text = (folder / "conftest.py").read_text().replace("_PATIENCE_S = 3.0", "_PATIENCE_S = 0.1")
    (folder / "conftest.py").write_text(text)
    (folder / "test_leaky.py").write_text(LEAKY)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", "test_leaky.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60).stdout


def test_leak_fixture_passes_when_a_test_cleans_up(outcome: str) -> None:
    assert "PASSED test_leaky.py::test_tidy" in outcome
    assert "ERROR test_leaky.py::test_tidy" not in outcome
    assert "ERROR test_leaky.py::test_shared_memory_is_gone" not in outcome


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("descriptor", "-> /etc/hostname"),
        ("port", "listening at port"),
        ("child", "child process"),
        ("orphan", "process without its parent"),
        ("shared_memory", "/dev/shm/elastictrain-leak-probe"),
    ],
)
def test_leak_fixture_fails_when_a_test_leaves_something(outcome: str, name: str, says: str) -> None:
    assert f"ERROR test_leaky.py::test_{name} - " in outcome
    assert says in outcome


def test_leak_check_is_cheap_when_nothing_leaks() -> None:
    before = take_holdings()
    times_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        find_leaks(before, "no such mark")
        times_s.append(time.perf_counter() - start_s)
    num_processes = sum(name.isdecimal() for name in os.listdir("/proc"))
    assert min(times_s) < 0.02 + num_processes * 0.0002


def test_wait_until_reports_state_when_time_is_over() -> None:
    with pytest.raises(AssertionError, match="the tail of the ledger"):
        wait_until(lambda: None, timeout_s=0.02, describe=lambda: "the tail of the ledger")
