"""A plain DDP script that knows nothing of elastictrain: env://, gloo, restart-based; records what it was given."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

folder = Path(os.environ["PLAIN_FOLDER"])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
given = {
    "environ": dict(os.environ),
    "argv": sys.argv,
    "path": sys.path[0],
    "name": __name__,
    "file": __file__,
    "cwd": os.getcwd(),
    "pid": os.getpid(),
    "threads": torch.get_num_threads(),
}
(folder / f"given-{rank}-{attempt}.tmp").write_text(json.dumps(given))
(folder / f"given-{rank}-{attempt}.tmp").rename(folder / f"given-{rank}-{attempt}.json")
if os.environ.get("PLAIN_ONLY_RECORD"):
    sys.exit(0)

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(os.environ.get("PLAIN_STEPS", "5"))):
    inputs = torch.full((2, 4), float(rank + step))
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 0:
        (folder / f"trains-{rank}-{attempt}").touch()
    threading.Event().wait(float(os.environ.get("PLAIN_PAUSE_S", "0")))
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size() == int(os.environ["WORLD_SIZE"])
dist.destroy_process_group()
(folder / f"end-{rank}-{attempt}").touch()
