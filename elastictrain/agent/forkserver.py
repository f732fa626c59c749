"""A process that has imported torch once and forks every worker from that state.

The agent forks it (or spawns it, for `launch`) before it has any thread of its own. It stays single-threaded. A worker
starts in milliseconds instead of the seconds that importing torch takes, and shares the imported pages.

Its parent is the agent: when the agent is gone, its socket reads end-of-file, and the fork server kills the process
group of every worker before it ends itself. When the fork server is gone, PR_SET_PDEATHSIG kills the workers. Strays of
a worker (loader processes, what a shell wrapper started) fall to the fork server, which is their subreaper, and are
killed with the worker.

    agent → fork server   spawn    worker_id, env, cwd, background: how a spare's priority is lowered;
                                   descriptors: channel, [stdout], [stderr]
    fork server → agent   spawned  worker_id, pid; descriptor: pidfd
                          stopped  worker_id, stopped: a signal has stopped it (true) or let it go on
                          exited   worker_id, status (as waitpid), found_s (monotonic)
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from elastictrain.config import CHANNEL_FD_VARIABLE, WORKER_ID_VARIABLE
from elastictrain.priority import step_back
from elastictrain.shared_memory import remove_files_of

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
MAX_MESSAGE_BYTES: Final = 1 << 20
MAX_DESCRIPTORS: Final = 4
# What the agent may pass on to a worker.
PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
WARM_MODULES: Final = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch._dynamo",
    "elastictrain.worker.joining",
)


def prctl(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def send_message(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one datagram of JSON with descriptors attached; blocks while the socket is full."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([json.dumps(message).encode()], ancillary)


def receive_message(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one datagram; None at end-of-file. The descriptors belong to the caller."""
    size = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    try:
        data, ancillary, _, _ = sock.recvmsg(MAX_MESSAGE_BYTES, size, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    if not data:
        return None
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    return json.loads(data), list(fds)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """What a forked worker does: `run` in this interpreter, and end with its exit code; or execute `argv` instead.

    `preloads` says that the fork server imports torch for all workers before the first fork.
    """

    run: Callable[[], int]
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    preloads: bool = True


@dataclass(slots=True)
class Child:
    worker_id: str
    pid: int


class ForkServer:
    """The loop of the fork server's process."""

    def __init__(self, sock: socket.socket, start: WorkerStart) -> None:
        self._sock = sock
        self._start = start
        self._children: dict[int, Child] = {}

    def serve(self) -> None:
        """Serve until the agent's end of the socket closes, then leave nothing behind."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_IGN)  # the agent decides; a terminal's Ctrl-C reaches the whole group
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._sock, selectors.EVENT_READ)
            selector.register(wake_read, selectors.EVENT_READ)
            is_served = True
            while is_served:
                for key, _ in selector.select():
                    if key.fileobj is self._sock:
                        is_served = self._take_request(selector, (wake_read, wake_write))
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(wake_read, 4096)
                        self._reap()
                    if not is_served:
                        break
        self._kill_everything()

    def _take_request(self, selector: selectors.BaseSelector, wake: tuple[int, int]) -> bool:
        received = receive_message(self._sock)
        if received is None:
            return False
        request, fds = received
        # A signal for the child must wait until the child no longer ignores it, as this process does.
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            selector.close()
            for fd in wake:
                os.close(fd)
            self._sock.close()
            self._become_worker(request, fds)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(pid)
        self._children[pid] = Child(request["worker_id"], pid)
        try:
            send_message(self._sock, {"kind": "spawned", "worker_id": request["worker_id"], "pid": pid}, [pidfd])
        except OSError:
            return False
        finally:
            os.close(pidfd)
        return True

    def _become_worker(self, request: Mapping[str, Any], fds: list[int]) -> None:
        """In the child: take the worker's place in the system, run the program, end. Never returns."""
        code = 1
        try:
            parent = os.getppid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)  # the fork server died before prctl
            os.setsid()
            if request.get("background"):
                step_back(**request["background"])
            for number in signal.valid_signals():
                if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE):
                    with contextlib.suppress(OSError, ValueError):
                        signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
            channel, *streams = fds
            for stream, target in zip(streams, (1, 2), strict=False):
                os.dup2(stream, target)
                os.close(stream)
            os.set_inheritable(channel, True)
            os.environ.clear()
            os.environ.update(request["env"])
            os.environ[CHANNEL_FD_VARIABLE] = str(channel)
            os.chdir(request["cwd"])
            gc.unfreeze()
            if self._start.argv:
                os.environ.update(self._start.env)
                os.execvp(self._start.argv[0], self._start.argv)
            _renew_chance()
            code = self._start.run()
        finally:
            os._exit(code)

    def _reap(self) -> None:
        """Take in every process that has ended: workers, and what they have left without a parent."""
        dead: list[int] = []
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0] != 0:
                pid, status = ended
                if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                    self._tell_stop(pid, is_stopped=os.WIFSTOPPED(status))
                    continue
                dead.append(pid)
                child = self._children.pop(pid, None)
                if child is not None:
                    self._bury(child, status)
        remove_files_of(dead)

    def _tell_stop(self, pid: int, *, is_stopped: bool) -> None:
        child = self._children.get(pid)
        if child is not None:
            with contextlib.suppress(OSError):
                send_message(self._sock, {"kind": "stopped", "worker_id": child.worker_id, "stopped": is_stopped})

    def _bury(self, child: Child, status: int) -> None:
        found_s = time.monotonic()
        _kill_group(child.pid)
        self._kill_strays(child)
        with contextlib.suppress(OSError):
            send_message(
                self._sock, {"kind": "exited", "worker_id": child.worker_id, "status": status, "found_s": found_s}
            )

    def _kill_strays(self, dead: Child) -> None:
        """Kill what a dead worker has left outside its process group; strays have become children of this process."""
        live_sessions = {child.pid for child in self._children.values()}
        mark = f"{WORKER_ID_VARIABLE}={dead.worker_id}".encode()
        for pid in _children_of(os.getpid()):
            if pid in self._children:
                continue
            with contextlib.suppress(OSError):
                session = os.getsid(pid)
                is_marked = mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if is_marked or (session == dead.pid and session not in live_sessions):
                    os.kill(pid, signal.SIGKILL)

    def _kill_everything(self) -> None:
        for child in list(self._children.values()):
            _kill_group(child.pid)
        while _children_of(os.getpid()):
            for pid in _children_of(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                remove_files_of([os.waitpid(-1, 0)[0]])


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)  # it may die before its setsid


