"""Machines with a network between them, as far as one machine can have them: network namespaces and virtual cables."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

_numbers = itertools.count(1)


class Machines:
    """`count` namespaces at a switch; machine n (from 1 up) has the address 10.77.0.n."""

    def __init__(self, count: int) -> None:
        self._name = f"el{os.getpid()}x{next(_numbers)}"
        self._count = count

    @staticmethod
    def address(number: int) -> str:
        return f"10.77.0.{number}"

    def wrapper(self, number: int) -> list[str]:
        """What to put before a command that is to run on a machine."""
        return ["ip", "netns", "exec", self._space(number)]

    def unplug(self, number: int) -> None:
        """Pull a machine's cable: packets vanish, nobody is told."""
        _ip("-n", self._space(0), "link", "set", f"p{number}", "down")

    def plug_in(self, number: int) -> None:
        _ip("-n", self._space(0), "link", "set", f"p{number}", "up")

    def build(self) -> None:
        hub = self._space(0)
        for number in range(self._count + 1):
            _ip("netns", "add", self._space(number))
            _ip("-n", self._space(number), "link", "set", "lo", "up")
        _ip("-n", hub, "link", "add", "switch", "type", "bridge")
        _ip("-n", hub, "link", "set", "switch", "up")
        for number in range(1, self._count + 1):
            space = self._space(number)
            _ip("-n", hub, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", hub, "link", "set", f"p{number}", "master", "switch", "up")
            _ip("-n", space, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def remove(self) -> None:
        for number in range(self._count + 1):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._space(number))

    def _space(self, number: int) -> str:
        return f"{self._name}-{number}"


@contextlib.contextmanager
def run_machines(count: int) -> Iterator[Machines]:
    machines = Machines(count)
    try:
        machines.build()
        yield machines
    finally:
        machines.remove()


def why_none() -> str | None:
    """Why this machine cannot have others inside it, None when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the program ip is not installed"
    try:
        with run_machines(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"this machine allows no network namespaces: {error.stderr.decode().strip()}"


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports at which somebody listens in the network of a process, IPv4 only."""
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            address, port = local.split(":")
            found.add((".".join(str(byte) for byte in bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
