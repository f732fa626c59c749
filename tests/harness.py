"""Starting real runs from tests, and reading what they leave behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import wait_until

SCRIPTS = Path(__file__).parent / "process" / "scripts"
START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 90.0


@dataclass
class Job:
    """One `elastictrain` command: its process, its run directory, and the folder where its script writes."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    out: Path
    log: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def wait(self, timeout_s: float = RUN_TIMEOUT_S) -> int:
        """Wait for the end and return the exit code; a run that does not end is killed and shown."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the run did not end within {timeout_s} s:\n{self.output()[-6000:]}") from None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def ledger(self) -> list[dict[str, Any]]:
        """All whole lines of the ledger so far."""
        lines: list[dict[str, Any]] = []
        for path in sorted((self.run_dir / "ledger").glob("*.jsonl")):
            lines.extend(json.loads(line) for line in path.read_bytes().split(b"\n")[:-1])
        return lines

    def find(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.ledger() if entry["event"] == event]

    def wait_for_step(self, step: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until `step` is committed."""
        wait_until(
            lambda: self.process.poll() is not None or any(e["step"] >= step for e in self.find("commit")),
            timeout_s=timeout_s,
            describe=lambda: self.output()[-3000:],
        )
        assert self.process.poll() is None, self.output()[-6000:]

    def records(self) -> list[dict[str, Any]]:
        """What the workers wrote: one record per attempt at a step."""
        found: list[dict[str, Any]] = []
        for path in sorted(self.out.glob("worker-*.jsonl")):
            found.extend(json.loads(line) for line in path.read_bytes().split(b"\n")[:-1])
        return found


def environment(**added: str) -> dict[str, str]:
    return {**os.environ, "ELASTICTRAIN_LOG_LEVEL": "info", **added}


def start(
    tmp_path: Path,
    command: Sequence[str],
    *,
    name: str = "run",
    out: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Job:
    """Start `elastictrain COMMAND`, with {run_dir} and {out} filled in."""
    run_dir = tmp_path / name
    folder = out or tmp_path / f"{name}-out"
    folder.mkdir(exist_ok=True)
    words = [word.replace("{run_dir}", str(run_dir)).replace("{out}", str(folder)) for word in command]
    log = tmp_path / f"{name}-{len(list(tmp_path.glob(f'{name}-*.log')))}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "elastictrain", *words],
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment(**(env or {})),
            cwd=cwd or tmp_path,
        )
    return Job(process, run_dir, folder, log)


def start_run(tmp_path: Path, script: str, *args: str, nproc: int = 3, options: Iterable[str] = (), **rest: Any) -> Job:
    """Start a script of tests/process/scripts under `elastictrain run`."""
    path = script if "/" in script else str(SCRIPTS / script)
    command = ["run", "--nproc-per-node", str(nproc), "--run-dir", "{run_dir}", *options, path, "--out", "{out}", *args]
    return start(tmp_path, command, **rest)


def verify(run_dir: Path) -> subprocess.CompletedProcess[str]:
    """Run `elastictrain verify` and return how it ended."""
    return subprocess.run(
        [sys.executable, "-m", "elastictrain", "verify", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(),
    )


def lineage(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The commits that led to the end: a resume drops those after its step."""
    commits: list[Mapping[str, Any]] = []
    for entry in entries:
        if entry["event"] == "resumed":
            commits = [commit for commit in commits if commit["step"] <= entry["step"]]
        elif entry["event"] == "commit":
            commits.append(entry)
    return commits


def assert_exactly_once(job: Job, *, num_samples: int, num_epochs: int) -> None:
    """Each epoch's committed samples are the data set, each once: by the ledger and by what the workers saw."""
    assert verify(job.run_dir).returncode == 0, verify(job.run_dir).stdout
    commits = lineage(job.ledger())
    assert [commit["step"] for commit in commits] == list(range(1, len(commits) + 1))
    seen: dict[int, Counter[int]] = {}
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for record in job.records():
        if record["committed"]:
            by_step.setdefault(record["step"], []).append(record)
    for commit in commits:
        ids = [number for record in by_step[commit["step"]] for number in record["ids"] if record["share"]]
        assert len(ids) == commit["stop"] - commit["start"], f"step {commit['step']}: {len(ids)} samples, {commit}"
        seen.setdefault(commit["epoch"], Counter()).update(ids)
    assert sorted(seen) == list(range(num_epochs))
    for epoch, counts in seen.items():
        assert counts == Counter(range(num_samples)), f"epoch {epoch}: {counts - Counter(range(num_samples))}"


def processes_of(pattern: str) -> list[int]:
    """Pids of living processes whose command line or environment holds `pattern`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if pattern.encode() in text:
                found.append(int(entry.name))
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants at once, as a lost machine would."""
    import psutil

    root = psutil.Process(pid)
    family = [root, *root.children(recursive=True)]
    for process in family:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=10)
