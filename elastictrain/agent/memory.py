"""How much memory a process has and how much there is, from /proc and the control groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")
RESERVED_PART: Final = 0.1
"""Of all memory, this part is left free."""


@dataclass(frozen=True, slots=True)
class Room:
    """What is left of the memory of one scope: the machine, or a control group with a limit."""

    free_bytes: int
    total_bytes: int
    where: str


def find_shortage(need_bytes: int, rooms: list[Room]) -> str | None:
    """Why a process of `need_bytes` more should not be started; None when there is room for it everywhere."""
    for room in rooms:
        spare_bytes = room.free_bytes - int(room.total_bytes * RESERVED_PART)
        if spare_bytes < need_bytes:
            return (
                f"one needs up to {need_bytes >> 20} MiB, and of the {room.free_bytes >> 20} MiB free {room.where} a "
                f"tenth of all {room.total_bytes >> 20} MiB stays free"
            )
    return None


def list_rooms(*, proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Room]:
    """The machine and every control group of this process that has a limit. Reads some small files."""
    rooms = []
    machine = _fields(proc / "meminfo")
    if "MemAvailable" in machine and "MemTotal" in machine:
        rooms.append(Room(machine["MemAvailable"] << 10, machine["MemTotal"] << 10, "on this machine"))
    total_bytes = rooms[0].total_bytes if rooms else 1 << 62
    for folder, names in _groups(proc, cgroups):
        limit, used = (_number(folder / name) for name in names)
        if limit is None or used is None or limit >= total_bytes:
            continue
        statistics = _fields(folder / "memory.stat")
        # Pages of files that nobody has used lately are given up before anything is ended.
        idle = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
        rooms.append(Room(max(0, limit - used + idle), limit, f"in the control group {folder}"))
    return rooms


def resident_bytes(pid: int) -> int:
    """Memory of a process that is not of files, pages shared with other processes included; 0 where unknown."""
    status = _fields(PROC / str(pid) / "status")
    return (status.get("RssAnon", 0) + status.get("RssShmem", 0)) << 10


def private_bytes(pid: int) -> int:
    """What would be free if the process were not there; 0 where unknown. Takes milliseconds."""
    rollup = _fields(PROC / str(pid) / "smaps_rollup")
    return sum(value for name, value in rollup.items() if name.startswith("Private_")) << 10


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """The memory groups of this process from its own to the root, each with its files of limit and use."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            root, names = cgroups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        if not folder.is_dir():
            folder = root  # seen from inside a container, its own group is the root
        while folder != root.parent:
            yield folder, names
            folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # no such file, or "max"


def _fields(path: Path) -> dict[str, int]:
    """Lines of a name and a whole number; others are left out."""
    found = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    for line in lines:
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found
