"""A small CNN on real handwritten digits: five lines make this DDP script survive the loss of a worker.

    elastictrain run --nproc-per-node 2 docs/examples/mnist.py --epochs 3 --kill-rank 1 --kill-step 60

mnist_plain_ddp.py is the same training as an ordinary torchrun script.
"""

import argparse
import os
import signal
import time

import torch
import torch.nn.functional as F
from digits import load_digits
from torch import nn
from torch.utils.data import DataLoader

import elastictrain


def make_model(dropout: float, batch_norm: bool) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2)]
    if batch_norm:
        layers.append(nn.BatchNorm2d(16))
    layers += [nn.ReLU(), nn.Flatten()]
    if dropout:
        layers.append(nn.Dropout(dropout))
    layers.append(nn.Linear(16 * 6 * 6, 10))
    return nn.Sequential(*layers)


@torch.no_grad()
def count_correct(model: nn.Module, digits: torch.utils.data.Dataset) -> int:
    """How many digits of this rank's part the model names rightly. An empty part gives 0."""
    model.eval()
    correct = sum(
        int((model(images).argmax(1) == labels).sum()) for images, labels in DataLoader(digits, batch_size=500)
    )
    model.train()
    return correct


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=100, help="the global batch, whatever the number of workers")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes of each worker")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--batch-norm", action="store_true")
    parser.add_argument("--save-to", help="write the final weights to this file")
    parser.add_argument("--kill-rank", type=int, help="for demonstration: this rank kills itself once ...")
    parser.add_argument("--kill-step", type=int, help="... in the middle of this step")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    dtype = getattr(torch, args.dtype)
    is_first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    run = elastictrain.init()
    torch.manual_seed(0)
    train_digits, test_digits = load_digits(dtype)
    model = make_model(args.dropout, args.batch_norm).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)

    for epoch in run.epochs(args.epochs):
        began = time.perf_counter()
        for step in run.steps(train_digits, args.batch_size, num_workers=args.num_workers):
            with step as (images, labels):
                loss = F.cross_entropy(model(images.to(run.device)), labels.to(run.device))
                if is_first_attempt and (run.rank, run.step) == (args.kill_rank, args.kill_step):
                    print(
                        f"rank {run.rank} (pid {os.getpid()}) kills itself: step {run.step}, before its backward pass",
                        flush=True,
                    )
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
        # Each rank counts over its own part; the sum is taken inside evaluate, so that it can be done again as a whole.
        correct = run.evaluate(lambda: run.all_reduce(count_correct(model, run.split(test_digits))))
        if run.is_main:
            print(
                f"epoch {epoch}: loss {loss.item():.4f}, {correct} of {len(test_digits)} test digits right, "
                f"step {run.step}, {run.world_size} workers, {time.perf_counter() - began:.1f} s",
                flush=True,
            )
    if args.save_to and run.is_main:
        torch.save(model.module.state_dict(), args.save_to)


if __name__ == "__main__":
    main()
