"""How much a process counts beside others: a waiting spare must not take time or memory from those that train.

Two parts of Linux set how much processor time a process gets. Where sessions are scheduled as groups (autogroup, the
default of most systems outside of containers) only the group's nice value counts against other sessions, and every
worker is a session of its own; elsewhere that of the process counts. A group's value can always be taken back; that of
a process only with the right to do so, so it is left alone without that right.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

LOWEST_NICE: Final = 19
# When memory runs out the kernel ends the process with the highest score; a lower score may be taken back.
FIRST_TO_END: Final = 1000
_OOM_SCORE: Final = Path("/proc/self/oom_score_adj")


def can_take_back_nice() -> bool:
    """Whether a process of this user may lower its nice value again; tried on a thread of its own that then ends."""
    outcome: list[bool] = []

    def attempt() -> None:
        thread, nice = threading.get_native_id(), own_nice()
        try:
            os.setpriority(os.PRIO_PROCESS, thread, min(nice + 1, LOWEST_NICE))
            os.setpriority(os.PRIO_PROCESS, thread, nice)
            outcome.append(True)
        except OSError:
            outcome.append(False)

    thread = threading.Thread(target=attempt, name="elastictrain-nice")
    thread.start()
    thread.join()
    return outcome == [True]


def own_nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def own_oom_score() -> int:
    """This process's standing when memory runs out, 0 where the system does not tell."""
    try:
        return int(_OOM_SCORE.read_text())
    except (OSError, ValueError):
        return 0


def set_own_oom_score(score: int) -> None:
    """Where the system refuses, everything stays as it is."""
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text(str(score))


def step_back(*, lowers_nice: bool) -> None:
    """Let this process, a session of its own, come after all others in processor time, and be the first to end when
    memory runs out."""
    set_own_oom_score(FIRST_TO_END)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(LOWEST_NICE))
    if lowers_nice:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, LOWEST_NICE)


def step_forward(pid: int, nice: int) -> bool:
    """Give the session of `pid` its processor time back, all threads and children included.

    False: the kernel takes such changes ten times a second only; try again after RETRY_S.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, pid, nice)
    try:
        Path(f"/proc/{pid}/autogroup").write_text("0")
    except BlockingIOError:
        return False
    except OSError:
        return True  # this system has none, or the process is gone
    return True


RETRY_S: Final = 0.1
