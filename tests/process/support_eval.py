"""Runs of `support_eval_script.py`: start, wait, read, compare."""

from __future__ import annotations

import json
import math
import operator
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import wait_until

SCRIPT = Path(__file__).with_name("support_eval_script.py")
TIMEOUT_S = 60.0


@dataclass
class EvalRun:
    """One run: its agent's process and the files it leaves."""

    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end within {timeout_s} s:\n{self.log()[-5000:]}") from None

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def ledger(self, event: str | None = None) -> list[dict[str, Any]]:
        return [
            entry
            for path in (self.run_dir / "ledger").glob("*.jsonl")
            for entry in map(json.loads, path.read_bytes().split(b"\n")[:-1])
            if event in (None, entry["event"])
        ]

    def told(self, event: str) -> list[dict[str, Any]]:
        """What the workers wrote."""
        return [
            entry
            for path in sorted(self.folder.glob("out/worker-*.jsonl"))
            for entry in map(json.loads, path.read_bytes().split(b"\n")[:-1])
            if entry["event"] == event
        ]

    def living(self) -> dict[str, int]:
        """Pids of the workers that run, by worker id."""
        pids: dict[str, int] = {}
        for entry in self.ledger():
            if entry["event"] == "worker_started":
                pids[entry["worker_id"]] = entry["pid"]
            elif entry["event"] == "worker_exited":
                pids.pop(entry["worker_id"], None)
        return pids

    def world(self) -> list[tuple[int, int]]:
        """Rank and pid of the members of the newest round, where all of them are alive."""
        rounds, pids = self.ledger("round"), self.living()
        seats = rounds[-1]["seats"] if rounds else []
        return [(rank, pids[worker_id]) for rank, worker_id, _ in seats if worker_id in pids]

    def wait_step(self, step: int, timeout_s: float = TIMEOUT_S) -> None:
        wait_until(
            lambda: self.process.poll() is not None or any(e["step"] >= step for e in self.ledger("commit")),
            timeout_s,
            lambda: self.log()[-3000:],
        )

    def results(self) -> dict[tuple[str, int], int]:
        """Result of each evaluation, on which all ranks that took part must agree.

        A newcomer evaluates by itself what the run has behind it already; that is left out.
        """
        entries = self.told("evaluated")
        steps: dict[tuple[str, int], int] = {}
        for entry in entries:
            key = entry["name"], entry["epoch"]
            steps[key] = min(entry["step"], steps.get(key, entry["step"]))
        found: dict[tuple[str, int], set[int]] = {}
        for entry in entries:
            if entry["step"] == steps[entry["name"], entry["epoch"]]:
                found.setdefault((entry["name"], entry["epoch"]), set()).add(entry["result"])
        assert all(len(values) == 1 for values in found.values()), found
        return {key: values.pop() for key, values in found.items()}

    def final(self) -> dict[str, Any]:
        """The state at the end, which must be identical on all ranks.

        A rank killed behind the last step, when others have left with their state, trains again from a checkpoint, in
        a world of another size: then to rounding.
        """
        finals = self.told("final")
        assert finals, self.log()[-5000:]
        states = [entry["state"] for entry in finals]
        is_same = is_close if self.ledger("resumed") else operator.eq
        assert all(is_same(state, states[0]) for state in states), states
        state: dict[str, Any] = finals[0]["state"]
        return state


def command(folder: Path, *script_args: str, nproc: int = 3, options: tuple[str, ...] = ()) -> list[str]:
    (folder / "out").mkdir(parents=True, exist_ok=True)
    head = [sys.executable, "-m", "elastictrain", "run", "--nproc-per-node", str(nproc), "--run-dir"]
    return [*head, str(folder / "run"), *options, str(SCRIPT), "--out", str(folder / "out"), *script_args]


@contextmanager
def started(folder: Path, *script_args: str, nproc: int = 3, options: tuple[str, ...] = ()) -> Iterator[EvalRun]:
    """A run in its own folder; whatever happens, it is over when the block ends."""
    line = command(folder, *script_args, nproc=nproc, options=options)
    with (folder / "log").open("wb") as stream:
        process = subprocess.Popen(
            line,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "ELASTICTRAIN_LOG_LEVEL": "info", "OMP_NUM_THREADS": "1"},
        )
    try:
        yield EvalRun(process, folder)
    finally:
        process.kill()
        process.wait()


def finished(folder: Path, *script_args: str, nproc: int = 3, options: tuple[str, ...] = ()) -> EvalRun:
    """A run that has ended well."""
    with started(folder, *script_args, nproc=nproc, options=options) as run:
        assert run.wait() == 0, run.log()[-6000:]
    return run


def verify(run: EvalRun) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "elastictrain", "verify", str(run.run_dir)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def assert_same(disturbed: EvalRun, undisturbed: EvalRun) -> None:
    """Same steps, same results, same state up to rounding; and the ledger proves the samples."""
    verify(disturbed)
    assert disturbed.results() == undisturbed.results()
    assert is_close(disturbed.final(), undisturbed.final()), (disturbed.final(), undisturbed.final())
    steps = [entry["step"] for entry in disturbed.ledger("commit")]
    assert steps == list(range(1, undisturbed.final()["step"] + 1))


def assert_exactly_once(run: EvalRun, *, num_samples: int, num_epochs: int) -> None:
    """The committed ranges of each epoch of the only loop make up the data set."""
    ranges: dict[int, list[range]] = {}
    commits: list[dict[str, Any]] = []
    for entry in run.ledger():
        if entry["event"] == "resumed":  # what came after that step is undone
            commits = [one for one in commits if one["step"] <= entry["step"]]
        elif entry["event"] == "commit":
            commits.append(entry)
    for entry in commits:
        ranges.setdefault(entry["epoch"], []).append(range(entry["start"], entry["stop"]))
    counts = {epoch: Counter(i for one in parts for i in one) for epoch, parts in ranges.items()}
    assert counts == {epoch: Counter(range(num_samples)) for epoch in range(num_epochs)}


def is_close(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(is_close(a, b) for a, b in zip(one, other, strict=True))
    return math.isclose(one, other, rel_tol=1e-7, abs_tol=1e-9)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
