"""How the run ends on this node: because training is done, because it cannot go on, or because another node says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from elastictrain.agent.membership import is_done
from elastictrain.agent.policy import Failure
from elastictrain.agent.supervisor import Phase
from elastictrain.log import get_logger
from elastictrain.rendezvous import events as ev

if TYPE_CHECKING:
    from elastictrain.agent.node_agent import NodeAgent

logger = get_logger(__name__)

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
FINISHED: Final = "finished"


class Ending:
    """Whether and how the run is over on this node. `exit_code` is the agent's; `failure` the one to blame, if any."""

    def __init__(self, agent: NodeAgent) -> None:
        self._agent = agent
        self.is_over = False
        self.is_closed = False
        """Another node has said that the run is finished."""
        self.exit_code = EXIT_FAILED
        self.reason = ""
        self.failure: Failure | None = None
        self.has_failed_final_save = False

    def end_if_done(self) -> None:
        """The run is done when a worker has finished and none is left that still has something to finish."""
        agent = self._agent
        if is_done(agent.workers):
            if self.has_failed_final_save:
                self.end(EXIT_FAILED, "training is done, but its last checkpoint could not be saved")
            else:
                self.end(0, "")
        elif self.is_closed and not agent.supervisor.alive():
            self.end(0, "")

    def give_up(self, failure: Failure, reason: str) -> None:
        self.failure = failure
        self.end(EXIT_USAGE if failure.is_config else EXIT_FAILED, reason)

    def closed_by_another(self, reason: str) -> None:
        """Another node has ended the run. Where it was done, workers here end by themselves; who only waited goes."""
        if self.is_over:
            return
        self.is_closed = True
        if reason != FINISHED:
            self.end(EXIT_FAILED, f"another node has ended the run: {reason}")
            return
        logger.info("the run is finished")
        for worker in self._agent.supervisor.alive():
            if worker.phase in (Phase.STARTING, Phase.WAITING):
                self._agent.kill(worker)
        self.end_if_done()

    def end(self, exit_code: int, reason: str) -> None:
        """The run is over on this node: note it and stop what still runs."""
        if self.is_over:
            return
        self.is_over, self.exit_code, self.reason = True, exit_code, reason
        agent = self._agent
        if exit_code == 0:
            agent.recorder.run_finished(exit_code)
        else:
            agent.recorder.run_stopped(exit_code, reason)
        if not (agent.config.world.is_shared and agent.departure.is_leaving):  # else the others go on
            agent.driver.handle(ev.CloseRun(reason=reason or FINISHED))
        for worker in agent.supervisor.alive():
            agent.kill(worker)
