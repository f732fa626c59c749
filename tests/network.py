"""Machines as network namespaces on one bridge, with faults: one vanishes, is cut off from some or all, comes back.

Needs root, iproute2 and nftables. Every name carries the pid, so runs side by side do not meet; what a killed run has
left is taken down by the next one.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from waiting import wait_until

# Reserved for tests of network devices (RFC 2544): no network that this machine is part of can be meant by it.
_RESERVED = ipaddress.ip_network("198.18.0.0/15")
_SUBNETS = tuple(itertools.islice(_RESERVED.subnets(new_prefix=28), 1 << 13))
_FOLDER = "elastictrain-network-"
_NAME = re.compile(rf"({_FOLDER})?et(?P<pid>\d+)n\d+-")
_END_S = 10.0
# Its own name and its own /etc/hosts; the command keeps the pid. `ip netns exec` has made a mount namespace already.
_ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Host:
    """One machine: a namespace with a name, one interface and one address."""

    name: str
    namespace: str
    address: str
    hosts_file: Path

    @property
    def prefix(self) -> list[str]:
        """What to write before a command to run it there; the command keeps the pid."""
        inside = [_tool("ip"), "netns", "exec", self.namespace, "unshare", "--uts"]
        return [*inside, "sh", "-c", _ENTER, "enter", self.name, str(self.hosts_file)]

    def pids(self) -> list[int]:
        """Every process that runs there."""
        return [int(word) for word in run_tool("ip", "netns", "pids", self.namespace).split()]

    def kill_all(self) -> None:
        """SIGKILL all that runs there; blocks until nothing does."""
        kill_inside(self.namespace)


@dataclass
class Network:
    """Hosts that reach each other and this process, which has the address `gateway` among them.

    Each host knows the others by name, and this process as `outside`.
    """

    tag: str
    folder: Path
    hosts: dict[str, Host] = field(default_factory=dict)
    gateway: str = ""
    _cuts: list[tuple[Host, str | None]] = field(default_factory=list)
    _undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def _switch(self) -> str:
        return f"{self.tag}-switch"

    def open(self) -> None:
        """Make the bridge and this process's place at it. Raises CalledProcessError where that is not allowed."""
        self._undo.callback(shutil.rmtree, self.folder, ignore_errors=True)
        subnet = _free_subnet()
        self.gateway, self._length = str(subnet[1]), subnet.prefixlen
        self._addresses = itertools.islice(subnet.hosts(), 1, None)
        self._add_namespace(self._switch)
        run_tool("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        run_tool("ip", "-n", self._switch, "link", "set", "br0", "up")
        self._connect(self.tag, "gate", namespace=None, address=self.gateway)
        self._undo.callback(_delete_link, self.tag)
        self._apply_cuts()

    def add(self, name: str) -> Host:
        """Make one more machine."""
        host = Host(name, f"{self.tag}-{name}", str(next(self._addresses)), self.folder / f"{name}.hosts")
        self._add_namespace(host.namespace)
        self._connect("eth0", f"p{len(self.hosts)}", namespace=host.namespace, address=host.address)
        self.hosts[name] = host
        known = {**{one.name: one.address for one in self.hosts.values()}, "outside": self.gateway}
        lines = ["127.0.0.1 localhost\n", *(f"{address} {known_name}\n" for known_name, address in known.items())]
        for one in self.hosts.values():
            one.hosts_file.write_text("".join(lines))  # in place: what runs there sees it
        return host

    def cut(self, host: Host, *others: str) -> None:
        """Drop what the host and the addresses `others` send each other, silently; without others, all it sends."""
        self._cuts += [(host, other) for other in others or [None]]
        self._apply_cuts()

    def heal(self, *hosts: Host) -> None:
        """Let everything through again that was cut at `hosts`; without any, everything."""
        self._cuts = [(host, other) for host, other in self._cuts if hosts and host not in hosts]
        self._apply_cuts()

    def vanish(self, host: Host) -> None:
        """The machine loses power: nothing leaves it any more, no end of a connection either, and all on it is gone."""
        self.cut(host)
        host.kill_all()

    def close(self) -> None:
        """End all processes and take everything down, whatever has failed before. Idempotent."""
        self._undo.close()
        self.hosts.clear()

    def _add_namespace(self, name: str) -> None:
        run_tool("ip", "netns", "add", name)
        self._undo.callback(remove_namespace, name)
        run_tool("ip", "-n", name, "link", "set", "lo", "up")

    def _connect(self, name: str, port: str, *, namespace: str | None, address: str) -> None:
        inside = ["-n", namespace] if namespace else []
        ends = ["netns", namespace] if namespace else []
        run_tool("ip", "link", "add", name, *ends, "type", "veth", "peer", "name", port, "netns", self._switch)
        run_tool("ip", "-n", self._switch, "link", "set", port, "master", "br0")
        run_tool("ip", "-n", self._switch, "link", "set", port, "up")
        run_tool("ip", *inside, "addr", "add", f"{address}/{self._length}", "dev", name)
        run_tool("ip", *inside, "link", "set", name, "up")

    def _apply_cuts(self) -> None:
        """Put all rules in force at once: there is no moment at which everything passes."""
        rules = []
        for host, other in self._cuts:
            pairs = ((host.address, other), (other, host.address))
            for source, target in pairs:
                rules.append(" ".join([*_match("saddr", source), *_match("daddr", target), "drop"]))
        chain = "chain passing { type filter hook forward priority 0;\n" + "\n".join(rules) + "\n}"
        script = f"table bridge cuts\ndelete table bridge cuts\ntable bridge cuts {{\n{chain}\n}}\n"
        run_tool("ip", "netns", "exec", self._switch, _tool("nft"), "-f", "-", text=script)


@contextlib.contextmanager
def run_network() -> Iterator[Network]:
    """A network without hosts, taken down with the block."""
    sweep()
    tag = f"et{os.getpid()}n{next(_numbers)}"
    network = Network(tag, Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{tag}-")))
    try:
        network.open()
        yield network
    finally:
        network.close()


@functools.cache
def why_not() -> str:
    """Why there can be no such network here, "" when there can."""
    missing = [name for name in ("ip", "nft") if _find(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} here: apt-get install iproute2 nftables"
    if os.geteuid() != 0:
        return "network namespaces need root"
    # What the system must allow, asked without the code below: a mistake in it is to fail, not to skip.
    name = f"et{os.getpid()}n-probe"
    enter = ["netns", "exec", name]
    chain = "add chain bridge cuts x { type filter hook forward priority 0; }"
    asked = (
        ["netns", "add", name],
        ["-n", name, "link", "add", "br0", "type", "bridge"],
        ["-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "p0"],
        [*enter, _tool("nft"), f"add table bridge cuts; {chain}"],
        [*enter, "unshare", "--uts", "sh", "-c", "hostname x && mount --bind /etc/hosts /etc/hosts"],
    )
    try:
        for words in asked:
            run_tool("ip", *words)
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: ip {' '.join(words)}: {error.stderr.strip()}"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            run_tool("ip", "netns", "delete", name)
    return ""


def sweep() -> None:
    """Take down what test runs have left that were killed: the pid in the name tells that they are gone."""

    def is_stale(name: str) -> bool:
        mark = _NAME.match(name)
        return mark is not None and not Path(f"/proc/{mark['pid']}").exists()

    for name in filter(is_stale, namespaces()):
        with contextlib.suppress(subprocess.CalledProcessError):  # another run may do the same
            remove_namespace(name)
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        if is_stale(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def namespaces() -> list[str]:
    """The network namespaces of this machine that have a name."""
    folder = Path("/run/netns")
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def remove_namespace(name: str) -> None:
    kill_inside(name)
    run_tool("ip", "netns", "delete", name)


def kill_inside(namespace: str) -> None:
    """SIGKILL all that runs in a namespace; blocks until nothing does."""

    def is_empty() -> bool:
        pids = run_tool("ip", "netns", "pids", namespace).split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return not pids

    wait_until(is_empty, _END_S, f"processes in {namespace} do not end")


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports at which somebody listens in the network of a process, IPv4 only."""
    found = set()
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == "0A":
            address, port = local.split(":")
            found.add((".".join(str(byte) for byte in bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def run_tool(name: str, *words: str, text: str = "") -> str:
    """Run `ip` or `nft` with `text` as its input; gives what it prints. Raises CalledProcessError."""
    command = [_tool(name), *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=20, check=True).stdout


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _tool(name: str) -> str:
    found = _find(name)
    assert found is not None, f"{name} is not installed"
    return found


def _match(field_name: str, address: str | None) -> list[str]:
    return ["ip", field_name, address] if address else []


def _free_subnet() -> ipaddress.IPv4Network:
    """One that no interface of this machine is in."""
    shown = run_tool("ip", "-4", "-o", "addr", "show")
    taken = {ipaddress.ip_interface(found).network for found in re.findall(r"inet (\S+)", shown)}
    free = [subnet for subnet in _SUBNETS if not any(subnet.overlaps(other) for other in taken)]
    return ipaddress.IPv4Network(random.choice(free))


def _delete_link(name: str) -> None:
    with contextlib.suppress(subprocess.CalledProcessError):  # it may have gone with its other end
        run_tool("ip", "link", "delete", name)
