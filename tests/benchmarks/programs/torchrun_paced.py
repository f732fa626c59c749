"""The recovery benchmark's training as plain DDP with a checkpoint in each step, for torchrun."""

from __future__ import annotations

import os

import paced
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

case = paced.parse()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
commits = paced.Commits(case.out)
bare = paced.make_model(case.model)
optimizer = paced.make_optimizer(bare)
committed = 0
if case.checkpoint.exists():
    state = torch.load(case.checkpoint, weights_only=True)
    bare.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    committed = state["step"]
model = DistributedDataParallel(bare)
dataset = paced.make_dataset()
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=max(1, paced.GLOBAL_BATCH // world), sampler=sampler, drop_last=True)

for epoch in range(1_000_000):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = functional.cross_entropy(model(inputs), targets)
        paced.compute(case.step_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        committed += 1
        if rank == 0:
            draft = f"{case.checkpoint}.{os.getpid()}"
            torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": committed}, draft)
            os.replace(draft, case.checkpoint)
        commits.write(step=committed, world=world, era=0)
