"""What both programs of the overhead benchmark train, and how they tell their times."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import Dataset

NUM_FEATURES = 256
NUM_CLASSES = 10
NUM_SAMPLES = 1 << 14
WIDTHS = {"small": (256, 256), "5M": (2048, 2048)}


def parse() -> argparse.Namespace:
    """The case to run; `batch` is the global batch, `out` the file for the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(WIDTHS), required=True)
    parser.add_argument("--norm", action="store_true", help="batch norm after each layer: a model with buffers")
    parser.add_argument("--data", choices=("tensor", "python"), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def make_model(name: str, *, norm: bool) -> nn.Module:
    """A multilayer perceptron of about 0.13 or 4.7 million parameters."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    width = NUM_FEATURES
    for next_width in WIDTHS[name]:
        layers.append(nn.Linear(width, next_width))
        if norm:
            layers.append(nn.BatchNorm1d(next_width))
        layers.append(nn.ReLU())
        width = next_width
    return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))


def make_dataset(kind: str) -> Dataset[tuple[torch.Tensor, ...]]:
    """The same samples as a TensorDataset, or behind a `__getitem__` in Python."""
    import torch
    from torch.utils.data import Dataset, TensorDataset

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    targets = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)

    class Pairs(Dataset[tuple[torch.Tensor, ...]]):
        def __len__(self) -> int:
            return NUM_SAMPLES

        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return inputs[index], targets[index]

    return TensorDataset(inputs, targets) if kind == "tensor" else Pairs()


class Times:
    """Moments of one worker, in monotonic seconds, which all processes of a machine share."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self.starts_s: list[float] = []
        self.cpu_s: list[float] = []

    def mark(self, name: str) -> None:
        """Note when `name` was reached the first time."""
        self.marks.setdefault(name, time.monotonic())

    def step_starts(self) -> None:
        """Called as the first thing of a step, when its batch is there."""
        self.starts_s.append(time.monotonic())
        self.cpu_s.append(time.process_time())

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"marks": self.marks, "starts_s": self.starts_s, "cpu_s": self.cpu_s}))