def _children_of(pid: int) -> list[int]:
    """Direct children, zombies included."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _renew_chance() -> None:
    """numpy's global generator was seeded before the fork, so that all workers would draw the same numbers."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def warm_up() -> None:
    """Import what every worker will need, before the first fork."""
    import importlib

    for name in WARM_MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector must not write to pages that all workers share


def run_fork_server(sock: socket.socket, start: WorkerStart) -> None:
    """Be the fork server until the agent is gone; ends the process."""
    code = 1
    try:
        sock.set_inheritable(False)
        if start.preloads:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # while it imports nobody reads the socket
            warm_up()
            prctl(PR_SET_PDEATHSIG, 0)  # from here on it must live longer than the agent, to leave nothing behind
        ForkServer(sock, start).serve()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


def start_fork_server(start: WorkerStart, *, in_child: Callable[[], None]) -> tuple[int, socket.socket]:
    """Fork the fork server off this process, which must be single-threaded. Returns its pid and the agent's socket.

    `in_child` is called in the new process first: it closes what workers must not inherit.
    """
    agent_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        agent_end.close()
        in_child()
        os.setpgid(0, 0)
        if os.getppid() != agent_pid:
            os._exit(1)
        run_fork_server(server_end, start)
    server_end.close()
    return pid, agent_end
