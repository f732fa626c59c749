"""A program of the spawn style: a function that gets its rank, started from Python."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import elastictrain


def train(rank: int, out: str, fail: str) -> None:
    run = elastictrain.init()
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    features = torch.arange(40, dtype=torch.float64).reshape(20, 2) / 40
    for step in run.steps(torch.utils.data.TensorDataset(features), 4, epochs=2):
        with step as (batch,):
            if fail == "raise" and run.step == 3:
                raise LookupError("as asked")
            marker = Path(out) / "died"
            if fail == "kill" and run.step == 3 and rank == 1 and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (Path(out) / f"rank-{rank}-{os.getpid()}").write_text(str(model.module.weight.tolist()))


if __name__ == "__main__":
    folder, how = sys.argv[1:]
    try:
        elastictrain.launch(train, args=(folder, how), nproc_per_node=2, run_dir=f"{folder}/run")
    except elastictrain.WorkerError as error:
        print(f"launch says: {error}")
        sys.exit(7)
    print("launch returned")
