"""`elastictrain status`: how a run is doing, folded from its files; works on a live, a finished and a dead run."""

from __future__ import annotations

import json
import os
import socket
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elastictrain.clock import SystemClock
from elastictrain.errors import ConfigError
from elastictrain.ledger_reader import Entry, LedgerScan, read_run_id

RATE_WINDOW = 50
"""Commits over which the rate is taken."""
MAX_FAILURES = 5
START_SLACK_S = 5.0
"""A process that began later than this after the agent's noted start is another one with the same pid."""
_PREEMPTED = 75


@dataclass(slots=True)
class AgentStatus:
    """One agent; `is_alive` None where this machine cannot tell (the agent runs on another one)."""

    node: str
    pid: int | None
    host: str | None = None
    metrics_url: str | None = None
    is_alive: bool | None = None


@dataclass(slots=True)
class FailureStatus:
    """One broken round, and the seconds until training went on (None: not yet)."""

    generation: int
    cause: str
    worker_id: str | None
    rank: int | None
    detail: str | None
    recovery_seconds: float | None = None
    seconds_by_stage: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class SpareStatus:
    """A process that waits for the place of a lost worker; the memory is what it had of its own when it was ready."""

    node: str
    worker_id: str
    pid: int
    memory_bytes: int


@dataclass(slots=True)
class RunStatus:
    """What `status` prints; with --json these are the keys."""

    run_id: str
    run_dir: str
    state: str = "unknown"
    detail: str | None = None
    step: int = 0
    loop: int | None = None
    epoch: int | None = None
    epoch_samples: int | None = None
    epoch_length: int | None = None
    world_size: int | None = None
    generation: int | None = None
    samples_per_second: float | None = None
    steps_per_second: float | None = None
    goodput_ratio: float | None = None
    checkpoint: dict[str, Any] | None = None
    checkpoint_error: str | None = None
    num_failures: int = 0
    failures: list[FailureStatus] = field(default_factory=list)
    last_error: str | None = None
    spares: list[SpareStatus] = field(default_factory=list)
    spares_off: str | None = None
    replacements: list[dict[str, Any]] = field(default_factory=list)
    agents: list[AgentStatus] = field(default_factory=list)
    ledger_problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Span:
    """An agent's time from its start to its last event."""

    first_wall_s: float
    last_wall_s: float
    last_mono_s: float


class _Fold:
    def __init__(self, status: RunStatus) -> None:
        self.status = status
        self.end: Entry | None = None
        self.pids: dict[str, Mapping[str, Any]] = {}
        self.failures: deque[FailureStatus] = deque(maxlen=MAX_FAILURES)
        self.recent: deque[tuple[Entry, int]] = deque(maxlen=RATE_WINDOW)
        self.previous: Entry | None = None
        # Steps that stand, and the seconds each took since the commit before it: only such time counts as productive.
        self.steps = array("q")
        self.step_seconds = array("d")
        self.spans: dict[str, list[_Span]] = {}  # by node
        self.spares: dict[str, SpareStatus] = {}
        self.replacements: deque[dict[str, Any]] = deque(maxlen=MAX_FAILURES)

    def take(self, entry: Entry) -> None:
        spans = self.spans.setdefault(entry.node, [])
        # A monotonic clock that goes back tells of a reboot even where the start itself was not recorded.
        if not spans or entry.event == "node_started" or entry.mono < spans[-1].last_mono_s:
            spans.append(_Span(entry.wall, entry.wall, entry.mono))
            self.previous = None
        spans[-1].last_wall_s, spans[-1].last_mono_s = entry.wall, entry.mono
        fields, status = entry.fields, self.status
        match entry.event:
            case "commit":
                self._commit(entry)
            case "node_started":
                self.end = None
                self.pids[entry.node] = fields
                self.spares = {name: spare for name, spare in self.spares.items() if spare.node != entry.node}
                status.spares_off = None
            case "run_started":
                self.end = None
            case "round":
                status.generation, status.world_size = fields["generation"], fields["world_size"]
                self.previous = None
            case "resumed":
                self.end = None
                self._cut(fields["step"])
            case "broken":
                status.num_failures += 1
                names = ("generation", "cause", "worker_id", "rank", "detail")
                self.failures.append(FailureStatus(**{name: fields[name] for name in names}))
            case "recovered":
                self._recovered(fields)
            case "failure":
                step = "" if fields["step"] is None else f" at step {fields['step']}"
                status.last_error = f"rank {fields['rank']}{step}: {fields['error_type']}: {fields['message']}"
            case "checkpoint":
                status.checkpoint = {**fields, "wall": entry.wall}
                status.checkpoint_error = None
            case "checkpoint_failed":
                status.checkpoint_error = f"step {fields['step']}: {fields['error']}"
            case "spare_ready":
                spare = SpareStatus(entry.node, fields["worker_id"], fields["pid"], fields["memory_bytes"])
                self.spares[spare.worker_id] = spare
            case "spare_lost" | "worker_started":
                self.spares.pop(fields["worker_id"], None)
            case "spares_off":
                status.spares_off = fields["reason"]
            case "replaced":
                shown = ("worker_id", "lost", "source", "seconds", "step")
                self.replacements.append({name: fields[name] for name in shown})
            case "run_finished" | "run_stopped":
                self.end = entry
            case _:
                pass

    def _commit(self, entry: Entry) -> None:
        fields, status, previous = entry.fields, self.status, self.previous
        status.step, status.loop, status.epoch = fields["step"], fields["loop"], fields["epoch"]
        status.epoch_samples, status.epoch_length = fields["stop"], fields["epoch_length"]
        status.generation, status.world_size = fields["generation"], fields["world_size"]
        is_next = previous is not None and previous.node == entry.node
        self.steps.append(fields["step"])
        self.step_seconds.append(entry.mono - previous.mono if previous is not None and is_next else 0.0)
        if not is_next:
            self.recent.clear()
        self.recent.append((entry, fields["stop"] - fields["start"]))
        self.previous = entry

    def _cut(self, step: int) -> None:
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.step_seconds.pop()
        self.status.step = step
        self.previous = None
        self.recent.clear()

    def _recovered(self, fields: Mapping[str, Any]) -> None:
        seconds = {stage: float(value) for stage, value in fields["seconds_by_stage"].items()}
        # One recovery may answer several failures: a round can break while it is being formed.
        for failure in self.failures:
            if failure.generation <= fields["generation"] and failure.recovery_seconds is None:
                failure.recovery_seconds = round(sum(seconds.values()), 6)
                failure.seconds_by_stage = seconds

    def finish(self) -> None:
        status = self.status
        status.failures = list(self.failures)
        status.replacements = list(self.replacements)
        if len(self.recent) > 1:
            seconds = self.recent[-1][0].mono - self.recent[0][0].mono
            if seconds > 0:
                # The first commit only marks the beginning of the window.
                status.steps_per_second = (len(self.recent) - 1) / seconds
                status.samples_per_second = sum(samples for _, samples in list(self.recent)[1:]) / seconds
        all_seconds = _covered_s(span for spans in self.spans.values() for span in spans)
        if all_seconds > 0 and status.step:
            status.goodput_ratio = min(1.0, sum(self.step_seconds) / all_seconds)


