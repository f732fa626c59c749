"""The program of the spawn-style DDP tutorials, with `elastictrain.launch` in place of `torch.multiprocessing.spawn`.

    python docs/examples/convnet_spawn.py

`main` is ordinary DDP. It gets its local rank first, as spawn gives it. When a worker is lost, all start again.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import elastictrain


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU())
        self.head = nn.Linear(16 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).flatten(1))


def main(rank: int, world_size: int, epochs: int) -> None:
    # torchrun's variables are set (MASTER_ADDR, RANK, WORLD_SIZE, ...), so nothing needs to be passed here.
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits, _ = load_digits(torch.float32)
    model = DistributedDataParallel(ConvNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(digits, num_replicas=world_size, rank=rank)
    loader = DataLoader(digits, batch_size=50, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, {world_size} workers", flush=True)
    # Before the group: torch can hang when a DDP wrapper outlives its group and is the last to hold it.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--run-dir", help="where the run keeps everything (default runs/<run id>)")
    options = parser.parse_args()
    more = {"run_dir": options.run_dir} if options.run_dir else {}
    elastictrain.launch(main, args=(options.workers, options.epochs), nproc_per_node=options.workers, **more)
