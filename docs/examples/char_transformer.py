"""A character-level transformer on a text: AdamW, warm-up and cosine decay, dropout, an average of the weights.

    elastictrain run --nproc-per-node 2 docs/examples/char_transformer.py --steps 300

Without --text it learns from the sources of Python's own standard library, which every machine has.
"""

import argparse
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import elastictrain


class Windows(Dataset):
    """All windows of `length` characters of a text, each with the same window shifted by one: what comes next."""

    def __init__(self, codes: torch.Tensor, length: int) -> None:
        self.codes, self.length = codes, length

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.length
        return self.codes[start : start + self.length], self.codes[start + 1 : start + self.length + 1]


class CharTransformer(nn.Module):
    """Decoder-only transformer over `vocabulary` characters; input (batch, time), output (batch, time, vocabulary)."""

    def __init__(self, vocabulary: int, *, width: int, layers: int, length: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        time = codes.shape[1]
        hidden = self.characters(codes) + self.positions(torch.arange(time, device=codes.device))
        mask = nn.Transformer.generate_square_subsequent_mask(time, device=codes.device)
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


def read_text(path: Path | None) -> str:
    """The given file, or a megabyte of the standard library, which is the same on every worker of a machine."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    library = Path(os.__file__).parent
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in sorted(library.glob("*.py"))[:40])


def learning_rate_factor(step: int, *, total: int, warm_up: int) -> float:
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.9 * (1 + math.cos(math.pi * (step - warm_up) / max(1, total - warm_up))) / 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file (default: sources of the standard library)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="windows in the global batch")
    parser.add_argument("--length", type=int, default=64, help="characters in a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    run = elastictrain.init()
    text = read_text(args.text)
    alphabet = sorted(set(text))
    number = {character: index for index, character in enumerate(alphabet)}
    windows = Windows(torch.tensor([number[character] for character in text]), args.length)

    torch.manual_seed(0)
    size = {"width": args.width, "layers": args.layers, "length": args.length, "dropout": args.dropout}
    model = CharTransformer(len(alphabet), **size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, total=args.steps, warm_up=max(1, args.steps // 20))
    )
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)
    run.register(average=average)

    # More than one pass where the text is short: `steps` ends the loop.
    for step in run.steps(windows, args.batch_size, epochs=args.steps, steps=args.steps):
        with step as (inputs, targets):
            logits = model(inputs.to(run.device))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.to(run.device).flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            average.update_parameters(model.module)
            run.log(loss=loss, lr=schedule.get_last_lr()[0])
        if step.committed and run.is_main and run.step % 50 == 0:
            print(f"step {run.step}: loss {loss.item():.3f}, {run.world_size} workers", flush=True)
    if run.is_main:
        print(f"{run.step} steps done on {len(text)} characters, loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