def _covered_s(spans: Iterable[_Span]) -> float:
    """Seconds in which at least one agent ran, by wall time: good enough for a number that people read."""
    covered_s, until_s = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.first_wall_s):
        covered_s += max(0.0, span.last_wall_s - max(span.first_wall_s, until_s))
        until_s = max(until_s, span.last_wall_s)
    return covered_s


def read_status(run_dir: Path) -> RunStatus:
    """Fold the files of a run. Blocks on reading the ledger (a million steps take seconds).

    Raises ConfigError where `run_dir` is no run directory.
    """
    if not (run_dir / "run.json").is_file():
        raise ConfigError(
            f"{run_dir} is no run directory: expected run.json in it: check the path", field="run_dir", seen=run_dir
        )
    status = RunStatus(run_id=read_run_id(run_dir) or run_dir.name, run_dir=str(run_dir))
    scan = LedgerScan(run_dir)
    fold = _Fold(status)
    for entry in scan:
        try:
            fold.take(entry)
        except (KeyError, TypeError, ValueError) as error:
            place = f"ledger/{entry.node}.jsonl:{entry.line}"
            status.ledger_problems.append(f"{place}: malformed {entry.event} event: {type(error).__name__}: {error}")
    fold.finish()
    status.ledger_problems = [*map(str, scan.problems), *status.ledger_problems[:MAX_FAILURES]]
    status.agents = _read_agents(run_dir, fold.pids)
    status.state, status.detail = _state(fold, status.agents)
    gone = {agent.node for agent in status.agents if agent.is_alive is False}
    if fold.end is None:
        status.spares = [spare for spare in fold.spares.values() if spare.node not in gone]
    return status


def status_command(run_dir: Path, *, as_json: bool) -> int:
    """Print the status of a run as aligned text or JSON. Raises ConfigError where `run_dir` is no run directory."""
    status = read_status(run_dir)
    if as_json:
        print(json.dumps(asdict(status), indent=2))
    else:
        for line in _lines(status):
            print(line)
    return 0


def _state(fold: _Fold, agents: Iterable[AgentStatus]) -> tuple[str, str | None]:
    if fold.end is not None:
        fields = fold.end.fields
        if fold.end.event == "run_finished" and fields["exit_code"] == 0:
            return "finished", None
        reason = f"exit code {fields['exit_code']}" + (f": {fields['reason']}" if "reason" in fields else "")
        is_stop = fields["exit_code"] in (0, _PREEMPTED) or fields["exit_code"] > 128
        return ("stopped" if is_stop else "failed"), reason
    alive = [agent.is_alive for agent in agents]
    if any(alive):
        return "running", None
    if not alive:
        return "unknown", "no agent has said where it runs"
    if None in alive:
        return "unknown", "the agent runs on another machine"
    return "dead", "the agent is gone without an end event: continue with `elastictrain resume`"


