"""What the agent writes down from the workers' words, in whatever order these come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elastictrain.agent.recorder import Recorder
from elastictrain.clock import SystemClock
from elastictrain.topology import Round, Seat


def commit(step: int, rank: int, *, share: int, **values: float) -> dict[str, Any]:
    return {
        "kind": "commit",
        "step": step,
        "rank": rank,
        "share": share,
        "values": values,
        "seconds": {"draw": 0.0, "compute": 0.0, "reduce": 0.0, "commit": 0.0},
        **{"loop": 0, "epoch": 0, "start": 4 * step - 4, "stop": 4 * step, "epoch_length": 400, "batch_size": 4},
        **{"world_size": 2, "generation": 1},
    }


def values_by_step(path: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["step"]: line["values"] for line in lines if line["event"] == "user_values"}


def test_means_are_over_all_ranks_when_one_rank_tells_of_many_steps_before_the_other(tmp_path: Path) -> None:
    recorder = Recorder(run_id="r", run_dir=tmp_path, node_id="n", clock=SystemClock())
    seats = tuple(
        Seat(rank=rank, worker_id=f"n-{rank}-0", node_id="n", local_rank=rank, stream=rank) for rank in range(2)
    )
    recorder.round(Round(generation=1, seats=seats, store_host="127.0.0.1", store_port=1, reason="start"))
    for step in (1, 2, 3):
        recorder.committed(commit(step, 1, share=1, loss=10.0 * step))
    for step in (1, 2):
        recorder.committed(commit(step, 0, share=3, loss=2.0 * step, only_here=1.0))
    path = recorder.ledger.path
    assert values_by_step(path) == {
        1: {"loss": (10.0 + 3 * 2.0) / 4, "only_here": 1.0},
        2: {"loss": (20.0 + 3 * 4.0) / 4, "only_here": 1.0},
    }
    recorder.run_stopped(1, "the other rank never told of the last step")
    assert values_by_step(path)[3] == {"loss": 30.0}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "commit"] == [1, 2, 3]
    recorder.close()
