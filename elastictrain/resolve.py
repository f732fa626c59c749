"""From what the user gave to a RunConfig: command line before variables before run.json before defaults.

The only place that reads the environment for settings.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastictrain.clock import Clock, SystemClock
from elastictrain.config import (
    KNOWN_VARIABLES,
    LOG_LEVEL_VARIABLE,
    Checkpoints,
    MetricsEndpoint,
    Output,
    Program,
    RunConfig,
    Setting,
    Text,
    World,
)
from elastictrain.devices import count_workers
from elastictrain.errors import ConfigError
from elastictrain.log import LEVELS
from elastictrain.meeting_options import TORCHRUN_CONF_KEYS, MeetingOptions, check_meeting_options, is_shared_backend
from elastictrain.notation import (
    Given,
    closest,
    read_checkpoint_every,
    read_choice,
    read_count,
    read_filters,
    read_flag,
    read_nodes,
    read_pairs,
    read_ranks,
    read_seconds,
    read_signals,
    read_streams,
)

RUNS_FOLDER = "runs"
START_METHODS = ("spawn", "fork", "forkserver")
NUMA_MODES = ("node", "socket", "exclusive", "core-complex")


@dataclass(frozen=True, slots=True)
class Option:
    """`default` is text as on the command line (False: a flag); `variable`: PET_<NAME> is read, as torchrun does;
    `resumable`: a resume may change it."""

    default: Text = None
    variable: bool = True
    resumable: bool = True


_FIXED = Option(resumable=False)
OPTIONS: Mapping[str, Option] = {
    "nnodes": Option("1:1"),
    "nproc_per_node": Option("1"),
    "rdzv_backend": Option("embedded", resumable=False),
    "rdzv_endpoint": _FIXED,
    "rdzv_id": _FIXED,
    "rdzv_conf": Option(""),
    "standalone": Option(False, resumable=False),
    "max_restarts": Option(),
    "monitor_interval": _FIXED,
    "start_method": Option("forkserver", resumable=False),
    "event_log_handler": _FIXED,
    "role": Option("default"),
    "module": Option(False, resumable=False),
    "no_python": Option(False, resumable=False),
    "run_path": Option(False, resumable=False),
    "log_dir": Option(),
    "redirects": Option("0"),
    "tee": Option("0"),
    "local_ranks_filter": Option(""),
    "duplicate_stdout_filters": Option(""),
    "duplicate_stderr_filters": Option(""),
    "node_rank": _FIXED,
    "master_addr": _FIXED,
    "master_port": _FIXED,
    "local_addr": Option(),
    "logs_specs": Option(variable=False, resumable=False),
    "numa_binding": Option(variable=False, resumable=False),
    "signals_to_handle": Option("SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    "shutdown_timeout": Option(),
    "virtual_local_rank": Option(False),
    "run_dir": Option(variable=False, resumable=False),
    "spares": Option("auto", variable=False),
    "checkpoint_every": Option("auto", variable=False),
    "keep": Option("3", variable=False),
    "min_world_size": Option("1", variable=False),
    "grace_period_s": Option("30", variable=False),
    "hang_timeout": Option("auto", variable=False),
    "metrics_host": Option("127.0.0.1", variable=False),
    "metrics_port": Option(variable=False),
}

# Keys of --rdzv-conf that are times, in seconds.
_TIMES = {"join_timeout": "600", "last_call_timeout": "30", "ttl": "10", "outage_timeout": "60"}
_MEETING = "the workers of one node meet without an address, on a port chosen anew for each round"
# Options of torchrun that do nothing here, by the reason that the warning gives.
_WITHOUT_EFFECT = {
    "monitor_interval": "the agent is told of every event at once and polls nothing",
    "event_log_handler": "events are written to the ledger of the run directory",
    "logs_specs": "the workers' output goes to the logs of the run directory",
    "local_addr": _MEETING,
    "duplicate_stdout_filters": "this version writes no filtered copies of the output",
    "duplicate_stderr_filters": "this version writes no filtered copies of the output",
    "rdzv_endpoint": _MEETING,
    "node_rank": _MEETING,
    "master_addr": _MEETING,
    "master_port": _MEETING,
    "numa_binding": "this version leaves the placement of workers to the system",
}


def resolve_run(namespace: argparse.Namespace, environ: Mapping[str, str], *, clock: Clock | None = None) -> RunConfig:
    """Resolve the settings of a new run.

    `namespace` holds only what was given: options of OPTIONS as text (flags True), `script`, `script_args`, `argv`.
    Blocks on an import of torch where workers are counted by its devices. Raises ConfigError.
    """
    check_environ(environ)
    given = vars(namespace)
    settings = _layer(given, environ, saved={})
    _check_rendezvous(settings)
    run_id = _text(settings, "rdzv_id")
    if run_id in {"", "none"}:  # "none" is torchrun's default
        run_id = generate_run_id(clock or SystemClock())
    folder = _text(settings, "run_dir") or f"{RUNS_FOLDER}/{run_id}"
    if "://" in folder:
        raise ConfigError(
            f"--run-dir: expected a folder, seen {folder!r}; this version keeps runs in a local or mounted folder",
            field="--run-dir",
            seen=folder,
        )
    cwd = Path.cwd()
    return _build(
        settings,
        environ,
        run_id=run_id,
        run_dir=Path(os.path.abspath(Path(folder).expanduser())),
        cwd=cwd,
        argv=tuple(given.get("argv", ())),
        program=Program(
            script=given["script"],
            args=tuple(given.get("script_args", ())),
            module=_flag(settings, "module"),
            no_python=_flag(settings, "no_python"),
            run_path=_flag(settings, "run_path"),
            interpreter=environ.get("PYTHON_EXEC") or sys.executable,
        ),
    )


def resolve_resume(
    spec: Mapping[str, Any], run_dir: Path, namespace: argparse.Namespace, environ: Mapping[str, str]
) -> RunConfig:
    """Resolve the settings of a run that continues: what is given now goes before what `spec` (run.json) holds.

    Blocks as `resolve_run` does. Raises ConfigError, also for a `spec` whose values are not of the expected kind.
    """
    check_environ(environ)
    try:
        saved, origins, program = dict(spec["options"]), dict(spec["origins"]), dict(spec["program"])
        run_id, cwd, argv = str(spec["run_id"]), Path(spec["cwd"]), tuple(map(str, spec["argv"]))
        script, args = str(program.pop("script")), tuple(map(str, program.pop("args")))
        flags = {name: bool(program[name]) for name in ("module", "no_python", "run_path")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{run_dir / 'run.json'}: expected the specification of a run, seen a damaged one ({error!r}); "
            "restore the file, or start a new run"
        ) from None
    known = {name: Setting(text, f"run.json ({origins.get(name)})") for name, text in saved.items() if name in OPTIONS}
    settings = _layer(vars(namespace), environ, saved=known)
    _check_rendezvous(settings)
    interpreter = environ.get("PYTHON_EXEC") or sys.executable
    what = Program(script=script, args=args, interpreter=interpreter, **flags)
    return _build(settings, environ, run_id=run_id, run_dir=run_dir.absolute(), cwd=cwd, argv=argv, program=what)


def check_environ(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable that starts like ours and is none: it was meant to have an effect."""
    for name in sorted(environ):
        if name.startswith("ELASTICTRAIN_") and name not in KNOWN_VARIABLES:
            meant = closest(name, KNOWN_VARIABLES)
            hint = f"did you mean {meant}? else unset it" if meant else "unset it; settings are options of the command"
            raise ConfigError(f"{name}: expected no such variable, seen it set; {hint}", field=name, seen=environ[name])


