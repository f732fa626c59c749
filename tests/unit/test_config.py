"""From options, variables and run.json to a checked configuration."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest

from elastictrain.agent.environment import worker_environment
from elastictrain.cli.options import build_parser
from elastictrain.clock import ManualClock
from elastictrain.config import CHANNEL_FD_VARIABLE, RunConfig
from elastictrain.errors import ConfigError
from elastictrain.notation import CheckpointEvery, Given, read_filters
from elastictrain.resolve import check_environ, read_log_level, resolve_resume, resolve_run


def resolve(*words: str, environ: dict[str, str] | None = None) -> RunConfig:
    argv = ["run", *words] if words and words[-1] == "t.py" else ["run", *words, "t.py"]
    return resolve_run(build_parser().parse_args(argv), environ or {})


def resume(spec: dict[str, object], *words: str, environ: dict[str, str] | None = None) -> RunConfig:
    return resolve_resume(spec, Path("d"), build_parser().parse_args(["resume", "d", *words]), environ or {})


def test_defaults_hold_when_nothing_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve_run(build_parser().parse_args(["run", "t.py", "-x"]), {}, clock=ManualClock())
    assert config.run_id.startswith("20231114-221320-")
    assert config.run_dir == tmp_path / "runs" / config.run_id
    assert config.program.args == ("-x",)
    assert config.program.interpreter == sys.executable
    assert (config.world.nproc_per_node, config.world.min_world_size, config.world.spares) == (1, 1, None)
    assert config.max_restarts is None
    assert config.checkpoints.every == CheckpointEvery("auto")
    assert (config.checkpoints.keep, config.grace_period_s, config.shutdown_timeout_s) == (3, 30.0, 30.0)
    assert (config.metrics.host, config.metrics.port) == ("127.0.0.1", 0)
    assert config.warnings == ()


def test_two_runs_have_two_ids_when_neither_is_named() -> None:
    assert len({resolve().run_id for _ in range(20)}) > 15
    assert resolve("--rdzv-id", "mine").run_id == "mine"
    assert resolve("--rdzv-id", "none").run_id != "none"


def test_command_line_goes_first_when_a_variable_is_set() -> None:
    environ = {"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "5", "PET_NO_PYTHON": "1", "PET_STANDALONE": "0"}
    config = resolve("--nproc-per-node", "2", environ=environ)
    assert config.world.nproc_per_node == 2
    assert config.max_restarts == 5
    assert config.program.no_python
    assert config.settings["max_restarts"].origin == "PET_MAX_RESTARTS"
    assert config.settings["nproc_per_node"].origin == "command line"
    assert config.settings["keep"].origin == "default"


def test_variables_are_read_when_torchrun_reads_them() -> None:
    """The same variables for the same options: torchrun's actions with a variable are known by their class."""
    from torch.distributed.argparse_util import check_env, env
    from torch.distributed.run import get_args_parser

    from elastictrain.resolve import OPTIONS

    theirs = {action.dest: isinstance(action, env | check_env) for action in get_args_parser()._actions}
    for name in theirs.keys() - {"help", "training_script", "training_script_args"}:
        assert OPTIONS[name].variable == theirs[name], name


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", CheckpointEvery("auto")),
        ("30s", CheckpointEvery("seconds", 30)),
        ("5m", CheckpointEvery("seconds", 300)),
        ("1.5h", CheckpointEvery("seconds", 5400)),
        ("500steps", CheckpointEvery("steps", 500)),
        ("1step", CheckpointEvery("steps", 1)),
    ],
)
def test_checkpoint_interval_is_read_when_well_written(text: str, expected: CheckpointEvery) -> None:
    assert resolve("--checkpoint-every", text).checkpoints.every == expected


def test_options_of_torchrun_are_kept_when_given() -> None:
    words = "-t 0:1,1:2 -r 3 --local-ranks-filter 1,0 --role trainer --virtual-local-rank --shutdown-timeout 7"
    config = resolve(*words.split(), "--signals-to-handle", "SIGTERM, SIGUSR1", "--rdzv-conf", "join_timeout=9")
    assert (config.output.tee, config.output.redirects) == ("0:1,1:2", "3")
    assert config.output.local_ranks_filter == (0, 1)
    assert (config.role, config.virtual_local_rank, config.shutdown_timeout_s) == ("trainer", True, 7.0)
    assert config.signals_to_handle == ("SIGTERM", "SIGUSR1")
    assert config.world.join_timeout_s == 9.0
    assert read_filters(Given("--duplicate-stdout-filters", "apple,a,,b")) == ("apple", "a,b")


def test_other_variables_of_torchrun_hold_when_set() -> None:
    environ = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "4", "PYTHON_EXEC": "/opt/python"}
    config = resolve(environ=environ)
    assert (config.shutdown_timeout_s, config.program.interpreter) == (4.0, "/opt/python")


