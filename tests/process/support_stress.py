"""Random SIGKILLs of random workers, never of all at once, while a run trains and evaluates."""

from __future__ import annotations

import contextlib
import random
import threading
from pathlib import Path

from support_eval import EvalRun, kill, started, verify


def stress(folder: Path, *, seed: int, seconds: float, num_workers: int, timeout_s: float = 45.0) -> EvalRun:
    """Kill for `seconds`, leave the run alone until it is done, and prove it. Raises AssertionError on a hang."""
    chance = random.Random(seed)
    epochs = str(int(seconds * 2))
    args = ("--epochs", epochs, "--num-workers", str(num_workers), "--pause-s", "0.03", "--evaluation", "after,inside")
    wake = threading.Event()
    # The default budget ends a run after three failures in a row without a step, which three quick kills may well be.
    with started(folder, *args, options=("--max-restarts", "1000")) as run:
        run.wait_step(2)
        until = 0.0
        while until < seconds and run.process.poll() is None:
            pause = chance.uniform(0.3, 1.0)
            until += pause
            wake.wait(pause)
            members = run.world()
            for _, pid in chance.sample(members, max(0, min(len(members) - 1, chance.choice([1, 1, 2])))):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid)
        assert run.wait(timeout_s) == 0, f"seed {seed}: {run.log()[-5000:]}"
    verify(run)
    run.final()
    return run
