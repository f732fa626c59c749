"""What a killed process can leave in /dev/shm.

torch makes a file there for a tensor that it sends, and removes it a moment later: SIGKILL between the two leaves it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from typing import Final

FOLDER: Final = "/dev/shm"


def remove_files_of(dead: Collection[int]) -> None:
    """Remove torch's files of these processes: only pids that the caller has just reaped, since pids are used again."""
    if not dead:
        return
    prefixes = tuple(f"torch_{pid}_" for pid in dead)
    with contextlib.suppress(OSError):
        for name in os.listdir(FOLDER):
            if name.startswith(prefixes):
                with contextlib.suppress(OSError):
                    os.unlink(f"{FOLDER}/{name}")
