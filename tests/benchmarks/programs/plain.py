"""The benchmark's training as plain DDP, for torchrun."""

from __future__ import annotations

import os
import sys

import workload

times = workload.Times()
times.mark("script")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

times.mark("imported")
case = workload.parse()
dist.init_process_group("gloo")
times.mark("joined")
dataset = workload.make_dataset(case.data)
model = DistributedDataParallel(workload.make_model(case.model, norm=case.norm))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=case.batch // dist.get_world_size(), sampler=sampler, drop_last=True)
losses = []
times.mark("prepared")

epoch = 0
while len(times.starts_s) < case.steps:
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        times.step_starts()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        times.mark("committed")
        if len(times.starts_s) == case.steps:
            break
    epoch += 1

dist.barrier()
if dist.get_rank() == 0:
    times.write(case.out)
sys.stdout.flush()
os._exit(0)  # gloo's destructors now and then abort a process that ends right after a collective
