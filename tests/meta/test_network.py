"""The network that tests use: it cuts without a word, heals, and is gone afterwards, however the test ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import network
import pytest
from network import Host, namespaces, run_network, run_tool, sweep, why_not
from waiting import wait_until

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

CONNECT = """
import socket, sys
made = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3]))
"""
STAY = f"{CONNECT}sys.stdin.read()"
KILLED = """
import os, signal, subprocess
from network import run_network
with run_network() as network:
    host = network.add("x")
    sleeper = subprocess.Popen([*host.prefix, "sleep", "1000"])
    while sleeper.pid not in host.pids():
        pass
    print(sleeper.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def reach(host: Host, target: str, port: int, timeout_s: float) -> str:
    """Connect from a host: the error, "" for none."""
    command = [*host.prefix, sys.executable, "-c", CONNECT, target, str(port), str(timeout_s)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip().rpartition("\n")[2]


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie, which has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def ours() -> list[str]:
    return [name for name in namespaces() if name.startswith(f"et{os.getpid()}n")]


def test_hosts_have_names_of_their_own_and_find_each_other_by_name() -> None:
    with run_network() as made:
        one, other = made.add("one"), made.add("other")
        command = "hostname; getent hosts one other outside"
        told = subprocess.run([*one.prefix, "sh", "-c", command], capture_output=True, text=True, check=True).stdout
        assert told.split() == ["one", one.address, "one", other.address, "other", made.gateway, "outside"]


def test_cut_is_silent_and_only_where_it_was_asked_for() -> None:
    with run_network() as made, socket.create_server((made.gateway, 0)) as listener:
        cut, whole = made.add("cut"), made.add("whole")
        port = listener.getsockname()[1]
        made.cut(cut, made.gateway)
        assert "timed out" in reach(cut, "outside", port, 0.5), "nothing comes back, no refusal either"
        assert "refused" in reach(cut, "whole", 9, 10.0), "the way to the other host is open"
        assert reach(whole, "outside", port, 10.0) == ""
        made.cut(whole)
        made.heal(cut)
        assert "timed out" in reach(whole, "outside", port, 0.5)
        assert "timed out" in reach(whole, "cut", 9, 0.5)
        assert reach(cut, "outside", port, 10.0) == ""
        made.heal()
        assert reach(whole, "outside", port, 10.0) == ""


def test_connection_hears_nothing_when_its_machine_vanishes() -> None:
    with run_network() as made, socket.create_server((made.gateway, 0)) as listener:
        host = made.add("x")
        listener.settimeout(20.0)
        port = listener.getsockname()[1]
        command = [*host.prefix, sys.executable, "-c", STAY, "outside", str(port), "10"]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as talker:
            connection = listener.accept()[0]
            with connection:
                made.vanish(host)
                assert talker.wait(10) == -signal.SIGKILL
                assert host.pids() == []
                connection.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    connection.recv(1)


def test_nothing_is_left_when_a_test_fails_with_processes_running() -> None:
    started: list[subprocess.Popen[bytes]] = []
    links = run_tool("ip", "link", "show")

    def fail() -> None:
        with run_network() as made:
            host = made.add("x")
            started.append(subprocess.Popen([*host.prefix, "sleep", "1000"]))
            wait_until(lambda: started[0].pid in host.pids())
            run_tool("ip", "netns", "delete", host.namespace)  # taking this one down will fail as well
            raise KeyError("the test's own")

    with pytest.raises((KeyError, subprocess.CalledProcessError)):
        fail()
    started[0].kill()  # nobody can find it by a name that is gone
    started[0].wait(10)
    assert ours() == []
    assert run_tool("ip", "link", "show") == links


def test_nothing_is_left_when_the_network_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    links = run_tool("ip", "link", "show")
    (tmp_path / "nft").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "nft").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(subprocess.CalledProcessError), run_network():
        pass
    assert ours() == []
    assert run_tool("ip", "link", "show") == links


def test_what_a_killed_run_has_left_is_taken_down_by_the_next_one() -> None:
    search = f"{Path(network.__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search}) as run:
        assert run.stdout is not None
        sleeper = int(run.stdout.readline())
        assert run.wait(10) == -signal.SIGKILL
        left = [name for name in namespaces() if name.startswith(f"et{run.pid}n")]
        assert len(left) == 2, "the host and the switch"
        assert is_running(sleeper)
        sweep()
    assert not set(left) & set(namespaces())
    assert not list(Path(tempfile.gettempdir()).glob(f"*et{run.pid}n*"))
    wait_until(lambda: not is_running(sleeper))
