"""The recovery benchmark's training with elastictrain."""

from __future__ import annotations

import paced
from torch.nn import functional

import elastictrain

case = paced.parse()
run = elastictrain.init()
commits = paced.Commits(case.out)
model = paced.make_model(case.model)
model, optimizer = run.prepare(model, paced.make_optimizer(model))

for step in run.steps(paced.make_dataset(), batch_size=paced.GLOBAL_BATCH, epochs=1_000_000):
    with step as (inputs, targets):
        loss = functional.cross_entropy(model(inputs), targets)
        paced.compute(case.step_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if step.committed:
        commits.write(step=run.step, world=run.world_size, era=run.generation)
