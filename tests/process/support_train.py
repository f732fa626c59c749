"""A small float64 regression that records the samples of every attempt, and can be made to fail."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import elastictrain

SAMPLES, WIDTH, BAD_SAMPLE = 101, 4, 17

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--pause-s", type=float, default=0.0)
parser.add_argument("--pause-from", type=int, default=0)
parser.add_argument("--evaluate-s", type=float, default=0.0)
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--fail", default="")
parser.add_argument("--fail-rank", type=int, default=0)
args = parser.parse_args()


class Samples(torch.utils.data.Dataset):
    """Sample i is (i, features of i, target of i)."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        chance = torch.Generator().manual_seed(index)
        features = torch.randn(WIDTH, generator=chance, dtype=torch.float64)
        return index, features, features.sum().sin().reshape(1)


def write(**fields: object) -> None:
    os.write(log, (json.dumps({"leg": os.environ.get("TEST_LEG", ""), **fields}) + "\n").encode())


def spoil(ids: list[int]) -> None:
    """Fail as asked: each kind once, one after the other, when the world is whole; or at every bad sample."""
    if args.fail == "sample" and BAD_SAMPLE in ids:
        raise LookupError(f"sample {BAD_SAMPLE} is bad")
    for number, kind in enumerate(kind for kind in args.fail.split(",") if kind not in ("", "sample")):
        done = args.out / f"failed-{kind}"
        if not done.exists():
            if run.rank == args.fail_rank and run.step >= 2 + 3 * number and run.world_size > 1:
                done.touch()
                fail(kind)
            return


def fail(kind: str) -> None:
    match kind:
        case "raise":
            raise LookupError("no such sample")
        case "abort":
            os.abort()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            ctypes.string_at(0)
        case "memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
            torch.ones(64 << 20, dtype=torch.float64)
        case "exit3":
            sys.exit(3)
        case "exit0":
            sys.exit(0)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "spin":
            while True:
                pass
        case "sleep":
            threading.Event().wait()
        case "hold":
            ctypes.PyDLL(None).usleep(2_500_000)  # keeps every thread of this process from running
        case "thread":
            thread = threading.Thread(target=lambda: [][0])
            thread.start()
            thread.join()


run = elastictrain.init()
log = os.open(args.out / f"worker-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = run.prepare(model, optimizer)
pause = threading.Event()
pause_s = float(os.environ.get("TEST_PAUSE_S", args.pause_s))

for step in run.steps(Samples(), batch_size=8, epochs=args.epochs, num_workers=args.num_workers):
    with step as (ids, features, targets):
        loss = nn.functional.mse_loss(model(features), targets)
        write(
            step=run.step + 1,
            generation=run.generation,
            rank=run.rank,
            ids=ids.tolist() if step.num_samples else [],
            loss=float(loss.detach()) * step.num_samples,
        )
        spoil(ids.tolist())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    pause.wait(pause_s if run.step >= args.pause_from else 0)

if args.evaluate_s:
    run.evaluate(lambda: pause.wait(args.evaluate_s))
if run.is_main:
    torch.save(dict(model.module.state_dict()), args.out / "final.pt")
(args.out / f"end-{os.getpid()}").write_text(str(run.step))
