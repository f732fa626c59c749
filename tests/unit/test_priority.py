"""A process steps back and comes forward again, as a real process of its own session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from elastictrain.priority import (
    FIRST_TO_END,
    LOWEST_NICE,
    can_take_back_nice,
    own_nice,
    own_oom_score,
    step_forward,
)

BACKGROUND = """
import sys, threading
from elastictrain.priority import set_own_oom_score, step_back
step_back(lowers_nice=sys.argv[1] == "True")
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("back", flush=True)
set_own_oom_score(int(sys.stdin.readline()))
print("score", flush=True)
sys.stdin.readline()
"""


def nices(pid: int) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, int(name)) for name in os.listdir(f"/proc/{pid}/task")}


def autogroup(pid: int) -> str:
    path = Path(f"/proc/{pid}/autogroup")
    return path.read_text().split()[-1] if path.exists() else "none"


@pytest.fixture
def background() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", BACKGROUND, str(can_take_back_nice())]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "back\n"
        yield process
        process.communicate("\n")


def test_process_comes_after_the_others_when_it_has_stepped_back_and_before_when_forward(
    background: subprocess.Popen[str],
) -> None:
    """All its threads, and its session as a group; the system's score as well, which it sets itself."""
    pid, score = background.pid, Path(f"/proc/{background.pid}/oom_score_adj")
    assert nices(pid) == {LOWEST_NICE if can_take_back_nice() else own_nice()}
    assert autogroup(pid) in {str(LOWEST_NICE), "none"}
    assert int(score.read_text()) == FIRST_TO_END

    wait_until(lambda: step_forward(pid, own_nice()))
    assert nices(pid) == {own_nice()}
    assert autogroup(pid) in {"0", "none"}
    assert background.stdin is not None
    assert background.stdout is not None
    background.stdin.write(f"{own_oom_score()}\n")
    background.stdin.flush()
    assert background.stdout.readline() == "score\n"
    assert int(score.read_text()) == own_oom_score()


def test_nothing_happens_when_the_process_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    assert step_forward(int(done.stdout), own_nice())
