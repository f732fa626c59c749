"""What a test leaves behind: processes, ports, descriptors, shared memory, network namespaces. Only looks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The mark is spelled out here, not imported: what catches a broken build must not depend on it.
TEST_ID_VARIABLE = "ELASTICTRAIN_TEST_ID"
_SHARED_MEMORY = Path("/dev/shm")
# What the C library makes before a semaphore gets its name: a process killed in these microseconds leaves it, 32 bytes,
# and nothing tells whose it was.
_UNNAMED_SEMAPHORE = re.compile(r"sem\.[A-Za-z0-9]{6}$")
_NETWORK_NAMESPACES = Path("/run/netns")
# Opened once by a library and kept for the life of the process.
_KEPT_OPEN = re.compile(r"/dev/(urandom|random|null|nvidia.*)$|.*/\.hypothesis/")


@dataclass(frozen=True)
class Holdings:
    """What this process holds at one moment."""

    children: frozenset[int]
    descriptors: dict[int, str]
    shared_memory: frozenset[str]
    namespaces: frozenset[str]


def take_holdings() -> Holdings:
    return Holdings(
        children=frozenset(_children()),
        descriptors=_descriptors(),
        shared_memory=frozenset(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.is_dir() else frozenset(),
        namespaces=frozenset(os.listdir(_NETWORK_NAMESPACES)) if _NETWORK_NAMESPACES.is_dir() else frozenset(),
    )


def find_leaks(before: Holdings, test_id: str) -> list[str]:
    """Name everything that is there now, was not there before, and belongs to this test."""
    now = take_holdings()
    marked = set(_marked(test_id))
    leaks = [f"child process {_story(pid)}" for pid in sorted(now.children - before.children)]
    leaks += [f"process without its parent {_story(pid)}" for pid in sorted(marked - now.children)]
    for number, target in sorted(now.descriptors.items()):
        if before.descriptors.get(number) != target and not _KEPT_OPEN.match(target):
            leaks.append(f"file descriptor {number} -> {target}{_port(target)}")
    ours = marked | {os.getpid()}
    leaks += [
        f"shared memory /dev/shm/{name}"
        for name in sorted(now.shared_memory - before.shared_memory)
        if not _UNNAMED_SEMAPHORE.match(name) and not _is_used_elsewhere(name, ours)
    ]
    leaks += [
        f"network namespace {name}"
        for name in sorted(now.namespaces - before.namespaces)
        if name.startswith(f"et{os.getpid()}n")  # other runs make theirs meanwhile
    ]
    return leaks


def _children() -> Iterator[int]:
    for task in Path("/proc/self/task").iterdir():
        try:
            yield from map(int, (task / "children").read_text().split())
        except OSError:
            continue  # the thread ended meanwhile


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of this very listing
    return found


def _marked(test_id: str) -> Iterator[int]:
    """Find the processes started during the test wherever they hang in the tree; the mark is inherited."""
    mark = f"{TEST_ID_VARIABLE}={test_id}\0".encode()
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    environment = file.read()
            except OSError:
                continue  # ended, or another user's
            if mark in environment + b"\0":
                yield int(name)


def _story(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return f"{pid} (just ended)"
    return f"{pid} [{state}] {command[:160] or 'ended, and nobody waited for it'}"


def _port(target: str) -> str:
    """Say at which port a socket listens, if it does."""
    inode = target.removeprefix("socket:[").removesuffix("]")
    for table in ("tcp", "tcp6") if inode.isdecimal() else ():
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] == inode and fields[3] == "0A":
                return f" listening at port {int(fields[1].rpartition(':')[2], 16)}"
    return ""


def _is_used_elsewhere(name: str, ours: set[int]) -> bool:
    """Tell whether a process outside this test maps or holds the entry; other programs share this machine."""
    path = f"{_SHARED_MEMORY}/{name}"
    if not os.path.exists(path):
        return True  # gone meanwhile
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):
        if pid in ours:
            continue
        try:
            if path in Path(f"/proc/{pid}/maps").read_text():
                return True
            if any(os.readlink(link) == path for link in Path(f"/proc/{pid}/fd").iterdir()):
                return True
        except OSError:
            continue
    return False
