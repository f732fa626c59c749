"""A script with `nn.DataParallel` (one process, all GPUs of a machine), and its weights in plain and DDP scripts.

    elastictrain run docs/examples/data_parallel.py --save-to weights.pt
    python docs/examples/data_parallel.py --load weights.pt

DataParallel names every weight `module.<name>`. Saved from the module inside, the weights fit everywhere.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from digits import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def make_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 13 * 13, 10))


def train(save_to: str, epochs: int) -> None:
    torch.manual_seed(0)
    digits, _ = load_digits(torch.float32)
    model = nn.DataParallel(make_model())  # without a GPU it calls the module inside
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(epochs):
        for images, labels in DataLoader(digits, batch_size=100, shuffle=True):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
    torch.save(model.module.state_dict(), save_to)


def load(path: str) -> None:
    """Load the weights into a plain module and into one inside DDP; both must name the same digits."""
    weights = torch.load(path, weights_only=True)
    _, digits = load_digits(torch.float32)
    images, labels = digits.tensors

    plain = make_model()
    plain.load_state_dict(weights)

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    wrapped = DistributedDataParallel(make_model())
    wrapped.module.load_state_dict(weights)  # always the module inside: the names carry no prefix

    with torch.no_grad():
        for name, model in (("plain", plain), ("DDP", wrapped)):
            print(f"{name}: {int((model(images).argmax(1) == labels).sum())} of {len(labels)} digits right", flush=True)
    del wrapped, model
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-to", default="weights.pt")
    parser.add_argument("--load", help="load these weights and count, instead of training")
    options = parser.parse_args()
    if options.load:
        load(options.load)
    else:
        train(options.save_to, options.epochs)
