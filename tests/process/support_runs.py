"""Starting `elastictrain` in tests, and what its files say afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import wait_until

TRAIN = Path(__file__).parent / "support_train.py"
PLAIN = Path(__file__).parent / "support_plain.py"
START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 80.0
MARK = "TEST_LEG"


def environment(**added: str) -> dict[str, str]:
    """The tests' own environment without what would change a run, and with `added`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "OMP_", "TORCHELASTIC_"))}
    return {**kept, **added}


@dataclass
class Job:
    """One command that runs: its process and what it has printed so far."""

    process: subprocess.Popen[bytes]
    folder: Path
    leg: str

    def out(self) -> str:
        return (self.folder / f"{self.leg}.out").read_text(errors="replace")

    def err(self) -> str:
        return (self.folder / f"{self.leg}.err").read_text(errors="replace")

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> int:
        """Wait for the end; a command that hangs fails the test with what it has printed."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end within {timeout_s} s\n{self.out()[-2000:]}\n{self.err()[-6000:]}") from None

    def pids(self) -> list[int]:
        """Every living process of this command, by the mark that all of them inherit."""
        return find_marked(f"{MARK}={self.leg}", self.folder)

    def kill_everything(self) -> None:
        """SIGKILL the agent, the fork server, the workers and all that they started, as a power cut would."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
        self.process.wait()


def find_marked(mark: str, folder: Path) -> list[int]:
    """Pids of living processes whose environment holds `mark` and the test's folder; zombies have none."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                environ = (entry / "environ").read_bytes().split(b"\0")
                if mark.encode() in environ and f"TEST_FOLDER={folder}".encode() in environ:
                    found.append(int(entry.name))
    return found


@contextlib.contextmanager
def started(
    folder: Path,
    *words: str | Path,
    leg: str = "run",
    env: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
    cwd: Path | None = None,
) -> Iterator[Job]:
    """Start `elastictrain WORDS` and end it with the block, whatever is left of it."""
    with (folder / f"{leg}.out").open("wb") as out, (folder / f"{leg}.err").open("wb") as err:
        process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "elastictrain", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment(**{MARK: leg, "TEST_FOLDER": str(folder), **(env or {})}),
            cwd=cwd or folder,
        )
    job = Job(process, folder, leg)
    try:
        yield job
    finally:
        if process.poll() is None:
            job.kill_everything()


def finish(folder: Path, *words: str | Path, leg: str = "run", timeout_s: float = RUN_TIMEOUT_S, **rest: Any) -> Job:
    """Run `elastictrain WORDS` to its end."""
    with started(folder, *words, leg=leg, **rest) as job:
        job.wait(timeout_s)
    return job


def run_words(folder: Path, *script_args: str, nproc: int = 2, options: Sequence[str] = ()) -> list[str]:
    """The command that trains support_train.py in folder/run, with its records in folder/records."""
    records = folder / "records"
    records.mkdir(exist_ok=True)
    head = ["run", "--nproc-per-node", str(nproc), "--run-dir", str(folder / "run"), *options]
    return [*head, str(TRAIN), "--out", str(records), *script_args]


def read_ledger(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of all ledger files so far."""
    entries: list[dict[str, Any]] = []
    for path in sorted((run_dir / "ledger").glob("*.jsonl")):
        entries.extend(json.loads(line) for line in path.read_bytes().split(b"\n")[:-1])
    return entries


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [entry for entry in read_ledger(run_dir) if entry["event"] == name]


def wait_for(job: Job, event: str, count: int = 1, timeout_s: float = START_TIMEOUT_S) -> list[dict[str, Any]]:
    """Wait until the ledger of folder/run holds `count` such events, and give them."""

    def seen() -> list[dict[str, Any]] | None:
        found = events(job.folder / "run", event)
        assert len(found) >= count or job.process.poll() is None, f"ended: {job.out()[-1000:]}\n{job.err()[-5000:]}"
        return found if len(found) >= count else None

    return wait_until(seen, timeout_s, lambda: job.err()[-4000:]) or []


def standing_commits(entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The commits that led to the end: a resume undoes those after its step."""
    commits: list[Mapping[str, Any]] = []
    for entry in entries:
        if entry["event"] == "resumed":
            commits = [commit for commit in commits if commit["step"] <= entry["step"]]
        elif entry["event"] == "commit":
            commits.append(entry)
    return commits


def read_records(folder: Path) -> list[dict[str, Any]]:
    """What the workers wrote about each attempt at a step."""
    records: list[dict[str, Any]] = []
    for path in sorted((folder / "records").glob("worker-*.jsonl")):
        records.extend(json.loads(line) for line in path.read_bytes().split(b"\n")[:-1])
    return records


def steps_by_records(folder: Path, legs: Sequence[str]) -> dict[int, tuple[list[int], float]]:
    """Step → (sorted samples, sum of their losses) of the attempt that stands, from the workers' words alone.

    A later leg (a run or a resume) began where the state it had loaded ended, so everything from its first step on
    replaces what earlier legs did. Within a leg the attempt of the highest generation stands.
    """
    records = read_records(folder)
    steps: dict[int, tuple[list[int], float]] = {}
    for leg in legs:
        mine = [record for record in records if record["leg"] == leg]
        if not mine:
            continue
        first = min(record["step"] for record in mine)
        steps = {step: value for step, value in steps.items() if step < first}
        for step in {record["step"] for record in mine}:
            tries = [record for record in mine if record["step"] == step]
            last = max(record["generation"] for record in tries)
            parts = [record for record in tries if record["generation"] == last]
            ids = sorted(number for part in parts for number in part["ids"])
            steps[step] = (ids, sum(part["loss"] for part in parts))
    return steps


def one_line(text: str) -> str:
    """The single line of an error, or a failure that shows what came instead."""
    lines = text.splitlines()
    assert len(lines) == 1, f"expected one line, seen {len(lines)}:\n{text}"
    return lines[0]
