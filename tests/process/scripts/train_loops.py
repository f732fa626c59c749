"""Training loops of many kinds on one small data set; each can lose a worker at the chosen place. float64."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastictrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--kind", required=True)
parser.add_argument("--kill", type=int, default=-1)
args = parser.parse_args()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def die() -> None:
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and run.step == 7 and run.local_rank == args.kill:
        os.kill(os.getpid(), signal.SIGKILL)


def error(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((one(inputs) - targets) ** 2).mean()


def accumulate_by_hand(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    (error(inputs, targets) / 2).backward()
    die()
    if run.step % 2 == 1:
        nn.utils.clip_grad_norm_(one.parameters(), 0.5)
        first.step()
        first.zero_grad(set_to_none=False)


def two_optimizers(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    first.zero_grad()
    error(inputs, targets).backward()
    first.step()
    die()  # the first model is updated already
    second.zero_grad()
    ((two(inputs) - one(inputs).detach()) ** 2).mean().backward()
    second.step()


def closure(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    def evaluate() -> torch.Tensor:
        first.zero_grad()
        loss = error(inputs, targets)
        loss.backward()
        die()
        return loss

    first.step(evaluate)


def late_collective(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    first.zero_grad()
    loss = error(inputs, targets)
    loss.backward()
    first.step()
    die()
    run.all_reduce(float(loss), "mean")
    assert sum(part["n"] for part in run.gather({"n": step.num_samples})) == step.global_batch


def swallowed_error(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    first.zero_grad()
    loss = error(inputs, targets)
    die()
    try:
        loss.backward()
    except RuntimeError:
        pass
    first.step()


def own_weight(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    weights = (inputs[:, :1] > 0).double()
    count = float(weights.sum())
    step.weight(count)
    first.zero_grad()
    ((weights * (one(inputs) - targets) ** 2).sum() / max(count, 1)).backward()
    die()
    first.step()


def scaled(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    first.zero_grad()
    scaler.scale(error(inputs, targets)).backward()
    scaler.unscale_(first)
    nn.utils.clip_grad_norm_(one.parameters(), 0.5)
    die()
    scaler.step(first)  # the buffer of this model is exchanged here: the survivors are behind `unscale_`
    scaler.update()


def unfrozen(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    if run.step >= 5 and len(first.param_groups) == 1:
        later = list(one.module[0].requires_grad_(True).parameters())
        first.add_param_group({"params": later, "lr": 0.01})
    first.zero_grad()
    error(inputs, targets).backward()
    if run.step == 7:
        die()
    first.step()


def frozen_later(inputs: torch.Tensor, targets: torch.Tensor) -> None:
    one.module[0].requires_grad_(run.step < 5 or run.step > 20)
    first.zero_grad()
    error(inputs, targets).backward()
    die()
    first.step()


torch.set_num_threads(1)
run = elastictrain.init()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(301, 6, dtype=torch.float64), torch.randn(301, 1, dtype=torch.float64))
one, two = make_model(), make_model()
first = torch.optim.LBFGS(one.parameters(), lr=0.1, max_iter=3) if args.kind == "closure" else None
if args.kind == "unfrozen":
    one[0].requires_grad_(False)
first = first or torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
second = torch.optim.Adam(two.parameters(), lr=0.01)
if args.kind == "two_optimizers":
    one, two, first, second = run.prepare(one, two, first, second)
else:
    one, first = run.prepare(one, first)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
if args.kind == "scaled":
    run.prepare(scaler)
    one.module.register_buffer("mean", torch.zeros(6))
body = globals()[args.kind]
for step in run.steps(dataset, batch_size=20, epochs=2):
    with step as batch:
        body(*batch)
if run.is_main:
    weights = [value.tolist() for model in (one, two) for value in model.state_dict().values()]
    (args.out / "weights.json").write_text(json.dumps(weights))
