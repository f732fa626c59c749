"""Hosts of a network as network namespaces on one bridge, with faults: a machine that vanishes, a cut, a healed cut.

Needs root, iproute2 and nftables. Every name carries the pid, so runs side by side do not meet.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

TABLE = "cuts"
_numbers = itertools.count()


@functools.cache
def why_not() -> str:
    """Why there can be no such network here, "" when it can be: a small one is tried."""
    missing = [name for name in ("ip", "nft") if _find(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} here: apt-get install iproute2 nftables"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with run_network() as network:
            network.cut(network.add("probe"))
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {' '.join(error.cmd)}: {str(error.stderr).strip()}"
    return ""


@dataclass(frozen=True, slots=True)
class Host:
    """One machine: a namespace with one interface and one address."""

    name: str
    namespace: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """What to write before a command to run it there; the command keeps the pid."""
        return [_tool("ip"), "netns", "exec", self.namespace]

    def pids(self) -> list[int]:
        """Every process that runs there."""
        return [int(word) for word in run_tool("ip", "netns", "pids", self.namespace).split()]

    def kill_all(self) -> None:
        """SIGKILL all that runs there."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@dataclass
class Network:
    """Hosts that reach each other and this process, which has the address `gateway` among them."""

    tag: str
    subnet: str
    hosts: dict[str, Host] = field(default_factory=dict)

    @property
    def gateway(self) -> str:
        return f"{self.subnet}.1"

    @property
    def _switch(self) -> str:
        return f"{self.tag}-switch"

    def open(self) -> None:
        run_tool("ip", "netns", "add", self._switch)
        run_tool("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        run_tool("ip", "-n", self._switch, "link", "set", "br0", "up")
        self._connect(self.tag, "gate", namespace=None, address=self.gateway)
        self._clear()

    def add(self, name: str) -> Host:
        number = len(self.hosts)
        host = Host(name, f"{self.tag}-{name}", f"{self.subnet}.{10 + number}")
        run_tool("ip", "netns", "add", host.namespace)
        self.hosts[name] = host
        self._connect("eth0", f"p{number}", namespace=host.namespace, address=host.address)
        run_tool("ip", "-n", host.namespace, "link", "set", "lo", "up")
        return host

    def cut(self, host: Host, *others: str) -> None:
        """Drop what the host and the addresses `others` send each other, silently; without others, all it sends."""
        for one, other in [(host.address, other) for other in others] or [(host.address, None)]:
            for source, target in ((one, other), (other, one)):
                words = [*(["ip", "saddr", source] if source else []), *(["ip", "daddr", target] if target else [])]
                self._nft("add", "rule", "bridge", TABLE, "passing", *words, "drop")

    def heal(self) -> None:
        """Let everything through again."""
        self._clear()

    def vanish(self, host: Host) -> None:
        """The machine loses power: nothing leaves it any more, no end of a connection either, and all on it is gone."""
        self.cut(host)
        host.kill_all()

    def close(self) -> None:
        """End all processes and take the namespaces down. Idempotent."""
        for host in self.hosts.values():
            host.kill_all()
            run_tool("ip", "netns", "delete", host.namespace)
        self.hosts.clear()
        if self._switch in run_tool("ip", "netns", "list").split():
            run_tool("ip", "netns", "delete", self._switch)
        with contextlib.suppress(subprocess.CalledProcessError):  # its other end went with the switch, and it too
            run_tool("ip", "link", "delete", self.tag)

    def _connect(self, name: str, port: str, *, namespace: str | None, address: str) -> None:
        inside = ["-n", namespace] if namespace else []
        ends = ["netns", namespace] if namespace else []
        run_tool("ip", "link", "add", name, *ends, "type", "veth", "peer", "name", port, "netns", self._switch)
        run_tool("ip", "-n", self._switch, "link", "set", port, "master", "br0")
        run_tool("ip", "-n", self._switch, "link", "set", port, "up")
        run_tool("ip", *inside, "addr", "add", f"{address}/24", "dev", name)
        run_tool("ip", *inside, "link", "set", name, "up")

    def _clear(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            self._nft("delete", "table", "bridge", TABLE)
        self._nft("add", "table", "bridge", TABLE)
        self._nft("add", "chain", "bridge", TABLE, "passing", "{ type filter hook forward priority 0; }")

    def _nft(self, *words: str) -> None:
        run_tool("ip", "netns", "exec", self._switch, _tool("nft"), " ".join(words))


@contextlib.contextmanager
def run_network() -> Iterator[Network]:
    """A network without hosts, taken down with the block."""
    number = next(_numbers)
    network = Network(f"et{os.getpid()}n{number}", f"10.{random.randrange(77, 250)}.{random.randrange(256)}")
    try:
        network.open()
        yield network
    finally:
        network.close()


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports at which somebody listens in the network of a process, IPv4 only."""
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            address, port = local.split(":")
            found.add((".".join(str(byte) for byte in bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _tool(name: str) -> str:
    found = _find(name)
    assert found is not None, f"{name} is not installed"
    return found


def run_tool(name: str, *words: str) -> str:
    """Run `ip` or `nft`; gives what it prints. Raises CalledProcessError."""
    done = subprocess.run([_tool(name), *words], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, (name, *words), done.stdout, done.stderr)
    return done.stdout
