"""How fast a newcomer gets the state: beside a broadcast of as many bytes by gloo alone, in the same processes.

    python tests/benchmarks/state_transfer.py [--mib 1024] [--tensors 968] [--kills 5] [--workers 2]

The last of the workers kills itself KILLS times, and its replacement, which joins before the next step (the run does
not go on with fewer), gets everything: parameters and both values of Adam for each. What counts is the time from the
source's first byte to the moment at which the slowest rank holds the state, loaded into its model and optimizer. The
other side is one collective, into memory that was written before. It prints medians and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "big_state.py"
RUN_TIMEOUT_S = 600.0
TARGET_RATIO = 0.8


def run_once(args: argparse.Namespace, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of each transfer, and of each broadcast; blocks. Raises RuntimeError with the output of a failed run."""
    workers = str(args.workers)
    command = [sys.executable, "-m", "elastictrain", "run", "--run-dir", str(folder / "run"), "--max-restarts", "1000"]
    options = ["--nproc-per-node", workers, "--min-world-size", workers, "--checkpoint-every", "1000000steps"]
    ours = ["--out", str(folder), "--mib", str(args.mib), "--tensors", str(args.tensors), "--kills", str(args.kills)]
    done = subprocess.run(
        [*command, *options, str(PROGRAM), *ours], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    syncs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path in folder.glob("sync-*.json"):
        for one in json.loads(path.read_text()):
            syncs[one["generation"]].append(one)
    joins = [some for generation, some in sorted(syncs.items()) if generation > 1 and len(some) == args.workers]
    if len(joins) != args.kills:
        raise RuntimeError(f"expected {args.kills} transfers, saw {len(joins)}:\n{done.stderr}")
    ours_s = [
        max(one["ended_s"] for one in some) - next(one["sends_s"] for one in some if one["rank"] == one["source"])
        for some in joins
    ]
    raw = [json.loads(path.read_text()) for path in folder.glob("raw-*.json")]
    return ours_s, [max(some) for some in zip(*raw, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=968)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elastictrain-bench-") as folder:
        ours_s, raw_s = run_once(args, Path(folder))
    ratio = median(raw_s) / median(ours_s)
    print(f"{args.mib} MiB in {args.tensors} tensors, {args.workers} workers, seconds (median, least, most)")
    for name, values in (("state into a newcomer", ours_s), ("gloo broadcast", raw_s)):
        print(f"  {name:<24} {median(values):7.3f} {min(values):7.3f} {max(values):7.3f}")
    print(f"  speed: {ratio:.2f} of the broadcast's (target {TARGET_RATIO})")
    print(json.dumps({"mib": args.mib, "workers": args.workers, "ours_s": ours_s, "raw_s": raw_s, "ratio": ratio}))


if __name__ == "__main__":
    main()
