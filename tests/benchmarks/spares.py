"""What a waiting spare costs: step times within one run while a spare waits and while there is none.

    python tests/benchmarks/spares.py [--times 5] [--wait-s 6] [--case small/tensor]

Runs on one machine differ by more than what is measured here, so it is one run: whenever a spare has waited for
`--wait-s`, it is killed, and the agent takes longer each time until it starts the next (1, 2, 4, ... s). The time in
which a spare starts counts for neither side. It prints the medians, and the processor time of the spares while they
waited.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from overhead import CASES, DROPPED, PROGRAMS, Case, calibrated

WAIT_LIMIT_S = 120.0
Told = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of monotonic time in which a spare waited, or in which there was none."""

    from_s: float
    to_s: float
    has_spare: bool


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in (run_dir / "ledger").glob("*.jsonl")
        for line in path.read_bytes().split(b"\n")[:-1]
    ]


def wait_for(run_dir: Path, name: str, count: int) -> dict[str, Any]:
    """The event of this name and number, once it is there."""
    pause, until_s = threading.Event(), time.monotonic() + WAIT_LIMIT_S
    while time.monotonic() < until_s:
        found = [event for event in events(run_dir) if event["event"] == name]
        if len(found) >= count:
            return found[count - 1]
        pause.wait(0.2)
    raise RuntimeError(f"no {name} number {count} within {WAIT_LIMIT_S} s")


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measure(case: Case, *, times: int, wait_s: float) -> tuple[Told, list[Window], float]:
    """What rank 0 tells of its steps, when a spare waited and when not, and the spares' processor time; blocks."""
    with tempfile.TemporaryDirectory(prefix="elastictrain-bench-") as folder:
        scratch = Path(folder)
        run_dir, out = scratch / "run", scratch / "times.json"
        head = ["-m", "elastictrain", "run", "--nproc-per-node", "2", "--run-dir", str(run_dir), "--spares", "1"]
        program = [str(PROGRAMS / "elastic.py"), "--model", case.model, "--data", case.data, "--batch", str(case.batch)]
        seconds = times * (wait_s + 3) + 2**times
        tail = ["--steps", str(int(seconds / 0.015)), "--out", str(out), *(["--norm"] if case.norm else [])]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (scratch / "log").open("w") as log:
            process = subprocess.Popen([sys.executable, *head, *program, *tail], env=env, stdout=log, stderr=log)
        windows: list[Window] = []
        waited_cpu_s, pause = 0.0, threading.Event()
        lost: dict[str, Any] | None = None
        try:
            for number in range(1, times + 1):
                ready = wait_for(run_dir, "spare_ready", number)
                if lost is not None:
                    windows.append(Window(lost["mono"], ready["mono"] - ready["seconds"], False))
                before_s = cpu_s(ready["pid"])
                pause.wait(wait_s)
                waited_cpu_s += cpu_s(ready["pid"]) - before_s
                windows.append(Window(ready["mono"], time.monotonic(), True))
                os.kill(ready["pid"], signal.SIGKILL)
                lost = wait_for(run_dir, "spare_lost", number)
            if process.wait(WAIT_LIMIT_S) != 0:
                raise RuntimeError((scratch / "log").read_text())
        finally:
            process.kill()
            process.wait()
        return json.loads(out.read_text()), windows, waited_cpu_s


def steps_in(told: Told, windows: Sequence[Window], *, has_spare: bool) -> tuple[list[float], list[float]]:
    """Times, and processor times of rank 0, of the steps that lie whole in the windows with or without a spare."""
    wall: list[float] = []
    cpu: list[float] = []
    for window in windows:
        if window.has_spare == has_spare:
            first, last = bisect(told["starts_s"], window.from_s), bisect(told["starts_s"], window.to_s)
            for found, moments in ((wall, told["starts_s"]), (cpu, told["cpu_s"])):
                inside = moments[max(first, DROPPED) : last]
                found += [later - earlier for earlier, later in itertools.pairwise(inside)]
    return wall, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--times", type=int, default=5, help="spares that wait, one after the other")
    parser.add_argument("--wait-s", type=float, default=6.0, help="how long each waits")
    parser.add_argument("--case", default=CASES[0].name, choices=[case.name for case in CASES])
    options = parser.parse_args()
    case = calibrated(next(case for case in CASES if case.name == options.case))
    told, windows, waited_cpu_s = measure(case, times=options.times, wait_s=options.wait_s)
    medians = []
    for has_spare, name in ((True, "with a waiting spare"), (False, "without")):
        wall, cpu = steps_in(told, windows, has_spare=has_spare)
        medians.append((median(wall), median(cpu)))
        print(
            f"step {name:21} {median(wall) * 1e3:.3f} ms, processor time {median(cpu) * 1e3:.3f} ms ({len(wall)} steps)"
        )
    (wall_with, cpu_with), (wall_without, cpu_without) = medians
    print(f"ratio {wall_with / wall_without:.4f}, of processor time {cpu_with / cpu_without:.4f}")
    print(f"processor time of the spares in {options.times * options.wait_s:.0f} s of waiting: {waited_cpu_s:.2f} s")


if __name__ == "__main__":
    main()
