"""The workers of one node as processes: start, watch, signal, stop. What they mean to the run, `node_agent` knows."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from elastictrain.agent.forkserver import receive_message, send_message
from elastictrain.channel import Channel, ChannelError, channel_pair
from elastictrain.clock import Clock
from elastictrain.log import get_logger

QUIET_S: Final = 0.1
"""How long commits may wait to be read, together: the agent shares the cores with the training."""

logger = get_logger(__name__)


class Phase(Enum):
    """How far a worker has come. LOST: it is dead, but its exit status is not known yet."""

    STARTING = "starting"
    WAITING = "waiting"
    TRAINING = "training"
    PARKED = "parked"
    FINISHED = "finished"
    LOST = "lost"
    ENDED = "ended"


ALIVE = frozenset({Phase.STARTING, Phase.WAITING, Phase.TRAINING, Phase.PARKED, Phase.FINISHED})


@dataclass(slots=True)
class WorkerProcess:
    """One worker process, from its start to its end.

    `is_late`: it was started when others had finished, to do what a lost worker still had to do. `left_early`: it said
    that it had finished, and the others trained on. `is_spare`: it has no place yet.
    """

    worker_id: str
    local_rank: int
    attempt: int
    channel: Channel
    pid: int = 0
    pidfd: int = -1
    phase: Phase = Phase.STARTING
    is_elastic: bool = False
    is_newcomer: bool = False
    rank: int | None = None
    generation: int = 0
    step: int = 0
    settled: int = 0
    evaluating: bool = False
    holds_state: bool = False
    has_finished: bool = False
    is_late: bool = False
    is_spare: bool = False
    was_spare: bool = False
    has_committed: bool = False
    left_early: bool = False
    position: tuple[int, int] | None = None
    exception: Mapping[str, Any] | None = None
    exit_code: int | None = None
    killed_by_agent: bool = False
    evidence_s: float | None = None
    early_signal: signal.Signals | None = None
    hang: str = ""
    hang_stack: str = ""

    @property
    def is_alive(self) -> bool:
        return self.phase in ALIVE


@dataclass(slots=True)
class Supervisor:
    """Starts workers through the fork server and tells of their messages, deaths and exit codes, all as events.

    `on_message(worker, message)`, `on_death(worker)` (as soon as the kernel knows) and `on_exit(worker)` (with its
    exit code) are called from `handle`, in the agent's loop; `on_stop(worker, is_stopped)` when a signal has stopped it
    or let it go on.
    """

    fork_server: socket.socket
    selector: selectors.BaseSelector
    clock: Clock
    on_message: Callable[[WorkerProcess, Mapping[str, Any]], None]
    on_death: Callable[[WorkerProcess], None]
    on_exit: Callable[[WorkerProcess], None]
    on_fork_server_lost: Callable[[], None]
    on_stop: Callable[[WorkerProcess, bool], None] = lambda _worker, _is_stopped: None
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    _quiet: dict[str, WorkerProcess] = field(default_factory=dict)
    _quiet_until_s: float = 0.0

    def start(self) -> None:
        self.selector.register(self.fork_server, selectors.EVENT_READ, self._read_fork_server)

    def spawn(
        self,
        worker_id: str,
        *,
        local_rank: int,
        attempt: int,
        env: Mapping[str, str],
        cwd: str,
        streams: tuple[int, ...],
        background: Mapping[str, bool] | None = None,
    ) -> WorkerProcess:
        """Ask the fork server for a worker; its pid follows as an event. `streams`: descriptors for stdout, stderr.

        `background` makes it a spare, and says how its priority is lowered.
        """
        channel, worker_end = channel_pair()
        worker = WorkerProcess(worker_id, local_rank, attempt, channel, is_spare=background is not None)
        self.workers[worker_id] = worker
        try:
            request = {"kind": "spawn", "worker_id": worker_id, "env": dict(env), "cwd": cwd, "background": background}
            send_message(self.fork_server, request, [worker_end.fileno(), *streams])
        except ConnectionError:  # it is dead: the end of its socket is an event that tells
            worker.phase = Phase.ENDED
        finally:
            worker_end.close()
        return worker

    def next_read_s(self) -> float | None:
        """When `read_due` has something to do (monotonic), None when no commits may be waiting."""
        return self._quiet_until_s if self._quiet else None

    def read_due(self) -> None:
        """Read the commits that came without waking anybody, when they have waited for QUIET_S."""
        if self._quiet and self.clock.now_s() >= self._quiet_until_s:
            self.read_quiet()

    def read_quiet(self) -> None:
        """Read them now. Who has sent none is listened to again."""
        for worker in list(self._quiet.values()):
            if not self._read_channel(worker) and self._quiet.pop(worker.worker_id, None) is not None:
                self._listen(worker)
        self._quiet_until_s = self.clock.now_s() + QUIET_S

    def alive(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers.values() if worker.is_alive]

    def send(self, worker: WorkerProcess, kind: str, **fields: Any) -> None:
        if worker.is_alive:
            worker.channel.send(kind, **fields)

    def signal(self, worker: WorkerProcess, number: signal.Signals) -> None:
        """Signal the worker's whole process group; one that is being started gets it when it is there."""
        if not worker.pid:
            worker.early_signal = number
        elif worker.phase is not Phase.ENDED:
            try:
                os.killpg(worker.pid, number)
            except ProcessLookupError:  # it has not made its process group yet
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(worker.pidfd, number)

    def forget(self, worker: WorkerProcess) -> None:
        """Drop a worker that has ended."""
        self.workers.pop(worker.worker_id, None)

    # -- events ----------------------------------------------------------------------------------------------------

    def _read_fork_server(self) -> None:
        received = receive_message(self.fork_server)
        if received is None:
            self.selector.unregister(self.fork_server)
            for started in self.workers.values():
                if not started.pid:
                    started.phase = Phase.ENDED  # it was asked for and will never come
            self.on_fork_server_lost()
            return
        message, fds = received
        worker = self.workers.get(message["worker_id"])
        if worker is None:
            for fd in fds:
                os.close(fd)
        elif message["kind"] == "spawned":
            worker.pid, worker.pidfd = int(message["pid"]), fds[0]
            self._listen(worker)  # not before: what it says is written down with its pid
            self.selector.register(worker.pidfd, selectors.EVENT_READ, lambda: self._died(worker))
            if worker.early_signal is not None:
                self.signal(worker, worker.early_signal)
        elif message["kind"] == "stopped":
            self.on_stop(worker, bool(message["stopped"]))
        elif message["kind"] == "exited":
            worker.evidence_s = min(worker.evidence_s or float("inf"), float(message["found_s"]))
            self._died(worker)
            worker.exit_code = os.waitstatus_to_exitcode(int(message["status"]))
            worker.phase = Phase.ENDED
            self.on_exit(worker)

    def _listen(self, worker: WorkerProcess) -> None:
        self.selector.register(worker.channel, selectors.EVENT_READ, lambda: self._read_channel(worker))

    def _rung(self, worker: WorkerProcess) -> None:
        """The worker has sent something that does not wait."""
        if worker.channel.doorbell >= 0:
            worker.channel.hear()
            while self._read_channel(worker):
                pass

    def _read_channel(self, worker: WorkerProcess) -> bool:
        """Handle what the worker has sent; False when there was nothing."""
        if worker.channel.fileno() < 0:
            return False  # closed by an event of the same turn
        had_doorbell = worker.channel.doorbell >= 0
        try:
            messages = worker.channel.receive()
        except ChannelError as error:
            logger.error("worker %s: %s; it is stopped", worker.worker_id, error)
            self._close_channel(worker)
            self.signal(worker, signal.SIGKILL)
            return False
        if messages is None:
            self._close_channel(worker)
            return False
        if worker.channel.doorbell >= 0:
            if not had_doorbell:
                self.selector.register(worker.channel.doorbell, selectors.EVENT_READ, lambda: self._rung(worker))
            self._be_quiet(worker)
        for message in messages:
            self.on_message(worker, message)
        return bool(messages)

    def _be_quiet(self, worker: WorkerProcess) -> None:
        """Let what comes next wait, as long as the other workers' commits; what is urgent rings."""
        if worker.worker_id not in self._quiet:
            if not self._quiet:
                self._quiet_until_s = self.clock.now_s() + QUIET_S
            self._quiet[worker.worker_id] = worker
            self.selector.unregister(worker.channel)

    def _died(self, worker: WorkerProcess) -> None:
        """The kernel says that the worker is dead: take what it still said, then tell."""
        if worker.pidfd >= 0:
            self.selector.unregister(worker.pidfd)
            os.close(worker.pidfd)
            worker.pidfd = -1
        if not worker.is_alive:
            return
        self._drain(worker)
        worker.phase = Phase.LOST
        self.on_death(worker)

    def _drain(self, worker: WorkerProcess) -> None:
        """Read what a dead worker had sent before: a commit it told of counts."""
        if worker.channel.fileno() < 0:
            return
        with contextlib.suppress(ChannelError):  # killed in the middle of a line
            while messages := worker.channel.receive():
                for message in messages:
                    self.on_message(worker, message)
        self._close_channel(worker)

    def _close_channel(self, worker: WorkerProcess) -> None:
        if worker.channel.fileno() < 0:
            return
        if self._quiet.pop(worker.worker_id, None) is None and worker.pid:
            self.selector.unregister(worker.channel)
        if worker.channel.doorbell >= 0:
            self.selector.unregister(worker.channel.doorbell)
        worker.channel.close()

    def close(self) -> None:
        """Close every descriptor; the fork server kills what is left when its socket closes."""
        for worker in self.workers.values():
            self._close_channel(worker)
            if worker.pidfd >= 0:
                self.selector.unregister(worker.pidfd)
                os.close(worker.pidfd)
                worker.pidfd = -1
        self.fork_server.close()
