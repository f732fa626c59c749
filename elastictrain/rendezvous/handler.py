"""The rendezvous as torch's elastic agents know it.

Two uses. Under elastictrain's own agent the driver is part of the agent's loop and the handler only translates. Under a
plain agent (`torchrun --rdzv-backend=...`), which knows nothing of workers that survive, the node as a whole is the one
candidate: every change of membership restarts its workers, and the agent's own calls drive the driver.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastictrain.clock import Clock
from elastictrain.errors import ConfigError, StoreError
from elastictrain.rendezvous.driver import Driver
from elastictrain.rendezvous.events import (
    CloseRun,
    LocalBroken,
    LocalChanged,
    NodeReady,
    Output,
    Refused,
    ReportPosition,
    RunClosed,
)
from elastictrain.rendezvous.protocol import Phase
from elastictrain.topology import Candidate, Round

StoreFactory = Callable[[str, int], Store]
"""Makes the store of a process group from the host and port of the Round; serves it if they are this node's."""


class ElasticRendezvousHandler(RendezvousHandler):
    """Hands the Rounds of a Driver to a torch elastic agent.

    With `is_whole_node` the handler speaks for the node: it joins, offers the node as one candidate, and answers every
    change with a restart. Without it the owner of the driver does that, and gets each output through `on_output`.
    All calls come from the agent's thread.
    """

    def __init__(
        self,
        driver: Driver,
        *,
        clock: Clock,
        backend: str,
        store_factory: StoreFactory,
        on_output: Callable[[Output], None] | None = None,
        is_whole_node: bool = False,
    ) -> None:
        self._driver = driver
        self._clock = clock
        self._backend = backend
        self._store_factory = store_factory
        self._on_output = on_output
        self._is_whole_node = is_whole_node
        self._returned = 0
        self._over: Refused | RunClosed | None = None
        self._failure: Exception | None = None

    def get_backend(self) -> str:
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """True: the workers may use the store that the Round names."""
        return True

    def get_run_id(self) -> str:
        return self._driver.state.settings.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until this node has entered a Round that has not been handed out yet.

        Raises torch's RendezvousClosedError when the run is over, RendezvousTimeoutError when the minimum did not come
        in time, RendezvousConnectionError when the store failed for good, and ConfigError when this node is refused.
        """
        self._poll()
        if self._is_whole_node:
            self._offer_node()
        with selectors.DefaultSelector() as selector:
            selector.register(self._driver, selectors.EVENT_READ)
            while True:
                self._poll()
                self._raise_if_over()
                made = self._new_round()
                if made is not None:
                    return self._info(made)
                due_s = self._driver.next_deadline_s()
                selector.select(None if due_s is None else max(0.0, due_s - self._clock.now_s()))

    def is_closed(self) -> bool:
        return self._driver.state.phase is Phase.CLOSED

    def set_closed(self) -> None:
        """Close the run for all nodes. Does not wait until they know."""
        self._driver.handle(CloseRun(reason="closed by its agent"))
        self._poll()

    def num_nodes_waiting(self) -> int:
        """Number of nodes that wait for the next Round; for a plain agent above 0 exactly when it must restart."""
        if not self._is_whole_node:
            return self._driver.num_nodes_waiting
        self._poll()
        state = self._driver.state
        # Workers of a run that was closed end by themselves: the agent that closed it had finished.
        is_over = isinstance(self._over, Refused) or (self._over is None and state.fenced >= self._returned > 0)
        return max(1, self._driver.num_nodes_waiting) if is_over else 0

    def serve(self) -> bool:
        """Take in what the store has sent and renew the lease, between the agent's calls; False when that is over.

        Never blocks. What fails for good is raised by the agent's next call.
        """
        if self._failure is None:
            try:
                self._poll()
            except (RendezvousConnectionError, ConfigError) as error:
                self._failure = error
        return self._failure is None

    def shutdown(self) -> bool:
        """Leave the rendezvous; the run itself goes on."""
        self._driver.close()
        return True

    def _poll(self) -> None:
        if self._failure is not None:
            raise self._failure
        is_planned_restart = False
        try:
            outputs = self._driver.poll()
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error
        for output in outputs:
            if isinstance(output, Refused | RunClosed):
                self._over = output
            if self._on_output is not None:
                self._on_output(output)
            if self._is_whole_node and isinstance(output, ReportPosition):
                # Workers of a plain agent cannot stop at a step: the planned change is a restart.
                self._driver.handle(LocalBroken(generation=output.generation, cause="restart", planned=True))
                is_planned_restart = True
        if is_planned_restart:
            self._poll()

    def _offer_node(self) -> None:
        """Say that none of this node's workers runs: the agent stops them before it asks for the next Round."""
        state = self._driver.state
        node = Candidate(worker_id=state.node_id, node_id=state.node_id, local_rank=0)
        if state.phase is Phase.IDLE:
            self._driver.handle(NodeReady(candidates=(node,)))
        elif state.phase in (Phase.JOINING, Phase.JOINED) and self._new_round() is None:
            if state.is_seated and state.fenced < state.generation:
                self._driver.handle(LocalBroken(generation=state.generation, cause="restart"))
            self._driver.handle(LocalChanged(candidates=(node,), settled=state.generation, wants_in=True))

    def _new_round(self) -> Round | None:
        state = self._driver.state
        is_new = state.is_seated and self._returned < state.seat_generation and state.fenced < state.seat_generation
        return state.round if is_new else None

    def _raise_if_over(self) -> None:
        match self._over:
            case RunClosed(reason=reason):
                raise RendezvousClosedError(f"run {self.get_run_id()} is over: {reason}")
            case Refused(kind="timeout", message=message):
                raise RendezvousTimeoutError(message)
            case Refused(message=message):
                raise ConfigError(message)
            case None:
                pass

    def _info(self, made: Round) -> RendezvousInfo:
        self._returned = made.generation
        store = self._store_factory(made.store_host, made.store_port)
        # One server may serve several generations: no key of an older one may be read.
        prefix = f"/elastictrain/{self.get_run_id()}/{made.generation}"
        return RendezvousInfo(
            PrefixStore(prefix, store),
            made.node_ids.index(self._driver.state.node_id),
            len(made.node_ids),
            RendezvousStoreInfo(made.store_host, made.store_port),
        )
