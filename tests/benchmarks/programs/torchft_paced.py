"""The recovery benchmark's training with torchft: one worker in each replica group, all groups alike."""

import os
from datetime import timedelta
from typing import Any

import paced
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.data import DataLoader
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

case = paced.parse()
commits = paced.Commits(case.out)
bare = paced.make_model(case.model)
inner = paced.make_optimizer(bare)


def load_state(state: dict[str, Any]) -> None:
    bare.load_state_dict(state["model"])
    inner.load_state_dict(state["optimizer"])


class GuardedDdp(DistributedDataParallel):
    """torchft's DDP, whose hook in 0.2.0 ends the survivor with an AssertionError when a collective fails.

    (DDP wants the real types of the hook's arguments, so this file has no annotations for later.)
    """

    @staticmethod
    def _comm_hook(state: Manager, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = state.allreduce(bucket.buffer())
        work.wait()
        future: Any = work.get_future()
        inner = getattr(future, "_fut", future)
        if inner is None:
            inner = torch.futures.Future()
            inner.set_result(bucket.buffer())
        return inner


timeout = timedelta(seconds=case.timeout_s)
group, num_groups = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
manager = Manager(
    pg=ProcessGroupGloo(timeout=timeout),
    load_state_dict=load_state,
    state_dict=lambda: {"model": bare.state_dict(), "optimizer": inner.state_dict()},
    min_replica_size=1,
    timeout=timeout,
    quorum_timeout=timeout,
    replica_id=f"group_{group}",
    hostname=os.environ["BENCH_ADDRESS"],
)
model = GuardedDdp(manager, bare)
optimizer = Optimizer(manager, inner)
dataset = paced.make_dataset()
sampler = DistributedSampler(
    dataset, replica_rank=group, num_replica_groups=num_groups, group_rank=0, num_replicas=1, shuffle=True
)
loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(
    dataset, batch_size=max(1, paced.GLOBAL_BATCH // num_groups), sampler=sampler, drop_last=True
)

for epoch in range(1_000_000):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        before = manager.current_step()
        loss = functional.cross_entropy(model(inputs), targets)
        paced.compute(case.step_s)
        loss.backward()
        optimizer.step()
        if manager.current_step() > before:
            commits.write(step=manager.current_step(), world=manager.num_participants(), era=manager._quorum_id)
