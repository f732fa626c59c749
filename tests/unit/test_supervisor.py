"""Worker processes as the agent knows them, where no process is needed to see it."""

from __future__ import annotations

import selectors
import socket

from elastictrain.agent.supervisor import Phase, Supervisor
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