def read_log_level(environ: Mapping[str, str]) -> str:
    """Give the level of our log lines, one of log.LEVELS. Raises ConfigError."""
    text = environ.get(LOG_LEVEL_VARIABLE, "info").lower()
    return read_choice(Given(LOG_LEVEL_VARIABLE, text), LEVELS)


def generate_run_id(clock: Clock) -> str:
    """Give a short name that sorts by start: date, time of day (UTC) and four random characters."""
    import time  # only its formatting: the time itself comes from the clock

    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(clock.wall_time_s()))}-{os.urandom(2).hex()}"


def _layer(given: Mapping[str, Any], environ: Mapping[str, str], *, saved: Mapping[str, Setting]) -> dict[str, Setting]:
    """Choose each option's setting: given, else its variable, else saved, else the default."""
    settings: dict[str, Setting] = {}
    for name, option in OPTIONS.items():
        variable = f"PET_{name.upper()}"
        may_change = option.resumable or not saved
        if may_change and given.get(name) is not None:
            value = given[name]
            settings[name] = Setting(value if isinstance(value, bool) else str(value), "command line")
        elif may_change and option.variable and variable in environ:
            text = environ[variable]
            value = read_flag(Given(_spelled(name), text, variable)) if option.default is False else text
            settings[name] = Setting(value, variable)
        else:
            settings[name] = saved.get(name) or Setting(option.default, "default")
    return settings


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _given(settings: Mapping[str, Setting], name: str) -> Given:
    setting = settings[name]
    return Given(_spelled(name), "" if setting.text is None else str(setting.text), setting.origin)


