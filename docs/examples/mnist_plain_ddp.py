"""The training of mnist.py as an ordinary DDP script with a checkpoint after every epoch; no elastictrain in it.

    torchrun --nproc-per-node 2 docs/examples/mnist_plain_ddp.py --epochs 3
    elastictrain run --nproc-per-node 2 docs/examples/mnist_plain_ddp.py --epochs 3

Both restart all workers when one is lost, and the script goes on from its own checkpoint: the steps since then are done
again. That is what the five lines of mnist.py save.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten()),
        nn.Linear(16 * 6 * 6, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, digits: torch.utils.data.Dataset) -> int:
    """How many digits the model names rightly, over all ranks; the sampler pads, so some may be counted twice."""
    model.eval()
    loader = DataLoader(digits, batch_size=500, sampler=DistributedSampler(digits, shuffle=False))
    correct = torch.zeros(1)
    for images, labels in loader:
        correct += (model(images).argmax(1) == labels).sum()
    dist.all_reduce(correct)
    model.train()
    return int(correct)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epochs_done: int) -> None:
    temporary = path.with_suffix(".tmp")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_done": epochs_done}
    torch.save(state, temporary)
    temporary.replace(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=100, help="the global batch")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--checkpoint", type=Path, default=Path("mnist.pt"))
    parser.add_argument("--kill-rank", type=int, help="for demonstration: this rank kills itself once ...")
    parser.add_argument("--kill-step", type=int, help="... in the middle of this step")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_digits, test_digits = load_digits(torch.float32)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    first_epoch = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epochs_done"]
    ddp_model = DistributedDataParallel(model)
    sampler = DistributedSampler(train_digits)
    loader = DataLoader(train_digits, batch_size=args.batch_size // world_size, sampler=sampler)

    step = first_epoch * len(loader)
    for epoch in range(first_epoch, args.epochs):
        began = time.perf_counter()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(ddp_model(images), labels)
            if is_first_attempt and (rank, step) == (args.kill_rank, args.kill_step):
                print(
                    f"rank {rank} (pid {os.getpid()}) kills itself: step {step}, before its backward pass", flush=True
                )
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        correct = evaluate(model, test_digits)
        if rank == 0:
            save(args.checkpoint, model, optimizer, epoch + 1)
            print(
                f"epoch {epoch}: loss {loss.item():.4f}, {correct} of {len(test_digits)} test digits right, "
                f"step {step}, {world_size} workers, {time.perf_counter() - began:.1f} s",
                flush=True,
            )
    # Before the group: torch can hang when a DDP wrapper outlives its group and is the last to hold it.
    del ddp_model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
