"""A small float64 regression that takes its time before `init()`, and tells what it was given before and after."""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=16)
parser.add_argument("--pause-s", type=float, default=0.1)
parser.add_argument("--slow-s", type=float, default=0.0)
parser.add_argument("--slow-spare-s", type=float, default=0.0)
parser.add_argument("--port", type=int, default=0)
args = parser.parse_args()


def tell(moment: str, **fields: object) -> None:
    standing = {
        "environ": dict(os.environ),
        "nices": [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")],
        "oom_score": int(Path("/proc/self/oom_score_adj").read_text()),
        "autogroup": Path("/proc/self/autogroup").read_text().split()[-1] if has_groups else "0",
    }
    temporary = args.out / f".{moment}-{os.getpid()}"
    temporary.write_text(json.dumps({**standing, **fields}))
    temporary.rename(args.out / f"{moment}-{os.getpid()}.json")


has_groups = Path("/proc/self/autogroup").exists()
tell("before")
print(f"before {os.getpid()}", flush=True)
pause = threading.Event()
pause.wait(args.slow_s if "LOCAL_RANK" in os.environ else args.slow_spare_s or args.slow_s)
if args.port:  # what only as many processes can have as there are places
    listener = socket.create_server(("127.0.0.1", args.port + int(os.environ.get("LOCAL_RANK", "0"))))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import elastictrain  # noqa: E402

SAMPLES, WIDTH = 101, 4
run = elastictrain.init()
print(f"after {os.getpid()}", flush=True)
tell("after", rank=run.rank, local_rank=run.local_rank)
log = os.open(args.out / f"worker-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
chance = torch.Generator().manual_seed(5)
features = torch.randn(SAMPLES, WIDTH, generator=chance, dtype=torch.float64)
dataset = torch.utils.data.TensorDataset(torch.arange(SAMPLES), features, features.sum(1, keepdim=True).sin())
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = run.prepare(model, optimizer)

for step in run.steps(dataset, batch_size=8, epochs=args.epochs):
    with step as (ids, inputs, targets):
        loss = nn.functional.mse_loss(model(inputs), targets)
        record = {
            "leg": os.environ.get("TEST_LEG", ""),
            "step": run.step + 1,
            "generation": run.generation,
            "ids": ids.tolist() if step.num_samples else [],
            "loss": float(loss.detach()) * step.num_samples,
        }
        os.write(log, (json.dumps(record) + "\n").encode())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if not (args.out / "hurry").exists():
        pause.wait(args.pause_s)

if run.is_main:
    torch.save(dict(model.module.state_dict()), args.out / "final.pt")
(args.out / f"end-{os.getpid()}").write_text(str(run.step))