def _text(settings: Mapping[str, Setting], name: str) -> str:
    return _given(settings, name).text


def _flag(settings: Mapping[str, Setting], name: str) -> bool:
    return settings[name].text is True


def _check_rendezvous(settings: Mapping[str, Setting]) -> None:
    names = ("nnodes", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf")
    check_meeting_options(
        MeetingOptions(*(_given(settings, name) for name in names)), is_standalone=_flag(settings, "standalone")
    )


def _build(
    settings: Mapping[str, Setting],
    environ: Mapping[str, str],
    *,
    run_id: str,
    run_dir: Path,
    cwd: Path,
    argv: tuple[str, ...],
    program: Program,
) -> RunConfig:
    """Convert every setting and put the tree together; the tree checks the rest."""
    num_workers = count_workers(_given(settings, "nproc_per_node"))
    return RunConfig(
        run_id=run_id,
        run_dir=run_dir,
        program=program,
        cwd=cwd,
        argv=argv,
        world=_world(settings, num_workers),
        checkpoints=Checkpoints(
            every=read_checkpoint_every(_given(settings, "checkpoint_every")),
            keep=read_count(_given(settings, "keep"), minimum=1, example=3),
        ),
        metrics=MetricsEndpoint(
            host=_text(settings, "metrics_host"),
            port=_optional_count(settings, "metrics_port", maximum=65535, example=9400) or 0,
        ),
        output=_output(settings, environ, cwd),
        max_restarts=_optional_count(settings, "max_restarts", example=3),
        grace_period_s=read_seconds(_given(settings, "grace_period_s"), example="30"),
        hang_timeout_s=None
        if _text(settings, "hang_timeout") == "auto"
        else read_seconds(_given(settings, "hang_timeout"), example="60"),
        shutdown_timeout_s=_shutdown_timeout_s(_given(settings, "shutdown_timeout"), environ),
        signals_to_handle=read_signals(_given(settings, "signals_to_handle")),
        role=_text(settings, "role"),
        start_method=read_choice(_given(settings, "start_method"), START_METHODS),
        virtual_local_rank=_flag(settings, "virtual_local_rank"),
        omp_num_threads=1 if num_workers > 1 and "OMP_NUM_THREADS" not in environ else None,
        settings=settings,
        warnings=_warnings(settings),
    )


def _world(settings: Mapping[str, Setting], num_workers: int) -> World:
    min_nodes, max_nodes = read_nodes(_given(settings, "nnodes"))
    return World(
        nproc_per_node=num_workers,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        min_world_size=read_count(_given(settings, "min_world_size"), minimum=1, example=1),
        spares=_optional_count(settings, "spares", none="auto", example=1),
        local_addr=_text(settings, "local_addr") or None,
        rdzv_backend=_text(settings, "rdzv_backend"),
        rdzv_endpoint=_text(settings, "rdzv_endpoint"),
        rdzv_conf=read_pairs(_given(settings, "rdzv_conf")),
        join_timeout_s=_conf_seconds(_given(settings, "rdzv_conf"), "join_timeout"),
        last_call_timeout_s=_conf_seconds(_given(settings, "rdzv_conf"), "last_call_timeout"),
        ttl_s=_conf_seconds(_given(settings, "rdzv_conf"), "ttl"),
        outage_timeout_s=_conf_seconds(_given(settings, "rdzv_conf"), "outage_timeout"),
    )


def _output(settings: Mapping[str, Setting], environ: Mapping[str, str], cwd: Path) -> Output:
    log_dir = _text(settings, "log_dir")
    return Output(
        log_dir=cwd / log_dir if log_dir else None,
        redirects=read_streams(_given(settings, "redirects")),
        tee=read_streams(_given(settings, "tee")),
        local_ranks_filter=read_ranks(_given(settings, "local_ranks_filter")),
        duplicate_stdout_filters=read_filters(_given(settings, "duplicate_stdout_filters")),
        duplicate_stderr_filters=read_filters(_given(settings, "duplicate_stderr_filters")),
        line_prefix_template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
    )


def _optional_count(
    settings: Mapping[str, Setting], name: str, *, example: int, maximum: int | None = None, none: Text = None
) -> int | None:
    """Read a whole number from 0 up, or None where the option is `none`: by default, where it was not given."""
    if settings[name].text == none:
        return None
    return read_count(_given(settings, name), minimum=0, maximum=maximum, example=example)


def _conf_seconds(given: Given, name: str) -> float:
    text = read_pairs(given).get(name, _TIMES[name])
    return read_seconds(Given(f"--rdzv-conf {name}", text, given.origin), example=_TIMES[name])


def _shutdown_timeout_s(given: Given, environ: Mapping[str, str]) -> float:
    """Read the option, else torchrun's own variable, which has no PET_ prefix, else 30 seconds."""
    if not given.text:
        variable = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
        given = Given(given.option, environ.get(variable, "30"), variable)
    return float(read_count(given, minimum=0, example=30))


def _warnings(settings: Mapping[str, Setting]) -> tuple[str, ...]:
    """Check options that do nothing here and give one line for each reason, naming them; only those given count."""
    _optional_count(settings, "node_rank", example=0)
    _optional_count(settings, "master_port", maximum=65535, example=29500)
    if _text(settings, "monitor_interval"):
        read_seconds(_given(settings, "monitor_interval"), example="0.1")
    read_choice(_given(settings, "start_method"), START_METHODS)
    if _text(settings, "numa_binding"):
        read_choice(_given(settings, "numa_binding"), NUMA_MODES)
    names: dict[str, list[str]] = {}
    is_shared = is_shared_backend(_text(settings, "rdzv_backend"), _given(settings, "nnodes"))
    for name, reason in _WITHOUT_EFFECT.items():
        if is_shared and name in {"rdzv_endpoint", "local_addr"}:
            continue
        if settings[name].text not in {OPTIONS[name].default, None, ""}:
            names.setdefault(reason, []).append(_spelled(name))
    if _flag(settings, "virtual_local_rank") and _text(settings, "spares") not in {"auto", "0"}:
        names["with --virtual-local-rank a process must know its GPU before it starts"] = ["--spares"]
    conf = read_pairs(_given(settings, "rdzv_conf")).keys()
    replaced = sorted(conf & TORCHRUN_CONF_KEYS)
    if replaced and is_shared:
        names["nodes renew a lease (ttl=SECONDS) and the end of a run is told at once"] = [
            f"--rdzv-conf {', '.join(replaced)}"
        ]
    unused = sorted(conf - {"join_timeout"})
    if unused and not is_shared:
        names["the embedded rendezvous knows join_timeout only"] = [f"--rdzv-conf {', '.join(unused)}"]
    return tuple(f"{', '.join(given)}: no effect here: {reason}" for reason, given in names.items())
