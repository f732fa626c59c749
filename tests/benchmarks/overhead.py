"""What elastictrain costs: the same training as plain DDP under torchrun and with elastictrain, in turns.

    python tests/benchmarks/overhead.py [--pairs 3] [--quick] [--only steps|start] [--case small/tensor ...]

Step time is the time between two consecutive step starts on rank 0, with two workers of one thread each; the first
DROPPED steps do not count. The batch of each case is chosen first, so that a step of plain DDP takes STEP_S or more.
Cold start is the time from the command to the first committed step of rank 0. It prints a table for each, and one line
of JSON at the end. Other work on the machine shows in the figures: let it be idle, and look at the spread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

PROGRAMS = Path(__file__).parent / "programs"
DROPPED = 20
STEP_S = 0.022
RUN_TIMEOUT_S = 300.0
TARGET_RATIO = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and data set; `batch` is the global batch."""

    model: str
    norm: bool
    data: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model}{'-norm' if self.norm else ''}/{self.data}"


CASES = (
    Case(model="small", norm=False, data="tensor", batch=1024),
    Case(model="small", norm=True, data="tensor", batch=1024),
    Case(model="small", norm=True, data="python", batch=512),
    Case(model="5M", norm=False, data="tensor", batch=32),
    Case(model="5M", norm=True, data="python", batch=32),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run: step and CPU time of rank 0 (medians, in seconds), and its moments, in seconds after the command."""

    step_s: float
    cpu_s: float
    moments: dict[str, float]


def plain_command(scratch: Path) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(PROGRAMS / "plain.py")]


def elastic_command(scratch: Path) -> list[str]:
    run_dir = str(scratch / "run")
    return ["-m", "elastictrain", "run", "--nproc-per-node", "2", "--run-dir", run_dir, str(PROGRAMS / "elastic.py")]


def run_once(command: Callable[[Path], list[str]], case: Case, *, steps: int) -> Outcome:
    """Run one program to its end; blocks. Raises RuntimeError with its output when it fails."""
    with tempfile.TemporaryDirectory(prefix="elastictrain-bench-") as folder:
        scratch = Path(folder)
        out = scratch / "times.json"
        arguments = ["--model", case.model, "--data", case.data, "--batch", str(case.batch), "--steps", str(steps)]
        arguments += ["--out", str(out), *(["--norm"] if case.norm else [])]
        began_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, *command(scratch), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        ended_s = time.monotonic()
        if done.returncode != 0:
            raise RuntimeError(f"{case.name} ended with {done.returncode}:\n{done.stdout}")
        told = json.loads(out.read_text())
        moments = {name: at_s - began_s for name, at_s in {**ledger_moments(scratch), **told["marks"]}.items()}
        moments["ended"] = ended_s - began_s
        return Outcome(step_s=typical(told["starts_s"]), cpu_s=typical(told["cpu_s"]), moments=moments)


def typical(moments_s: Sequence[float]) -> float:
    """The median distance of consecutive moments; the first DROPPED do not count."""
    distances = [later - earlier for earlier, later in itertools.pairwise(moments_s)]
    return median(distances[DROPPED:] or distances or [0.0])


def ledger_moments(scratch: Path) -> dict[str, float]:
    """When our agent was up, saw its last worker join and had the round, from the ledger's monotonic times."""
    names = {"run_started": "agent", "worker_started": "welcomed", "round": "round"}
    found: dict[str, float] = {}
    for path in (scratch / "run" / "ledger").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] in names:
                found[names[event["event"]]] = float(event["mono"])
    return found


def calibrated(case: Case) -> Case:
    """The case with a batch for which a step of plain DDP takes about STEP_S, at least its own batch."""
    for _ in range(2):
        step_s = run_once(plain_command, case, steps=DROPPED + 40).step_s
        if step_s > STEP_S * 0.95:
            break
        case = replace(case, batch=int(case.batch * STEP_S / step_s) // 8 * 8 + 8)
    return case


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def measure_steps(cases: Sequence[Case], *, pairs: int, steps: int) -> dict[str, Any]:
    """Step times of each case in turns; prints a line for each pair."""
    results: dict[str, Any] = {}
    all_ratios: list[float] = []
    print(f"{'case':18} {'batch':>6} {'plain ms':>9} {'ours ms':>9} {'ratio':>7}   CPU ms of rank 0, ratio")
    for case in map(calibrated, cases):
        ratios, cpu_ratios = [], []
        for _ in range(pairs):
            plain = run_once(plain_command, case, steps=DROPPED + steps)
            ours = run_once(elastic_command, case, steps=DROPPED + steps)
            ratios.append(ours.step_s / plain.step_s)
            cpu_ratios.append(ours.cpu_s / plain.cpu_s)
            print(
                f"{case.name:18} {case.batch:6} {plain.step_s * 1e3:9.2f} {ours.step_s * 1e3:9.2f} {ratios[-1]:7.3f}"
                f"   {plain.cpu_s * 1e3:.2f} {ours.cpu_s * 1e3:.2f} {cpu_ratios[-1]:.3f}",
                flush=True,
            )
        print(f"{case.name:18} median ratio {spread(ratios)}, of CPU time {spread(cpu_ratios)}", flush=True)
        results[case.name] = {"ratios": ratios, "cpu_ratios": cpu_ratios}
        all_ratios += ratios
    results["overall"] = median(all_ratios)
    print(f"overall median ratio {spread(all_ratios)}, target {TARGET_RATIO}")
    return results


def measure_start(*, pairs: int) -> dict[str, Any]:
    """Cold start of both, in turns, and where ours goes."""
    case = replace(CASES[0], batch=64)
    plain, ours = [], []
    for _ in range(pairs):
        plain.append(run_once(plain_command, case, steps=3).moments)
        ours.append(run_once(elastic_command, case, steps=3).moments)
        print(f"cold start: plain {plain[-1]['committed']:.2f} s, ours {ours[-1]['committed']:.2f} s", flush=True)
    result: dict[str, Any] = {}
    for name, runs in (("plain", plain), ("ours", ours)):
        medians = {key: median(moments[key] for moments in runs) for key in runs[0]}
        ordered = sorted(medians.items(), key=lambda item: item[1])
        print(f"{name:6} {spread([moments['committed'] for moments in runs])} s: ", end="")
        print(", ".join(f"{key} {at_s:.2f}" for key, at_s in ordered))
        result[name] = medians
    result["ratio"] = result["ours"]["committed"] / result["plain"]["committed"]
    print(f"cold start ratio {result['ratio']:.3f}, target 1.0")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side per case")
    parser.add_argument("--quick", action="store_true", help="two cases, one pair each, fewer steps: a smoke test")
    parser.add_argument("--only", choices=("steps", "start"), help="leave out the other measurement")
    parser.add_argument("--case", nargs="*", choices=[case.name for case in CASES], help="only these cases")
    options = parser.parse_args()
    cases = [case for case in CASES if not options.case or case.name in options.case]
    pairs, steps = options.pairs, 150
    if options.quick:
        cases, pairs, steps = ([cases[0], cases[-1]] if len(cases) > 1 else cases), 1, 40
    results: dict[str, Any] = {}
    if options.only != "start":
        results["steps"] = measure_steps(cases, pairs=pairs, steps=steps)
    if options.only != "steps":
        results["start"] = measure_start(pairs=pairs)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
