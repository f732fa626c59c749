"""Runs that tests write with the real LedgerWriter: the events of a small training run, as an agent records them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from elastictrain.clock import ManualClock
from elastictrain.ledger import LedgerWriter, ledger_path

RUN_ID = "run-1"


def make_run_dir(path: Path, *, run_id: str = RUN_ID) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps({"version": 1, "run_id": run_id}))
    return path


@dataclass
class RecordedRun:
    """Writes a run's ledger. `train` commits steps one after another, `cursor` says where in the epoch it is."""

    run_dir: Path
    node: str = "node0"
    length: int = 10
    batch_size: int = 4
    clock: ManualClock = field(default_factory=ManualClock)
    generation: int = 1
    world_size: int = 2
    step: int = 0
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        make_run_dir(self.run_dir)
        self.open()

    def open(self) -> None:
        self.writer = LedgerWriter(ledger_path(self.run_dir, self.node), RUN_ID, self.node, self.clock)
        self.writer.append("node_started", pid=1)

    def commit(self, **changed: object) -> None:
        """One commit; `changed` overrides what a right one would hold."""
        self.clock.advance(0.1)
        stop = min(self.position + self.batch_size, self.length)
        self.step += 1
        fields: dict[str, object] = {
            "step": self.step,
            "loop": 0,
            "epoch": self.epoch,
            "start": self.position,
            "stop": stop,
            "epoch_length": self.length,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "generation": self.generation,
        }
        self.writer.append("commit", **{**fields, **changed})
        self.position = stop

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.commit()
            if self.position == self.length:
                self.writer.append("epoch_finished", loop=0, epoch=self.epoch, samples=self.length)
                self.epoch += 1
                self.position = 0

    def fail_and_recover(self, *, cause: str = "signal") -> None:
        names = {"worker_id": "w1", "rank": 1, "detail": "SIGKILL"}
        self.writer.append("broken", generation=self.generation, cause=cause, **names)
        self.clock.advance(0.3)
        self.generation += 1
        self.writer.append("round", generation=self.generation, world_size=self.world_size, seats=[], reason="test")
        stages = {"detect": 0.01, "agree": 0.09, "resume": 0.2}
        self.writer.append(
            "recovered", generation=self.generation, cause=cause, seconds_by_stage=stages, step=self.step
        )

    def die_and_resume(self, *, at_step: int, epoch: int, position: int) -> None:
        """Everything is killed, and a new agent goes on from the checkpoint of `at_step`."""
        self.writer.close()
        self.clock.advance(5.0)
        self.open()
        self.step, self.epoch, self.position = at_step, epoch, position
        self.generation = 1
        self.writer.append("resumed", step=at_step, cursor={}, path="checkpoints/x", world_size=self.world_size)

    def finish(self) -> Path:
        self.writer.append("run_finished", step=self.step, exit_code=0)
        self.writer.close()
        return self.run_dir


def finished_run(run_dir: Path) -> Path:
    """Three epochs of 10 samples with one recovered failure and one resume in the middle of an epoch."""
    run = RecordedRun(run_dir)
    run.train(4)
    run.fail_and_recover()
    run.train(3)
    run.die_and_resume(at_step=5, epoch=1, position=8)
    run.world_size = 3
    run.train(4)
    return run.finish()