@pytest.mark.parametrize(
    ("num_workers", "environ", "threads"), [(1, {}, None), (2, {}, 1), (2, {"OMP_NUM_THREADS": "4"}, None)]
)
def test_threads_are_one_when_several_workers_share_a_node(
    num_workers: int, environ: dict[str, str], threads: int | None
) -> None:
    assert resolve("--nproc-per-node", str(num_workers), environ=environ).omp_num_threads == threads


def test_workers_match_the_cpus_when_asked_for() -> None:
    assert resolve("--nproc-per-node", "cpu").world.nproc_per_node == len(os.sched_getaffinity(0))


def test_workers_match_the_machine_when_auto() -> None:
    import torch

    count = torch.accelerator.device_count() or len(os.sched_getaffinity(0))
    assert resolve("--nproc-per-node", "auto").world.nproc_per_node == count


def test_gpu_is_refused_when_there_is_none() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=r"--nproc-per-node.*'gpu'.*torch sees no gpu"):
        resolve("--nproc-per-node", "gpu")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--nproc-per-node 0", "--nproc-per-node: expected a whole number from 1 up, seen '0'"),
        ("--nproc-per-node -1", "seen '-1'"),
        ("--nproc-per-node abc", "seen 'abc'"),
        ("--nproc-per-node 1.5", "seen '1.5'"),
        ("--nnodes 3:2", "did you mean 2:3?"),
        ("--nnodes 0", "--nnodes"),
        ("--nnodes x", "--nnodes"),
        ("--nnodes 1:2:3", "--nnodes"),
        ("--nnodes 2", "by which several nodes meet"),
        ("--nnodes 1:4", "by which several nodes meet"),
        ("--standalone --nnodes 2", "as --standalone says"),
        ("--standalone --rdzv-endpoint host:1", "as --standalone says"),
        ("--standalone --rdzv-backend etcd3", "as --standalone says"),
        ("--rdzv-backend etcd3", "give --rdzv-id NAME"),
        ("--rdzv-backend etcd3 --rdzv-id run", "give e.g. --rdzv-endpoint"),
        ("--rdzv-backend etcd-v2", "give etcd3"),
        ("--rdzv-backend static --nnodes 2", "by which several nodes meet"),
        ("--rdzv-backend c10d --nnodes 2", "give --rdzv-id NAME"),
        ("--rdzv-backend c10d --nnodes 2 --rdzv-id run", "give e.g. --rdzv-endpoint node-0.example:29400"),
        ("--rdzv-backend c10d --rdzv-conf ttl=3,secret=x", "secret_file=FILE"),
        ("--rdzv-conf secret=x", "ELASTICTRAIN_RDZV_SECRET"),
        ("--rdzv-backend c10", "did you mean c10d?"),
        ("--max-restarts -1", "--max-restarts"),
        ("--max-restarts many", "--max-restarts"),
        ("--module --no-python", "--no-python"),
        ("--module --run-path", "--run-path"),
        ("--checkpoint-every 30", "did you mean 30s or 30steps?"),
        ("--checkpoint-every 0s", "--checkpoint-every"),
        ("--checkpoint-every 0steps", "--checkpoint-every"),
        ("--checkpoint-every never", "--checkpoint-every"),
        ("--keep 0", "--keep"),
        ("--spares -1", "--spares"),
        ("--min-world-size 3 --nproc-per-node 2", "--min-world-size: expected 1 to 2"),
        ("--grace-period-s -1", "--grace-period-s"),
        ("--grace-period-s nan", "--grace-period-s"),
        ("--metrics-port 65536", "--metrics-port"),
        ("--metrics-port http", "--metrics-port"),
        ("--redirects 4", "--redirects"),
        ("--tee 0:1,", "--tee"),
        ("--local-ranks-filter 0,x", "--local-ranks-filter"),
        ("--signals-to-handle SIGKILL", "SIGKILL is not one"),
        ("--signals-to-handle SIGTREM", "did you mean SIGTERM?"),
        ("--shutdown-timeout -1", "--shutdown-timeout"),
        ("--start-method thread", "--start-method"),
        ("--numa-binding near", "--numa-binding"),
        ("--node-rank x", "--node-rank"),
        ("--rdzv-conf join_timeout", "KEY=VALUE"),
        ("--rdzv-conf join_timeout=soon", "--rdzv-conf join_timeout"),
        ("--rdzv-id a/b", "--rdzv-id"),
        ("--run-dir s3://bucket/run", "--run-dir"),
    ],
)
def test_option_is_refused_in_one_line_when_wrong(words: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(*words.split())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.field


def test_variable_is_named_when_its_value_is_wrong() -> None:
    with pytest.raises(ConfigError, match=r"seen 'two' \(from PET_NPROC_PER_NODE\)"):
        resolve(environ={"PET_NPROC_PER_NODE": "two"})
    with pytest.raises(ConfigError, match="PET_STANDALONE"):
        resolve(environ={"PET_STANDALONE": "yes"})


def test_unknown_variable_is_refused_when_it_looks_like_ours() -> None:
    with pytest.raises(ConfigError, match=r"ELASTICTRAIN_LOGLEVEL.*did you mean ELASTICTRAIN_LOG_LEVEL"):
        check_environ({"ELASTICTRAIN_LOGLEVEL": "debug"})
    check_environ({CHANNEL_FD_VARIABLE: "3", "OTHER": "x"})
    with pytest.raises(ConfigError, match="ELASTICTRAIN_LOG_LEVEL"):
        read_log_level({"ELASTICTRAIN_LOG_LEVEL": "loud"})


def test_one_warning_for_each_reason_when_options_have_no_effect() -> None:
    words = (
        "--node-rank 0 --master-addr 10.0.0.1 --master-port 29501 --monitor-interval 1 --spares 1 --virtual-local-rank"
    )
    lines = resolve(*words.split(), "--rdzv-conf", "read_timeout=3,join_timeout=4").warnings
    assert len(lines) == 4
    assert any(line.startswith("--node-rank, --master-addr, --master-port: no effect here") for line in lines)
    assert any("--monitor-interval" in line for line in lines)
    assert any("read_timeout" in line and "join_timeout only" in line for line in lines)
    assert resolve("--start-method", "spawn").warnings == ()
    assert resolve("--start-method", "spawn").start_method == "spawn"
    assert len(resolve(environ={"PET_MONITOR_INTERVAL": "5"}).warnings) == 1


def test_c10d_is_of_one_node_or_several_as_nnodes_says() -> None:
    one = resolve("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    assert not one.world.is_shared
    assert len(one.warnings) == 1
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node-0", "--rdzv-id", "r", "--nnodes", "1:3"]
    several = resolve(*words, "--rdzv-conf", "ttl=4,is_host=true,close_timeout=9,keep_alive_interval=3")
    assert several.world.is_shared
    (line,) = several.warnings
    assert line.startswith("--rdzv-conf close_timeout, keep_alive_interval: no effect here")


def test_secret_is_not_repeated_when_it_stands_where_it_must_not() -> None:
    for words in ("secret=hunter2", "ttl=3, secret = hunter2", "secret=hunter2,ttl", "password=hunter2,x"):
        with pytest.raises(ConfigError) as caught:
            resolve("--rdzv-conf", words)
        assert "hunter2" not in f"{caught.value} {caught.value.seen}"


def test_secrets_stay_with_the_agent_when_a_worker_gets_its_environment() -> None:
    base = {"ELASTICTRAIN_ETCD_PASSWORD": "x", "ELASTICTRAIN_RDZV_SECRET": "y", "HOME": "/h"}
    check_environ(base)
    env = worker_environment(
        resolve(),
        base,
        worker_id="w",
        local_rank=0,
        master_addr="127.0.0.1",
        master_port=1,
        restart_count=0,
        uses_agent_store=True,
    )
    assert env["HOME"] == "/h"
    assert not {"ELASTICTRAIN_ETCD_PASSWORD", "ELASTICTRAIN_RDZV_SECRET"} & env.keys()


def test_config_is_frozen_when_built() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve().run_id = "other"  # type: ignore[misc]


def test_spec_gives_the_same_config_when_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--rdzv-id r --run-dir d --nproc-per-node 2 --checkpoint-every 5m --role x -r 3 --log-dir logs -m"
    first = resolve(*words.split())
    spec = json.loads(json.dumps(first.to_spec()))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    again = resume(spec)
    assert dataclasses.replace(again, run_dir=first.run_dir) == first
    assert again.run_dir == elsewhere / "d"  # a run directory may be moved
    assert again.settings["role"].origin == "run.json (command line)"


def test_spec_changes_where_allowed_when_resumed() -> None:
    spec = json.loads(json.dumps(resolve("--nproc-per-node", "2", "--keep", "5").to_spec()))
    assert resume(spec, "--nproc-per-node", "4").world.nproc_per_node == 4
    assert resume(spec, environ={"PET_NPROC_PER_NODE": "3"}).world.nproc_per_node == 3
    assert resume(spec, environ={"PET_RDZV_ID": "other"}).run_id == spec["run_id"]
    assert resume(spec, "--nproc-per-node", "4").checkpoints.keep == 5


def test_spec_holds_no_environment_when_written() -> None:
    secret = "not-for-the-disk"
    text = json.dumps(resolve(environ={"API_TOKEN": secret, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": secret}).to_spec())
    assert secret not in text
    assert json.loads(text)["versions"]["torch"] != "unknown"


@pytest.mark.parametrize("damage", [{"options": 3}, {"program": {}}, {"cwd": 7}, {"argv": None}, {"origins": "abc"}])
def test_spec_is_refused_when_damaged(damage: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        resume({**resolve().to_spec(), **damage})


def test_namespace_needs_no_parser_when_built_in_python() -> None:
    config = resolve_run(argparse.Namespace(script="fn", nproc_per_node=2, keep=4), {})
    assert (config.world.nproc_per_node, config.checkpoints.keep, config.argv) == (2, 4, ())
