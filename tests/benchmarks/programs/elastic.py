"""The benchmark's training with elastictrain."""

from __future__ import annotations

import workload

times = workload.Times()
times.mark("script")

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402

import elastictrain  # noqa: E402

times.mark("imported")
case = workload.parse()
run = elastictrain.init()
times.mark("joined")
dataset = workload.make_dataset(case.data)
model = workload.make_model(case.model, norm=case.norm)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
model, optimizer = run.prepare(model, optimizer)
times.mark("prepared")

for step in run.steps(dataset, batch_size=case.batch, epochs=1_000_000, tail="drop", steps=case.steps):
    with step as (inputs, targets):
        times.step_starts()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss)
    times.mark("committed")

if run.is_main:
    times.write(case.out)
