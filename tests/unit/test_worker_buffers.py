"""Buffers agree on one mean a step, whether the exchange starts in the backward pass or after it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastictrain.worker.buffers import FlatCopy

PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from elastictrain.worker import buffers
from elastictrain.worker.collectives import Communicator

rank, path, late = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
buffers.PATIENCE_STEPS = 4
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
comm = Communicator(torch.device("cpu"))
comm.rank, comm.world_size, comm.built = rank, 2, True

own = [torch.zeros(2, dtype=torch.float64), torch.zeros(3), torch.zeros((), dtype=torch.int64), torch.full((1,), 0.1)]
reduction = buffers.BufferReduction(comm, lambda: own)
reduction.regroup()
told = []
for step in range(1, 13):
    reduction.begin(buffers.FlatCopy(own), lambda: (0.25, 0.75)[rank])
    before = comm.num_collectives()
    own[0] += (4, 8)[rank]  # what forward does: the mean of the changes is 7
    own[1] += (2, 6)[rank]  # 5
    own[2] += 1
    reduction.start()
    was_early = comm.num_collectives() > before
    reduction.start()  # the second bucket
    if step in late.get(str(rank), []):
        own[0] += 40
    assert reduction.finish()
    told.append({"early": was_early, "values": [each.tolist() for each in own]})
print(json.dumps(told), flush=True)
dist.barrier()
os._exit(0)
"""


def run_ranks(tmp_path: Path, late: dict[str, list[int]]) -> list[list[dict[str, object]]]:
    """Run the program on two ranks; `late` names the steps in which a rank changes a buffer after its gradients."""
    words = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen([*words, str(rank), str(tmp_path / "store"), json.dumps(late)], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    told = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(each) for each in told]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("late", "early_steps"),
    [
        ({}, {4, 5, 6, 7, 8, 9, 10, 11, 12}),
        ({"0": list(range(1, 13)), "1": list(range(1, 13))}, set()),  # as with gradient checkpointing
        ({"0": [2]}, {10, 11, 12}),  # found in the probation: patience is 4 steps, then 3 must be quiet
        ({"1": [6]}, {4, 5, 6, 7}),  # the first time ever: seen by all one step later
    ],
)
def test_ranks_hold_the_same_means_when_the_exchange_is_early_or_late(
    tmp_path: Path, late: dict[str, list[int]], early_steps: set[int]
) -> None:
    first, second = run_ranks(tmp_path, late)
    for mine, theirs, step in zip(first, second, range(1, 13), strict=True):
        assert mine["early"] is theirs["early"] is (step in early_steps), f"step {step}"
        if not (step == 6 and late == {"1": [6]}):  # that rank's own late change, until the next exchange
            assert mine["values"] == theirs["values"], f"step {step}"
    weights = {"0": 0.25, "1": 0.75}
    drift = 40 * sum(weights[rank] * len(steps) for rank, steps in late.items())
    values = first[-1]["values"]
    assert isinstance(values, list)
    assert values[0] == [12 * 7 + drift] * 2
    assert values[1:3] == [[12 * 5.0] * 3, 12]
    assert values[3] == torch.full((1,), 0.1).tolist(), "a buffer that nobody changed keeps its bits"


def test_copy_is_put_back_bit_for_bit_when_types_and_shapes_are_mixed() -> None:
    tensors = [
        torch.randn(3, 4).t(),
        torch.arange(5),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0),
        torch.tensor(True),
        torch.randn(2, dtype=torch.float64),
    ]
    expected = [tensor.clone() for tensor in tensors]
    copy = FlatCopy(tensors)
    for tensor in tensors:
        tensor.copy_(torch.ones_like(tensor) * 7)
    copy.put_back(tensors)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, expected, strict=True))
    assert sum(len(indices) for indices, _ in copy.floats) == 4
