"""`status` and `checkpoints`: what they say about live, finished, stopped and dead runs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledger_runs import RecordedRun, finished_run, make_run_dir

from elastictrain.cli.checkpoints import checkpoints_command
from elastictrain.cli.status import RunStatus, read_status, status_command
from elastictrain.clock import SystemClock
from elastictrain.errors import ConfigError
from elastictrain.ledger import ledger_path


def note_agent(run_dir: Path, pid: int, **more: object) -> None:
    folder = run_dir / "agents"
    folder.mkdir(exist_ok=True)
    value = {"pid": pid, "metrics_url": "http://127.0.0.1:9/metrics", "started": SystemClock().wall_time_s(), **more}
    (folder / "node0.json").write_text(json.dumps(value))


def printed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert status_command(run_dir, as_json=True) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A real process that stands for an agent."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    run = RecordedRun(tmp_path / "run")
    yield run
    run.writer.close()


def test_status_describes_a_finished_run_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = printed(finished_run(tmp_path), capsys)
    assert value.keys() == RunStatus.__dataclass_fields__.keys()
    assert (value["run_id"], value["state"], value["step"], value["epoch"]) == ("run-1", "finished", 9, 2)
    assert (value["epoch_samples"], value["epoch_length"], value["world_size"]) == (10, 10, 3)
    assert value["num_failures"] == 1
    assert value["failures"][0]["recovery_seconds"] == pytest.approx(0.3)
    assert value["failures"][0]["seconds_by_stage"]["agree"] == 0.09
    assert value["ledger_problems"] == []


def test_status_prints_aligned_lines_when_asked(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.train(2)
    run.writer.append("checkpoint", step=2, path="checkpoints/step-2", size_bytes=1 << 20, seconds=0.1, generation=1)
    run.writer.append("checkpoint_failed", step=4, error="No space left on device")
    run.fail_and_recover()
    failure = {"rank": 1, "worker_id": "w1", "step": 2, "error_type": "ValueError", "message": "boom", "traceback": ""}
    run.writer.append("failure", **failure)
    note_agent(run.run_dir, os.getpid())
    assert status_command(run.run_dir, as_json=False) == 0
    out = capsys.readouterr().out
    for line in (
        "state       running",
        f"agent       node0: pid {os.getpid()}, alive, metrics at http://127.0.0.1:9/metrics",
        "step        2",
        "epoch       0 (loop 0), 8 of 10 samples committed",
        "world size  2, generation 2",
        "rate        40.0 samples/s, 10.00 steps/s",
        "checkpoint  step 2, 1.0 MiB, checkpoints/step-2",
        "            newest attempt failed: step 4: No space left on device",
        "failures    1",
        "            generation 1 rank 1: signal: SIGKILL: "
        "recovered in 0.300 s (detect 0.010, agree 0.090, resume 0.200)",
        "last error  rank 1 at step 2: ValueError: boom",
    ):
        assert line in out.splitlines()


def test_status_is_dead_when_the_agent_was_killed_without_an_end_event(
    run: RecordedRun, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run.train(2)
    note_agent(run.run_dir, sleeper.pid)
    assert printed(run.run_dir, capsys)["state"] == "running"
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert printed(run.run_dir, capsys)["state"] == "dead"
    sleeper.wait()
    value = printed(run.run_dir, capsys)
    assert value["state"] == "dead"
    assert "elastictrain resume" in value["detail"]


def test_status_is_dead_when_the_pid_belongs_to_a_younger_process(
    run: RecordedRun, sleeper: subprocess.Popen[bytes]
) -> None:
    note_agent(run.run_dir, sleeper.pid, started=SystemClock().wall_time_s() - 3600)
    assert read_status(run.run_dir).state == "dead"


def test_status_is_unknown_when_the_agent_runs_on_another_machine(run: RecordedRun) -> None:
    note_agent(run.run_dir, 1, host="elsewhere")
    assert read_status(run.run_dir).state == "unknown"


def test_status_uses_the_ledger_when_the_agent_left_no_file(run: RecordedRun) -> None:
    run.writer.append("node_started", pid=os.getpid())
    assert read_status(run.run_dir).state == "running"


@pytest.mark.parametrize(
    ("exit_code", "state"), [(0, "stopped"), (75, "stopped"), (1, "failed"), (2, "failed"), (130, "stopped")]
)
def test_status_tells_stopped_from_failed_when_a_run_ended(run: RecordedRun, exit_code: int, state: str) -> None:
    run.train(1)
    run.writer.append("run_stopped", step=1, exit_code=exit_code, reason="because")
    status = read_status(run.run_dir)
    assert (status.state, status.detail) == (state, f"exit code {exit_code}: because")


def test_status_is_running_again_when_a_stopped_run_was_resumed(run: RecordedRun) -> None:
    run.train(2)
    run.writer.append("run_stopped", step=2, exit_code=75, reason="preempted")
    run.die_and_resume(at_step=1, epoch=0, position=4)
    note_agent(run.run_dir, os.getpid())
    status = read_status(run.run_dir)
    assert (status.state, status.step) == ("running", 1)


def test_status_goodput_counts_only_steps_that_stand_when_steps_were_lost(run: RecordedRun) -> None:
    """Eleven commits of 0.1 s, of which ten intervals; then death, 5 s of nothing, and five of them done again."""
    run.length = 1000
    run.train(11)
    run.die_and_resume(at_step=6, epoch=0, position=24)
    run.train(5)
    status = read_status(run.run_dir)
    # Stand: steps 2..6 and 8..11 (a first commit has no interval). Time: 1.1 s and 0.5 s of two agents.
    assert status.goodput_ratio == pytest.approx(0.9 / 1.6, rel=0.01)
    assert status.steps_per_second == pytest.approx(10.0)
    assert status.samples_per_second == pytest.approx(40.0)


def test_status_goes_on_and_says_so_when_the_ledger_is_damaged(run: RecordedRun) -> None:
    run.train(3)
    run.finish()
    path = ledger_path(run.run_dir, "node0")
    path.write_bytes(path.read_bytes().replace(b'"step":2,', b'"step":"2",'))
    status = read_status(run.run_dir)
    assert status.state == "finished"
    assert "altered" in status.ledger_problems[0]
    assert "malformed commit" in status.ledger_problems[1]


def test_status_reads_a_run_when_it_has_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_command(make_run_dir(tmp_path), as_json=False) == 0
    assert "state       unknown" in capsys.readouterr().out


def test_status_ignores_a_broken_agent_file_when_it_reads_one(run: RecordedRun) -> None:
    note_agent(run.run_dir, os.getpid())
    (run.run_dir / "agents" / "other.json").write_text("{")
    (run.run_dir / "agents" / "third.json").write_text("[1]")
    (run.run_dir / "agents" / "fourth.json").write_text('{"pid": "seven"}')
    assert read_status(run.run_dir).state == "running"


def test_status_and_checkpoints_refuse_a_folder_when_it_is_no_run(tmp_path: Path) -> None:
    for command in (lambda: status_command(tmp_path, as_json=True), lambda: checkpoints_command("list", tmp_path)):
        with pytest.raises(ConfigError, match="is no run directory") as raised:
            command()
        assert raised.value.exit_code == 2


def test_checkpoints_refuses_an_action_when_it_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use list or verify"):
        checkpoints_command("prune", make_run_dir(tmp_path))


needs_restore = pytest.mark.skipif(
    importlib.util.find_spec("elastictrain.checkpoint.restore") is None,
    reason="elastictrain.checkpoint.restore is not built yet",
)


@needs_restore
def test_checkpoints_list_and_verify_name_the_bad_one_when_a_byte_is_flipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from elastictrain.checkpoint.save import save_checkpoint  # type: ignore[import-not-found,unused-ignore]

    run_dir = make_run_dir(tmp_path)
    assert checkpoints_command("list", run_dir) == 0
    assert "no checkpoint yet" in capsys.readouterr().out
    facts: dict[str, Any] = {"generation": 1, "run_id": "run-1", "cursor": {}, "world_size": 1, "clock": SystemClock()}
    for step in (10, 20):
        save_checkpoint(run_dir / "checkpoints", {"numbers": list(range(100))}, step=step, **facts)
    assert checkpoints_command("list", run_dir) == 0
    assert checkpoints_command("verify", run_dir) == 0
    assert "2 of 2 checkpoints intact" in capsys.readouterr().out
    victim = next((run_dir / "checkpoints").glob("step-*20/tree.json"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(bytes(content))
    assert checkpoints_command("verify", run_dir) == 1
    out = capsys.readouterr().out
    assert "1 of 2 checkpoints intact" in out
    assert any("20" in line and "BAD: " in line and "tree.json" in line for line in out.splitlines())
