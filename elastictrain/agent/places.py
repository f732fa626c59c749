"""The places of this node's workers, one for each local rank: who is started for them, and how long one is empty."""

from __future__ import annotations

import os
import selectors
from typing import TYPE_CHECKING, Final

from elastictrain.agent.environment import current_environment, place_variables, worker_environment
from elastictrain.agent.store_host import StoreHost, find_master_port
from elastictrain.agent.streams import Streams
from elastictrain.agent.supervisor import WorkerProcess

if TYPE_CHECKING:
    from elastictrain.agent.node_agent import NodeAgent

NO_PLACE: Final = -1
"""Local rank of a spare."""


class Places:
    """Starts the processes of a node, with their environment and streams, and counts the attempts at each place."""

    def __init__(
        self, agent: NodeAgent, selector: selectors.BaseSelector, store_host: StoreHost, *, uses_agent_store: bool
    ) -> None:
        self._agent = agent
        self._store_host = store_host
        self._uses_agent_store = uses_agent_store
        self._master_port = find_master_port(store_host, uses_agent_store=uses_agent_store)
        self.streams = Streams(agent.config, selector)
        self._attempts: dict[int, int] = {}
        self._num_spares = 0
        self._empty: dict[int, tuple[float, str]] = {}  # since when (monotonic), and who was lost

    def start(self, local_rank: int) -> WorkerProcess:
        """Start a process for this place."""
        attempt = self._next_attempt(local_rank)
        worker_id = f"{self._agent.node_id}-{local_rank}-{attempt}"
        worker = self._spawn(
            worker_id,
            local_rank=local_rank,
            attempt=attempt,
            env=self._environment(worker_id, local_rank, attempt),
            streams=self.streams.open(local_rank, attempt),
        )
        worker.is_newcomer = self._is_under_way()
        return worker

    def start_spare(self, *, lowers_nice: bool) -> WorkerProcess:
        """Start a process without a place, at low priority. Its environment says nothing of a place."""
        worker_id = f"{self._agent.node_id}-spare-{self._num_spares}"
        self._num_spares += 1
        env = self._environment(worker_id, 0, 0)
        for name in place_variables(env, num_places=self._agent.config.world.nproc_per_node):
            del env[name]
        streams = self.streams.open_for_spares(self._agent.node_id)
        return self._spawn(
            worker_id,
            local_rank=NO_PLACE,
            attempt=0,
            env=env,
            streams=streams,
            background={"lowers_nice": lowers_nice},
        )

    def give(self, spare: WorkerProcess, local_rank: int) -> WorkerProcess:
        """Let a spare that waits in `init()` be the worker of this place, which its welcome tells it."""
        attempt = self._next_attempt(local_rank)
        spare.is_spare, spare.was_spare = False, True
        spare.local_rank, spare.attempt = local_rank, attempt
        self._agent.spares.changed()
        env = self._environment(spare.worker_id, local_rank, attempt)
        names = place_variables(env, num_places=self._agent.config.world.nproc_per_node)
        streams = self.streams.open(local_rank, attempt)
        try:
            self._agent.dialogue.welcome(spare, environment={name: env[name] for name in names}, streams=streams)
        finally:
            _close(streams)
        return spare

    def renew_store(self) -> None:
        """A store without the keys of the workers before, for all that are started from now on."""
        self._store_host.close()
        self._store_host = StoreHost(self._store_host.host)
        self._master_port = find_master_port(self._store_host, uses_agent_store=self._uses_agent_store)

    def lost(self, worker: WorkerProcess) -> None:
        """A worker that has trained is dead: its place is empty, since then or since an earlier loss."""
        if worker.generation:
            now_s = self._agent.clock.now_s()
            self._empty.setdefault(worker.local_rank, (min(worker.evidence_s or now_s, now_s), worker.worker_id))

    def taken(self, worker: WorkerProcess) -> None:
        """A worker trains: if it does so in the place of a lost one, note how long the world was one short."""
        since_s, lost = self._empty.pop(worker.local_rank, (0.0, ""))
        if lost:
            self._agent.recorder.replaced(worker, lost=lost, seconds=self._agent.clock.now_s() - since_s)

    def close(self) -> None:
        self.streams.close()
        self._store_host.close()

    def _spawn(
        self,
        worker_id: str,
        *,
        local_rank: int,
        attempt: int,
        env: dict[str, str],
        streams: tuple[int, int],
        background: dict[str, bool] | None = None,
    ) -> WorkerProcess:
        try:
            return self._agent.supervisor.spawn(
                worker_id,
                local_rank=local_rank,
                attempt=attempt,
                env=env,
                cwd=str(self._agent.config.cwd),
                streams=streams,
                background=background,
            )
        finally:
            _close(streams)

    def _next_attempt(self, local_rank: int) -> int:
        self._attempts[local_rank] = self._attempts.get(local_rank, -1) + 1
        return self._attempts[local_rank]

    def _environment(self, worker_id: str, local_rank: int, attempt: int) -> dict[str, str]:
        return worker_environment(
            self._agent.config,
            current_environment(),
            worker_id=worker_id,
            local_rank=local_rank,
            master_addr=self._store_host.host,
            master_port=self._master_port,
            restart_count=attempt,
            uses_agent_store=self._uses_agent_store,
        )

    def _is_under_way(self) -> bool:
        return any(other.holds_state for other in self._agent.supervisor.alive())


def _close(fds: tuple[int, int]) -> None:
    for fd in fds:
        os.close(fd)
