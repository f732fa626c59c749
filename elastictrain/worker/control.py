"""What the agent tells a worker, and what the worker's main thread must know of it.

A control thread reads the channel; it never touches training. A fence ends collectives at once, whatever the main
thread is doing, even inside a C++ wait. Everything else is a value that the main thread looks at between steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final

from elastictrain.channel import CHANNEL_VERSION, Channel, ChannelError, Message
from elastictrain.errors import ConfigError, WorkerError
from elastictrain.topology import Round
from elastictrain.worker.collectives import Communicator
from elastictrain.worker.whereabouts import find_whereabouts

WELCOME_TIMEOUT_S: Final = 60.0
FENCE_CONFIRM_TIMEOUT_S: Final = 5.0
LOST_AGENT_EXIT_CODE: Final = 113


class Control:
    """The worker's end of the channel. `generation` is the one the main thread trains in, 0 before it entered."""

    def __init__(self, channel: Channel, comm: Communicator) -> None:
        self.channel = channel
        self._comm = comm
        self._changed = threading.Condition()
        self.generation = 0
        self.begun = 0
        self.place = "between"
        """What the main thread does: "draw", "step", "save", "evaluation", or "between" these."""
        self._evaluating = False
        self._fenced = 0
        self._fence_cause = ""
        self._round: Round | None = None
        self._hold_generation = 0
        self._stop_at: tuple[int, int] | None = None  # generation, step
        self._save_wanted = False
        self._is_spare = False
        self._welcome: Message | None = None
        self._unusable = ""

    def start(self) -> bool:
        """Say hello and wait for the agent's answer, WELCOME_TIMEOUT_S at most. True: this process is a spare."""
        threading.Thread(target=self._listen, name="elastictrain-control", daemon=True).start()
        self.channel.send_hello(pid=os.getpid(), version=CHANNEL_VERSION)
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_spare or self._welcome or self._unusable, WELCOME_TIMEOUT_S):
                raise WorkerError(f"expected a welcome from the agent within {WELCOME_TIMEOUT_S:.0f} s, saw none")
            return self._is_spare

    def wait_welcome(self) -> Message:
        """Give the agent's welcome. A spare blocks until it gets a place, or ends with the agent."""
        with self._changed:
            self._changed.wait_for(lambda: self._welcome or self._unusable)
            if self._welcome is None:
                raise WorkerError(self._unusable)
            return self._welcome

    # -- control thread --------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while (messages := self.channel.receive()) is not None:
                for message in messages:
                    self._take(message)
        except (ChannelError, ConfigError, KeyError) as error:
            with self._changed:
                self._unusable = f"the agent speaks another protocol: {error}"
                self._changed.notify_all()
        # The agent is gone. A worker never outlives it: nobody would fence this process any more.
        os._exit(LOST_AGENT_EXIT_CODE)

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "fence":
            generation = int(message["generation"])
            with self._changed:
                if generation > self._fenced:
                    self._fenced, self._fence_cause = generation, str(message["cause"])
                self._changed.notify_all()
            self._comm.abort(generation)
            return
        if kind == "where":
            where = find_whereabouts(place=self.place, has_flights=self._comm.has_flights())
            self.channel.send("whereabouts", **where)
            return
        with self._changed:
            if kind == "round":
                self._round = Round.from_json(message["round"])
            elif kind == "hold":
                self._hold_generation = int(message["generation"])
                if self._hold_generation == self.generation:
                    self._tell_position()
            elif kind == "stop_at":
                self._stop_at = int(message["generation"]), int(message["step"])
            elif kind == "save":
                self._save_wanted = True
            elif kind == "wait":
                self._is_spare = True
            elif kind == "welcome":
                self._welcome = message
            self._changed.notify_all()

    def _tell_position(self) -> None:
        self.channel.send("position", generation=self.generation, step=self.begun)

    # -- main thread -----------------------------------------------------------------------------------------------

    @property
    def is_fenced(self) -> bool:
        """Whether the generation that the main thread trains in is broken."""
        return self._fenced >= self.generation > 0

    @property
    def fence_cause(self) -> str:
        return self._fence_cause

    def may_begin(self, step: int) -> bool:
        """Whether step number `step` may begin now; counts it as begun. False: park first.

        Blocks while the agent finds out how far the others have come, which needs no more than one message each way.
        """
        with self._changed:
            while True:
                if self.is_fenced:
                    return False
                stop_at = self._stop_step()
                if stop_at is not None and step > stop_at:
                    return False
                if stop_at is not None or self._hold_generation != self.generation:
                    self.begun = step
                    return True
                self._changed.wait()

    def _stop_step(self) -> int | None:
        """The step behind which this generation ends, where that is known."""
        if self._stop_at is None or self._stop_at[0] != self.generation:
            return None
        return self._stop_at[1]

    def take_save_request(self) -> bool:
        wanted, self._save_wanted = self._save_wanted, False
        return wanted

    def confirm_broken(self, error: str) -> bool:
        """Tell the agent that a collective failed here and wait for its fence, FENCE_CONFIRM_TIMEOUT_S at most."""
        self.channel.send("suspect", generation=self.generation, error=error)
        with self._changed:
            return self._changed.wait_for(lambda: self.is_fenced, FENCE_CONFIRM_TIMEOUT_S)

    def wait_round(
        self,
        worker_id: str,
        parked: dict[str, Any] | None,
        *,
        save: Callable[[], None],
        meanwhile: Callable[[], None],
    ) -> Round:
        """Park (or, with None, wait as a newcomer) until a Round holds this worker and is not broken; blocks.

        `parked` is sent with the newest generation that this worker stands still in, again for every one that breaks
        before it could enter. `save()` is called when the agent wants a checkpoint meanwhile, and `meanwhile()` when
        the agent has been told: it may take as long as the others need to agree. Waiting has no deadline of its own,
        for the agent ends a run that cannot go on.
        """
        told = -1
        while True:
            with self._changed:
                settled = max(self.generation, self._fenced)
            if settled != told:
                told = settled
                if parked is None:
                    self.channel.send("ready", generation=settled)
                else:
                    self.channel.send("parked", generation=settled, **parked)
                meanwhile()
            with self._changed:
                self._changed.wait_for(
                    lambda told=told: self._fenced > told or self._save_wanted or self._is_usable(worker_id, told)  # type: ignore[misc]
                )
                if self._round is not None and self._is_usable(worker_id, told):
                    self.generation = self._round.generation
                    if self._hold_generation == self.generation:  # it came before this thread had taken the Round
                        self._tell_position()
                    return self._round
            if self.take_save_request():
                save()

    def _is_usable(self, worker_id: str, told: int) -> bool:
        round_ = self._round
        return (
            round_ is not None
            and round_.generation > max(told, self._fenced, self.generation)
            and round_.seat_of(worker_id) is not None
        )
