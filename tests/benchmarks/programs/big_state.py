"""Trains a model of many tensors; the last rank kills itself at some steps, so that a newcomer needs the whole state.

Every process writes how long each `sync` took that sent a state. At the end all ranks broadcast as many bytes as the
state has with gloo alone, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import elastictrain
from elastictrain.worker import recovery

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--mib", type=int, required=True)
parser.add_argument("--tensors", type=int, required=True)
parser.add_argument("--kills", type=int, required=True)
args = parser.parse_args()

STEPS_BETWEEN = 3
torch.set_num_threads(1)
send_state = recovery._send_state
sync = recovery.sync
syncs: list[dict[str, Any]] = []


def timed_sync(run: Any) -> None:
    began_s = time.monotonic()
    sync(run)
    if syncs and "ended_s" not in syncs[-1]:
        syncs[-1].update(began_s=began_s, ended_s=time.monotonic())
        (args.out / f"sync-{os.getpid()}.json").write_text(json.dumps(syncs))


def noted_send(run: Any, source: int, **rest: Any) -> None:
    syncs.append({"generation": run.generation, "rank": run.rank, "source": source, "sends_s": time.monotonic()})
    send_state(run, source, **rest)


recovery.sync, recovery._send_state = timed_sync, noted_send


class Sum(nn.Module):
    """Many parameters, little to compute."""

    def __init__(self, num_tensors: int, num_values: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(num_values)) for _ in range(num_tensors))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.mean() * torch.stack([part.sum() for part in self.parts]).sum()


run = elastictrain.init()
# Adam has two values for each of the model's, and a count for each tensor.
num_tensors = args.tensors // 4
model: nn.Module = Sum(num_tensors, args.mib * (1 << 20) // 4 // 3 // num_tensors)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer = run.prepare(model, optimizer)
num_steps = STEPS_BETWEEN * (args.kills + 1)
dataset = TensorDataset(torch.ones(num_steps * 4, 1))

for step in run.steps(dataset, batch_size=4, epochs=1):
    with step as (inputs,):
        killed = args.out / f"killed-{run.step}"
        is_due = run.step % STEPS_BETWEEN == 1 and run.step < STEPS_BETWEEN * args.kills
        if run.rank == run.world_size - 1 and is_due and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        model(inputs).backward()
        optimizer.step()
        optimizer.zero_grad()

numbers = []
flat = torch.ones(args.mib << 20, dtype=torch.uint8)
for _ in range(5):
    dist.barrier()
    began_s = time.monotonic()
    dist.broadcast(flat, 0)
    numbers.append(time.monotonic() - began_s)
(args.out / f"raw-{os.getpid()}.json").write_text(json.dumps(numbers))
