"""Dropout, BatchNorm, Adam, an LR schedule, an EMA, a scaler-free float64 model and numpy augmentation in one script.

It writes a digest of everything that trains, per rank, and can lose a worker or a connection at a chosen step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import socket
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset

import elastictrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--fault", choices=["none", "kill", "disconnect"], default="none")
parser.add_argument("--rank", type=int, default=-1)
parser.add_argument("--step", type=int, default=9)
parser.add_argument("--num-workers", type=int, default=0)
args = parser.parse_args()


class Noisy(Dataset):
    """Points with noise from every generator that an augmentation might use."""

    def __len__(self) -> int:
        return 203

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.linspace(-1, 1, 12, dtype=torch.float64) * (index % 7 - 3)
        noise = np.random.normal(size=12) + random.random() + torch.randn(12, dtype=torch.float64).numpy()
        return base + torch.from_numpy(noise) * 0.1, torch.tensor(index % 7)


class Metric:
    """A running sum in plain Python, as a script's own metric would be."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


def digest(*states: object) -> str:
    seen = hashlib.sha256()

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            seen.update(str((value.dtype, tuple(value.shape))).encode())
            seen.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                seen.update(str(key).encode())
                visit(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)
        else:
            seen.update(repr(value).encode())

    for state in states:
        visit(state)
    return seen.hexdigest()


def break_here() -> None:
    if run.step != args.step or run.local_rank != args.rank or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    mark = args.out / "fault-done"
    if mark.exists():
        return
    mark.touch()
    if args.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        try:
            sock.getpeername()
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        sock.close()


torch.set_num_threads(1)
run = elastictrain.init()
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 7)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
metric = Metric()
model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
run.register(ema=ema, metric=metric)
model.module[4].register_full_backward_hook(lambda *_: break_here())

for step in run.steps(Noisy(), batch_size=24, epochs=3, num_workers=args.num_workers):
    with step as (inputs, targets):
        if step.num_samples:
            metric.total += 1.0
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        ema.update_parameters(model.module)

states = (
    model.module.state_dict(),
    optimizer.state_dict(),
    scheduler.state_dict(),
    ema.state_dict(),
    metric.state_dict(),
)
if run.is_main:
    torch.save(states[:4], args.out / "final.pt")
result = {"rank": run.rank, "pid": os.getpid(), "digest": digest(*states), "total": metric.total}
(args.out / f"end-{os.getpid()}.json").write_text(json.dumps(result))
