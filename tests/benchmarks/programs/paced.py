"""What all programs of the recovery benchmark train, and how they tell of each committed step.

A step takes about `step_s` seconds, waited for and not computed, so that the workers of a small machine do not take the
processor from each other and from whatever recovers.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

NUM_FEATURES = 256
NUM_CLASSES = 10
NUM_SAMPLES = 1 << 12
GLOBAL_BATCH = 32
# Name -> width and number of hidden layers. With momentum the state of "200MB" is 203 MB, of 25.4 million parameters.
SHAPES = {"small": (256, 1), "200MB": (2048, 7)}

_pause = threading.Event()


def parse() -> argparse.Namespace:
    """The case to run; `out` is the folder for the times, `checkpoint` the file for a checkpoint in each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=sorted(SHAPES), required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--timeout-s", type=float, default=60.0)
    return parser.parse_args()


def make_model(name: str) -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(0)
    width, depth = SHAPES[name]
    layers: list[nn.Module] = [nn.Linear(NUM_FEATURES, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, NUM_CLASSES))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def make_dataset() -> TensorDataset:
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, NUM_FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator))


def compute(step_s: float) -> None:
    """Take as long as a computation elsewhere (on a GPU) would."""
    _pause.wait(step_s)


class Commits:
    """A line for each step that this process committed, with the monotonic time that a machine's processes share."""

    def __init__(self, folder: Path) -> None:
        path = folder / f"commits-{os.getpid()}.jsonl"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._who = {
            "pid": os.getpid(),
            "node": os.environ.get("BENCH_NODE", ""),
            "seat": int(os.environ.get("BENCH_SEAT", os.environ.get("LOCAL_RANK", "0"))),
        }

    def write(self, *, step: int, world: int, era: int) -> None:
        """`era` changes when the membership does, in a process that survives it."""
        entry = {"at_s": time.monotonic(), "step": step, "world": world, "era": era, **self._who}
        os.write(self._fd, (json.dumps(entry) + "\n").encode())
