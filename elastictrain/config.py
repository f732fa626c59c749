"""The resolved settings of a run: frozen, checked against each other, and written to run.json.

Where they come from (command line, variables, run.json, defaults) is the business of `elastictrain.resolve`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastictrain.errors import ConfigError
from elastictrain.notation import CheckpointEvery

SPEC_VERSION = 1
CHANNEL_FD_VARIABLE = "ELASTICTRAIN_CHANNEL_FD"
WORKER_ID_VARIABLE = "ELASTICTRAIN_WORKER_ID"
LOG_LEVEL_VARIABLE = "ELASTICTRAIN_LOG_LEVEL"
# Carries the program to a worker that starts in a new interpreter; the worker takes it out again.
ENTRYPOINT_VARIABLE = "ELASTICTRAIN_ENTRYPOINT"
# A mark that the tests put on every process they start, to find the ones left behind.
TEST_ID_VARIABLE = "ELASTICTRAIN_TEST_ID"
ETCD_PASSWORD_VARIABLE = "ELASTICTRAIN_ETCD_PASSWORD"
RDZV_SECRET_VARIABLE = "ELASTICTRAIN_RDZV_SECRET"
# The agent's alone: no worker is to have them.
SECRET_VARIABLES = (ETCD_PASSWORD_VARIABLE, RDZV_SECRET_VARIABLE)
KNOWN_VARIABLES = frozenset(
    {CHANNEL_FD_VARIABLE, WORKER_ID_VARIABLE, LOG_LEVEL_VARIABLE, TEST_ID_VARIABLE, *SECRET_VARIABLES}
)

Text = str | bool | None


@dataclass(frozen=True, slots=True)
class Setting:
    """One option as it was given, and where: what run.json keeps, so that a resume resolves it anew."""

    text: Text
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every worker executes."""

    script: str
    """Path of the script as given; the module's name with `module`; a command with `no_python`."""
    args: tuple[str, ...] = ()
    """The script's own arguments, byte for byte."""
    module: bool = False
    """Run as `python -m script`."""
    no_python: bool = False
    """Execute `script` itself."""
    run_path: bool = False
    """Run the script in the worker's own interpreter with `runpy.run_path`; wins over `no_python`."""
    interpreter: str = sys.executable
    """The Python that executes the script."""

    def __post_init__(self) -> None:
        if not self.script:
            raise ConfigError("expected a script to run, seen ''; give e.g. train.py", field="script", seen=self.script)
        if self.module and (self.no_python or self.run_path):
            other = "--run-path" if self.run_path else "--no-python"
            raise ConfigError(
                f"--module: expected to be used alone, seen with {other}; drop one of the two",
                field="--module",
                seen=other,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """How many workers, and where."""

    nproc_per_node: int = 1
    """Workers on this node."""
    min_nodes: int = 1
    """Fewest nodes that train."""
    max_nodes: int = 1
    """Most nodes that train."""
    min_world_size: int = 1
    """Below this many workers the run waits for replacements instead of training on."""
    spares: int | None = None
    """Processes on this node that wait, imports done, to replace a lost worker; None: one when memory allows."""
    local_addr: str | None = None
    """Address of this node for its peers and workers; None: found by the agent."""
    rdzv_backend: str = "embedded"
    """Where nodes meet: "embedded", the memory of the one agent; "etcd3"; or, with several nodes, "c10d": the memory of
    one agent, served to the others."""
    rdzv_endpoint: str = ""
    """Address of the store, as given."""
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    """Further settings of the store, as given; holds no secret."""
    join_timeout_s: float = 600.0
    """How long the first rendezvous waits for the fewest nodes."""
    last_call_timeout_s: float = 30.0
    """How long the first round waits for more nodes once it has the fewest."""
    ttl_s: float = 10.0
    """How long a node may be silent before the others go on without it."""
    outage_timeout_s: float = 60.0
    """How long nodes that train together go on beyond their leases while they cannot reach the store."""

    @property
    def is_shared(self) -> bool:
        """Whether other nodes may take part, so that store and addresses must be reachable for them."""
        return self.rdzv_backend == "etcd3" or (self.rdzv_backend == "c10d" and self.max_nodes > 1)

    def __post_init__(self) -> None:
        _require(self.nproc_per_node >= 1, "--nproc-per-node", "1 or more workers", self.nproc_per_node)
        _require(1 <= self.min_nodes <= self.max_nodes, "--nnodes", "1 <= MIN <= MAX", (self.min_nodes, self.max_nodes))
        _require(self.spares is None or self.spares >= 0, "--spares", "0 or more", self.spares)
        most = self.nproc_per_node * self.max_nodes
        _require(
            1 <= self.min_world_size <= most,
            "--min-world-size",
            f"1 to {most}, the workers that --nnodes and --nproc-per-node allow",
            self.min_world_size,
        )
        _require(self.join_timeout_s > 0, "--rdzv-conf join_timeout", "more than 0 seconds", self.join_timeout_s)
        _require(self.ttl_s >= 1, "--rdzv-conf ttl", "1 second or more", self.ttl_s)
        _require(
            0 <= self.outage_timeout_s < float("inf"),
            "--rdzv-conf outage_timeout",
            "0 or more seconds",
            self.outage_timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """When checkpoints are made and how many stay."""

    every: CheckpointEvery = field(default_factory=CheckpointEvery)
    """When the next one is due."""
    keep: int = 3
    """How many of the newest stay; retention never removes the last intact one whatever this says."""

    def __post_init__(self) -> None:
        _require(self.keep >= 1, "--keep", "1 or more checkpoints", self.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsEndpoint:
    """Where the agent answers `/metrics`."""

    host: str = "127.0.0.1"
    """Address it listens at."""
    port: int = 0
    """Port it listens at; 0: a free one."""

    def __post_init__(self) -> None:
        _require(bool(self.host), "--metrics-host", "an address", self.host)
        _require(0 <= self.port <= 65535, "--metrics-port", "a port from 0 to 65535", self.port)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where the workers' stdout and stderr go; the notation of streams is torchrun's."""

    log_dir: Path | None = None
    """Folder of log files; None: `logs` of the run directory."""
    redirects: str = "0"
    """Streams that go to files instead of the console."""
    tee: str = "0"
    """Streams that go to files and the console."""
    local_ranks_filter: tuple[int, ...] | None = None
    """Local ranks whose streams the console shows; None: all."""
    duplicate_stdout_filters: tuple[str, ...] = ()
    """Lines of stdout with one of these words are also written to a common file."""
    duplicate_stderr_filters: tuple[str, ...] = ()
    """Lines of stderr with one of these words are also written to a common file."""
    line_prefix_template: str | None = None
    """torchrun's template of the prefix of console lines; None: `[role+rank]:`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything an agent needs to know to start or continue a run."""

    run_id: str
    """Names the run in the store, the ledger and the metrics; the same over every resume."""
    run_dir: Path
    """Absolute path of the run directory."""
    program: Program
    """What every worker executes."""
    cwd: Path
    """Absolute path of the folder in which workers start."""
    argv: tuple[str, ...] = ()
    """The command line after `elastictrain`, as typed; a record only."""
    world: World = field(default_factory=World)
    """How many workers, and where."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    """When checkpoints are made and how many stay."""
    metrics: MetricsEndpoint = field(default_factory=MetricsEndpoint)
    """Where the agent answers `/metrics`."""
    output: Output = field(default_factory=Output)
    """Where the workers' streams go."""
    max_restarts: int | None = None
    """Failures after which the run ends, in all; None: it ends after 3 in a row without a newly committed step."""
    grace_period_s: float = 30.0
    """What a preemption notice leaves for a checkpoint and a clean end."""
    hang_timeout_s: float | None = None
    """How long a worker may commit nothing before it counts as hung; None: learned from the steps; 0: for ever."""
    shutdown_timeout_s: float = 30.0
    """How long workers may take to end after a signal, before SIGKILL."""
    signals_to_handle: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    """Signals that the agent handles and passes on."""
    role: str = "default"
    """The workers' role, as in torchrun: part of their environment and of console prefixes."""
    start_method: str = "forkserver"
    """How a worker starts: "forkserver" and "fork" from a process with torch imported, "spawn" in a new interpreter."""
    virtual_local_rank: bool = False
    """Every worker sees LOCAL_RANK 0 and only its own GPU."""
    omp_num_threads: int | None = None
    """OMP_NUM_THREADS for the workers; None: whatever the environment says."""
    settings: Mapping[str, Setting] = field(default_factory=dict, compare=False)
    """Every option by its name in Python, as given and from where."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """Lines to show once at the start: options that were given and have no effect here."""

    def __post_init__(self) -> None:
        name = self.run_id
        _require(
            0 < len(name) <= 128 and name.isprintable() and "/" not in name and name not in {".", ".."},
            "--rdzv-id",
            "1 to 128 printable characters without '/'",
            name,
        )
        for option, path in (("--run-dir", self.run_dir), ("cwd", self.cwd)):
            _require(path.is_absolute(), option, "an absolute path", str(path))
        _require(self.max_restarts is None or self.max_restarts >= 0, "--max-restarts", "0 or more", self.max_restarts)
        _require(0 <= self.grace_period_s < float("inf"), "--grace-period-s", "0 or more seconds", self.grace_period_s)
        _require(
            self.hang_timeout_s is None or 0 <= self.hang_timeout_s < float("inf"),
            "--hang-timeout",
            "auto, or 0 or more seconds",
            self.hang_timeout_s,
        )
        _require(self.shutdown_timeout_s >= 0, "--shutdown-timeout", "0 or more seconds", self.shutdown_timeout_s)

    def to_spec(self) -> dict[str, Any]:
        """Give the JSON value that run.json holds; never a value of the environment, except an option's own.

        Blocks for some milliseconds: reads the versions of installed packages, and imports none of them.
        """
        import platform  # here: a start that only prints an error should not pay for it

        program = self.program
        return {
            "version": SPEC_VERSION,
            "run_id": self.run_id,
            "argv": list(self.argv),
            "cwd": str(self.cwd),
            "program": {
                "script": program.script,
                "args": list(program.args),
                "module": program.module,
                "no_python": program.no_python,
                "run_path": program.run_path,
            },
            "options": {name: setting.text for name, setting in sorted(self.settings.items())},
            "origins": {name: setting.origin for name, setting in sorted(self.settings.items())},
            "versions": {
                "python": platform.python_version(),
                "torch": installed_version("torch"),
                "elastictrain": installed_version("elastictrain"),
            },
        }


def installed_version(package: str) -> str:
    """Give the version of an installed package without importing it; "unknown" where it is not installed."""
    from importlib import metadata  # here: it takes longer to import than the rest of this file

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def _require(condition: bool, option: str, expected: str, seen: object) -> None:
    if not condition:
        raise ConfigError(f"{option}: expected {expected}, seen {seen!r}; change {option}", field=option, seen=seen)
