"""A script under test: trains a small float64 model in one of several kinds of loop, evaluates, and dies where told."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import elastictrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--loop", default="epochs")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=53)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--evaluation", default="after", help="before, after, inside, raw, none; with commas")
parser.add_argument("--die", default="", help="PLACE:RANK:AT with commas; AT is an epoch or a step, by the place")
parser.add_argument("--await-newcomer", type=int, default=-9, help="epoch whose evaluation lasts until one has come")
parser.add_argument("--pause-s", type=float, default=0.0)
parser.add_argument("--late-collective", action="store_true")
args = parser.parse_args()
wanted = set(args.evaluation.split(","))


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int, offset: int) -> None:
        self.size, self.offset = size, offset

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        chance = torch.Generator().manual_seed(self.offset + index)
        features = torch.randn(4, generator=chance, dtype=torch.float64)
        return index, features, (features.sum() > 0).double().reshape(1)


class RunningMean(nn.Module):
    """Subtracts a running mean: a buffer that each forward changes, by samples, whatever the world size."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        before = self.mean.clone()
        if self.training:
            self.mean.lerp_(values.detach().mean(0), 0.1)
        return values - before


class Average:
    """An exponential moving average of the parameters, updated after each step."""

    def __init__(self) -> None:
        self.values = [p.detach().clone() for p in model.parameters()]
        self.updates = 0

    def update(self) -> None:
        self.updates += 1
        for value, parameter in zip(self.values, model.parameters(), strict=True):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for value, loaded in zip(self.values, state["values"], strict=True):
            value.copy_(loaded)


def write(**fields: object) -> None:
    os.write(log, (json.dumps({"pid": os.getpid(), **fields}) + "\n").encode())


def die(place: str, at: int) -> None:
    """Be killed here, once in a run, if this is the rank and the moment that --die names."""
    name = f"{place}:{run.rank}:{at}"
    if name in args.die.split(",") and run.rank < run.world_size:
        try:
            os.close(os.open(args.out / f"died-{name}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def correct_answers(epoch: int) -> int:
    die("before", epoch)
    if epoch == args.await_newcomer and run.rank == 0:
        while sum('"came"' in path.read_text() for path in args.out.glob("worker-*.jsonl")) < 4:
            threading.Event().wait(0.05)
        threading.Event().wait(0.3)  # it is a moment from saying that it came to asking for its place
    if "raw" in wanted:
        first = torch.ones(1)
        dist.all_reduce(first)
        assert first.item() == dist.get_world_size()
    else:
        run.barrier()
    die("in", epoch)
    model.eval()
    count = 0
    with torch.no_grad():
        for _, features, target in torch.utils.data.DataLoader(run.split(held_out), batch_size=4):
            count += int(((model(features) > 0).double() == target).sum())
    model.train()
    if "raw" in wanted:
        total = torch.tensor(count)
        dist.all_reduce(total)
        count = int(total)
    else:
        count = run.all_reduce(count)
        assert sum(run.gather([1])[0]) == 1
    die("after", epoch)
    return count


def evaluate(epoch: int, name: str = "after") -> None:
    result = run.evaluate(lambda: correct_answers(epoch))
    write(event="evaluated", name=name, epoch=epoch, step=run.step, result=result, rank=run.rank)


def train(step: Any, data: str = "a") -> None:
    at = run.step
    if args.die and run.world_size < int(os.environ["LOCAL_WORLD_SIZE"]):
        threading.Event().wait(0.3)  # the next one to die may be a replacement that is on its way
    die("draw", at)
    with step as (ids, features, target):
        die("forward", at)
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        die("late", at)
        if args.late_collective:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
        run.log(loss=loss)
        if args.pause_s:
            threading.Event().wait(args.pause_s)
    average.update()  # on purpose also behind an attempt that was undone, which takes it back
    if step.committed:
        warmup.step()
    write(event="step", step=at + 1, ids=ids.tolist() if step.num_samples else [], data=data, committed=step.committed)
    die("behind", at)


def end_epoch(epoch: int) -> None:
    if wanted & {"after", "raw"}:
        evaluate(epoch)
    die("end", epoch)
    schedule.step()


def loop_epochs() -> None:
    for epoch in run.epochs(args.epochs):
        write(event="epoch", epoch=epoch, run_epoch=run.epoch, step=run.step)
        if "start" in wanted:
            evaluate(epoch, "start")
        for step in run.steps(data, args.batch, num_workers=args.num_workers):
            train(step)
            if "inside" in wanted and step.committed and run.step % 5 == 0:
                evaluate(run.step, "inside")
        end_epoch(epoch)


def loop_range() -> None:
    for epoch in range(args.epochs):
        for step in run.steps(data, args.batch, num_workers=args.num_workers):
            train(step)
        end_epoch(epoch)


def loop_nested() -> None:
    for epoch in run.epochs(args.epochs):
        for step in run.steps(data, args.batch):
            train(step)
        schedule.step()
        for step in run.steps(held_out, 6, seed=5):
            train(step, "b")
        end_epoch(epoch)


def loop_steps() -> None:
    for step in run.steps(data, args.batch, epochs=args.epochs):
        train(step)
    end_epoch(0)


def loop_limit() -> None:
    for epoch in run.epochs(args.epochs):
        for step in run.steps(data, args.batch, steps=4):
            train(step)
        end_epoch(epoch)


def loop_break() -> None:
    for epoch in run.epochs(args.epochs):
        for step in run.steps(data, args.batch):
            train(step)
            if run.step >= 4 * (epoch + 1):
                break
        end_epoch(epoch)


torch.set_num_threads(1)
torch.manual_seed(1)
run = elastictrain.init()
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), RunningMean(), nn.Linear(8, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
warmup = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters(), lr=1.0), lambda n: 1 / (1 + n))
model, optimizer, schedule, warmup = run.prepare(model, optimizer, schedule, warmup)
average = Average()
run.register(average=average)
data, held_out = Samples(args.samples, 0), Samples(23, 1000)
log = os.open(args.out / f"worker-{os.getpid()}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
write(event="came", rank=run.rank)
if "before" in wanted:
    evaluate(-1, "before")
{name.removeprefix("loop_"): fn for name, fn in globals().items() if name.startswith("loop_")}[args.loop]()
state = {
    "model": [p.tolist() for p in model.module.state_dict().values()],
    "average": [value.tolist() for value in average.values],
    "updates": average.updates,
    "schedule": schedule.last_epoch,
    "warmup": warmup.last_epoch,
    "lr": optimizer.param_groups[0]["lr"],
    "epoch": run.epoch,
    "step": run.step,
}
write(event="final", rank=run.rank, state=state, digest=hashlib.sha256(json.dumps(state).encode()).hexdigest())
run.finish()
