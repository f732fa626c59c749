"""How much memory there is, read from files as the kernel writes them, and from this machine itself."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from elastictrain.agent.memory import Room, find_shortage, list_rooms, private_bytes, resident_bytes

MIB = 1 << 20
MEMINFO = "MemTotal:       {total} kB\nMemFree:  1 kB\nMemAvailable:   {free} kB\nHugePages_Total:       0\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine(folder: Path, groups: str) -> dict[str, Path]:
    """A machine of 8 GiB with 4 GiB free, in which this process is in `groups`."""
    write(folder / "proc" / "meminfo", MEMINFO.format(total=8 << 20, free=4 << 20))
    write(folder / "proc" / "self" / "cgroup", groups)
    (folder / "cgroup").mkdir()
    return {"proc": folder / "proc", "cgroups": folder / "cgroup"}


def test_machine_is_the_only_room_when_no_group_has_a_limit(tmp_path: Path) -> None:
    paths = machine(tmp_path, "0::/a\n")
    write(tmp_path / "cgroup" / "a" / "memory.max", "max\n")
    write(tmp_path / "cgroup" / "a" / "memory.current", str(3 * MIB))
    assert list_rooms(**paths) == [Room(4 << 30, 8 << 30, "on this machine")]


def test_limit_of_an_outer_group_counts_when_the_own_group_has_none(tmp_path: Path) -> None:
    paths = machine(tmp_path, "1:cpu:/x\n0::/outer/inner\n")
    outer = tmp_path / "cgroup" / "outer"
    write(outer / "inner" / "memory.max", "max\n")
    write(outer / "inner" / "memory.current", "1")
    write(outer / "memory.max", str(1000 * MIB))
    write(outer / "memory.current", str(900 * MIB))
    write(outer / "memory.stat", f"anon 1\ninactive_file {50 * MIB}\nactive_file 7\n")
    rooms = list_rooms(**paths)
    assert rooms[1:] == [Room(150 * MIB, 1000 * MIB, f"in the control group {outer}")]
    assert find_shortage(49 * MIB, rooms) is None
    shortage = find_shortage(51 * MIB, rooms) or ""
    assert "51 MiB" in shortage
    assert "150 MiB" in shortage
    assert str(outer) in shortage


def test_limit_counts_when_groups_are_of_the_first_version_and_the_root_is_the_containers_own(tmp_path: Path) -> None:
    paths = machine(tmp_path, "4:memory:/docker/1234\n0::/\n")
    root = tmp_path / "cgroup" / "memory"
    write(root / "memory.limit_in_bytes", str(100 * MIB))
    write(root / "memory.usage_in_bytes", str(99 * MIB))
    write(root / "memory.stat", f"inactive_file 1\ntotal_inactive_file {9 * MIB}\n")
    assert list_rooms(**paths)[1:] == [Room(10 * MIB, 100 * MIB, f"in the control group {root}")]


def test_nothing_is_short_when_nothing_is_known(tmp_path: Path) -> None:
    assert list_rooms(proc=tmp_path, cgroups=tmp_path) == []
    assert find_shortage(MIB, []) is None


def test_this_machine_is_a_room_when_it_is_asked() -> None:
    rooms = list_rooms()
    assert rooms[0].where == "on this machine"
    assert 0 < rooms[0].free_bytes < rooms[0].total_bytes


def test_memory_of_a_process_grows_when_it_takes_some() -> None:
    resident, private = resident_bytes(os.getpid()), private_bytes(os.getpid())
    assert resident > 0
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        for start in range(0, 64 * MIB, mmap.PAGESIZE):
            taken[start] = 1
        assert resident_bytes(os.getpid()) >= resident + 48 * MIB
        assert private_bytes(os.getpid()) >= private + 48 * MIB


def test_memory_is_zero_when_the_process_is_gone() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert (resident_bytes(pid), private_bytes(pid)) == (0, 0)