def _read_agents(run_dir: Path, pids: Mapping[str, Mapping[str, Any]]) -> list[AgentStatus]:
    """The agents by their own files, or, where an agent left none, by its node_started event."""
    found: dict[str, Mapping[str, Any]] = {node: fields for node, fields in pids.items() if fields.get("pid")}
    for path in sorted((run_dir / "agents").glob("*.json")):
        try:
            value = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue  # being replaced or unreadable: the rest of the status is worth printing all the same
        if isinstance(value, dict):
            found[path.stem] = {**found.get(path.stem, {}), **value}
    agents = []
    for node, value in sorted(found.items()):
        pid, host, started = value.get("pid"), value.get("host"), value.get("started")
        agent = AgentStatus(node, pid if type(pid) is int else None, host, value.get("metrics_url"))
        is_here = host is None or host == socket.gethostname()
        if is_here and agent.pid is not None:
            agent.is_alive = _is_alive(agent.pid, started if isinstance(started, int | float) else None)
        agents.append(agent)
    return agents


def _is_alive(pid: int, started_wall_s: float | None) -> bool:
    """Whether the process exists, is no zombie, and was there when the agent started (a pid may be used again)."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        uptime_s = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return False
    if after_name[0] in "ZX":
        return False
    if started_wall_s is None:
        return True
    age_s = uptime_s - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    begun_wall_s = SystemClock().wall_time_s() - age_s
    return begun_wall_s <= started_wall_s + START_SLACK_S


def _lines(status: RunStatus) -> Iterator[str]:
    """The status as text, one aligned fact per line."""

    def row(name: str, text: str) -> str:
        return f"{name:<12}{text}"

    yield row("run", f"{status.run_id}  ({status.run_dir})")
    yield row("state", status.state + (f": {status.detail}" if status.detail else ""))
    for agent in status.agents:
        where = f" on {agent.host}" if agent.host else ""
        metrics = f", metrics at {agent.metrics_url}" if agent.metrics_url and agent.is_alive is not False else ""
        alive = {True: "alive", False: "gone", None: "unknown"}[agent.is_alive]
        yield row("agent", f"{agent.node}: pid {agent.pid}{where}, {alive}{metrics}")
    yield row("step", str(status.step))
    if status.epoch is not None:
        of = "" if status.epoch_length is None else f" of {status.epoch_length}"
        yield row("epoch", f"{status.epoch} (loop {status.loop}), {status.epoch_samples}{of} samples committed")
    if status.world_size is not None:
        yield row("world size", f"{status.world_size}, generation {status.generation}")
    for spare in status.spares:
        size_mib = spare.memory_bytes / (1 << 20)
        yield row("spare", f"{spare.worker_id}: pid {spare.pid}, waits in init(), {size_mib:.1f} MiB of its own")
    if status.spares_off is not None and status.state == "running":
        yield row("spares", f"no more: {status.spares_off}")
    if status.steps_per_second is not None:
        yield row("rate", f"{status.samples_per_second:.1f} samples/s, {status.steps_per_second:.2f} steps/s")
    if status.goodput_ratio is not None:
        yield row("goodput", f"{100 * status.goodput_ratio:.1f} %")
    if status.checkpoint is not None:
        checkpoint = status.checkpoint
        size_mib = checkpoint["size_bytes"] / (1 << 20)
        yield row("checkpoint", f"step {checkpoint['step']}, {size_mib:.1f} MiB, {checkpoint['path']}")
    if status.checkpoint_error is not None:
        yield row("", f"newest attempt failed: {status.checkpoint_error}")
    yield row("failures", str(status.num_failures))
    for failure in status.failures:
        yield row("", _failure_text(failure))
    for replacement in status.replacements:
        yield row("", _replacement_text(replacement))
    if status.last_error is not None:
        yield row("last error", status.last_error)
    for problem in status.ledger_problems:
        yield row("ledger", problem)


def _replacement_text(replacement: Mapping[str, Any]) -> str:
    how = "a spare" if replacement["source"] == "spare" else "a new process"
    who, lost = replacement["worker_id"], replacement["lost"]
    return f"step {replacement['step']}: {how}, {who}, in the place of {lost} after {replacement['seconds']:.3f} s"


def _failure_text(failure: FailureStatus) -> str:
    who = "" if failure.rank is None else f" rank {failure.rank}"
    detail = f": {failure.detail}" if failure.detail else ""
    if failure.recovery_seconds is None:
        recovery = "no recovery recorded"
    else:
        stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in failure.seconds_by_stage.items())
        recovery = f"recovered in {failure.recovery_seconds:.3f} s" + (f" ({stages})" if stages else "")
    return f"generation {failure.generation}{who}: {failure.cause}{detail}: {recovery}"
