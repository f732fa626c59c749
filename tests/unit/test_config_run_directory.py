"""A run directory is claimed once, written once, and read back or refused in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastictrain.cli.options import build_parser
from elastictrain.config import RunConfig
from elastictrain.errors import ConfigError
from elastictrain.resolve import resolve_run
from elastictrain.run_directory import claim_run_dir, read_spec

HOLDER = """
import sys
from elastictrain.cli.options import build_parser
from elastictrain.resolve import resolve_run
from elastictrain.run_directory import claim_run_dir
config = resolve_run(build_parser().parse_args(["run", "--run-dir", sys.argv[1], "t.py"]), {})
claim = claim_run_dir(config, resume=False)
print("claimed", flush=True)
sys.stdin.read()
"""


def config_for(run_dir: Path, *words: str) -> RunConfig:
    return resolve_run(build_parser().parse_args(["run", "--run-dir", str(run_dir), *words, "t.py"]), {})


def refusal(run_dir: Path, *, resume: bool = False) -> str:
    """Claim, expect a ConfigError of one line, and expect that nothing was written."""
    before = listing(run_dir)
    with pytest.raises(ConfigError) as caught:
        claim_run_dir(config_for(run_dir), resume=resume)
    assert listing(run_dir) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def listing(run_dir: Path) -> list[str]:
    return sorted(map(str, run_dir.parent.rglob("*")))


def test_spec_is_written_once_when_claimed(tmp_path: Path) -> None:
    config = config_for(tmp_path / "a" / "b", "--rdzv-id", "mine")
    with claim_run_dir(config, resume=False):
        assert read_spec(config.run_dir) == config.to_spec()
        assert sorted(path.name for path in config.run_dir.iterdir()) == ["agent.lock", "run.json"]
    assert "run mine of t.py" in refusal(config.run_dir)
    assert f"elastictrain resume {config.run_dir}" in refusal(config.run_dir)
    assert read_spec(config.run_dir)["run_id"] == "mine"


def test_spec_is_untouched_when_resumed(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    claim_run_dir(config, resume=False).close()
    before = (config.run_dir / "run.json").read_bytes()
    with claim_run_dir(config_for(tmp_path / "run", "--keep", "9"), resume=True):
        assert (config.run_dir / "run.json").read_bytes() == before


def test_second_agent_is_refused_when_the_first_lives(tmp_path: Path) -> None:
    """Two agents on one run directory would write two histories; the lock ends with its process, however that ends."""
    run_dir = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "claimed\n"
        assert f"in use by process {holder.pid}" in refusal(run_dir, resume=True)
        holder.send_signal(signal.SIGKILL)
    claim_run_dir(config_for(run_dir), resume=True).close()


def test_claim_works_when_one_before_died_early(tmp_path: Path) -> None:
    """An agent killed before run.json was there leaves a lock file and a temporary one: no run is lost with them."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "agent.lock").write_text("12345\n")
    (run_dir / ".run.json.12345").write_text('{"half"')
    with claim_run_dir(config_for(run_dir), resume=False):
        assert read_spec(run_dir)["program"]["script"] == "t.py"


def test_only_one_wins_when_many_start_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    agents = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    outcomes = [agent.communicate("")[0] for agent in agents]
    assert outcomes.count("claimed\n") == 1


def test_folder_is_refused_when_it_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "seen a file" in refusal(tmp_path / "file")
    assert "Not a directory" in refusal(tmp_path / "file" / "below")


def test_folder_is_refused_when_it_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match=r"--run-dir: expected a folder that can be written, seen /proc/run"):
        claim_run_dir(config_for(Path("/proc/run")), resume=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_is_refused_when_permissions_forbid(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in refusal(tmp_path / "run")
    tmp_path.chmod(0o700)


def test_folder_is_refused_when_run_json_is_lost(tmp_path: Path) -> None:
    (tmp_path / "run" / "ledger").mkdir(parents=True)
    assert "ledger of a run whose run.json is gone" in refusal(tmp_path / "run")


def test_folder_is_accepted_when_it_holds_other_things(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with claim_run_dir(config_for(tmp_path), resume=False):
        assert (tmp_path / "notes.txt").read_text() == "mine"


def test_resume_is_refused_when_there_is_no_run(tmp_path: Path) -> None:
    claim_run_dir(config_for(tmp_path / "runs" / "first"), resume=False).close()
    (tmp_path / "file").write_text("x")
    assert "seen nothing there" in refusal(tmp_path / "nowhere", resume=True)
    assert "seen a file" in refusal(tmp_path / "file", resume=True)
    assert f"did you mean {tmp_path}/runs/first?" in refusal(tmp_path / "runs", resume=True)
    assert f"did you mean {tmp_path}/runs/first?" in refusal(tmp_path / "runs" / "frist", resume=True)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"run_id": 3}', b"\x80\x04pickle", b"[" * 100_000, b'{"run_id": "r"}']
)
def test_spec_is_refused_when_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_spec(tmp_path)
    assert str(tmp_path / "run.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_spec_is_refused_when_of_another_version(tmp_path: Path) -> None:
    spec = {**config_for(tmp_path).to_spec(), "version": 99}
    (tmp_path / "run.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match=r"expected format version 1, seen 99; use the elastictrain that wrote it"):
        read_spec(tmp_path)
