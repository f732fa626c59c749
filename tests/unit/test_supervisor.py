"""Worker processes as the agent knows them, where no process is needed to see it."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Mapping
from typing import Any

from elastictrain.agent.forkserver import receive_message, send_message
from elastictrain.agent.supervisor import Phase, Supervisor, WorkerProcess
from elastictrain.channel import worker_channel
from elastictrain.clock import SystemClock


def test_supervisor_tells_of_the_loss_and_closes_when_the_fork_server_dies_before_it_is_asked() -> None:
    agent_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    told: list[str] = []
    with selectors.DefaultSelector() as selector:
        supervisor = Supervisor(
            fork_server=agent_end,
            selector=selector,
            clock=SystemClock(),
            on_message=lambda *_: None,
            on_death=lambda _: None,
            on_exit=lambda _: None,
            on_fork_server_lost=lambda: told.append("lost"),
        )
        supervisor.start()
        server_end.close()
        worker = supervisor.spawn("node-0-0", local_rank=0, attempt=0, env={}, cwd="/", streams=())
        assert worker.phase is Phase.ENDED
        for key, _ in selector.select(10):
            key.data()
        assert told == ["lost"]
        supervisor.close()
        assert not selector.get_map()


def test_worker_is_not_heard_before_its_pid_is_known() -> None:
    agent_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    heard: list[tuple[str, int]] = []

    def note(worker: WorkerProcess, message: Mapping[str, Any]) -> None:
        heard.append((message["kind"], worker.pid))

    with selectors.DefaultSelector() as selector:
        supervisor = Supervisor(
            fork_server=agent_end,
            selector=selector,
            clock=SystemClock(),
            on_message=note,
            on_death=lambda _: None,
            on_exit=lambda _: None,
            on_fork_server_lost=lambda: None,
        )
        supervisor.start()
        supervisor.spawn("node-0-0", local_rank=0, attempt=0, env={}, cwd="/", streams=())
        received = receive_message(server_end)
        assert received is not None
        worker_end = worker_channel(received[1][0])
        worker_end.send("hello")  # a worker may be faster than the word of the fork server
        for key, _ in selector.select(0):
            key.data()
        assert heard == []
        pidfd = os.pidfd_open(os.getpid())
        send_message(server_end, {"kind": "spawned", "worker_id": "node-0-0", "pid": os.getpid()}, [pidfd])
        os.close(pidfd)
        while not heard:
            ready = selector.select(10)
            assert ready, "the word must come"
            for key, _ in ready:
                key.data()
        assert heard == [("hello", os.getpid())]
        supervisor.close()
        assert [key.fileobj for key in selector.get_map().values()] == [agent_end]
        worker_end.close()
        server_end.close()
