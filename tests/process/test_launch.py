"""`elastictrain.launch(fn)`: the same run as on the command line, started from Python."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support_eval import is_close

import elastictrain
from elastictrain.errors import ConfigError

PROGRAM = Path(__file__).with_name("support_launch_program.py")


def launch(folder: Path, fail: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), fail],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def weights(folder: Path) -> list[object]:
    return [ast.literal_eval(path.read_text()) for path in sorted(folder.glob("rank-*"))]


def test_launched_function_survives_when_one_of_its_processes_is_killed(tmp_path: Path) -> None:
    """The function gets its rank first, as torch.multiprocessing.spawn gives it; the outcome is the undisturbed one."""
    undisturbed, disturbed = launch(tmp_path / "a", ""), launch(tmp_path / "b", "kill")
    for done in (undisturbed, disturbed):
        assert done.returncode == 0, done.stderr
        assert "launch returned" in done.stdout
    assert (tmp_path / "b" / "died").exists()
    (first, second), found = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert first == second
    assert found
    assert all(is_close(one, first) for one in found)


def test_launch_raises_with_the_traceback_shown_when_the_function_fails_again_and_again(tmp_path: Path) -> None:
    done = launch(tmp_path / "a", "raise")
    assert done.returncode == 7, done.stderr
    assert "launch says: the run in" in done.stdout
    assert "LookupError: as asked" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("[elastictrain] first failure: rank")


def test_launch_says_what_to_do_when_the_function_was_typed_into_an_interpreter(tmp_path: Path) -> None:
    text = f"import elastictrain\ndef work(): pass\nelastictrain.launch(work, run_dir={str(tmp_path / 'run')!r})\n"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError: launch(fn): work was typed into an interpreter" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fn", "options", "match"),
    [
        (42, {}, "takes a function"),
        (lambda: None, {}, "function of a module"),
        (print, {"nproc": 2}, "no option 'nproc'"),
        (print, {"nproc_per_node": 0}, "nproc"),
        (print, {"max_restarts": -1}, "restarts"),
    ],
)
def test_launch_refuses_wrong_use_when_nothing_is_started_yet(
    tmp_path: Path, fn: object, options: dict[str, object], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        elastictrain.launch(fn, run_dir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
