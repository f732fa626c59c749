"""Under which address this node can be reached by the others: the one that its packets to them would carry."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

LOOPBACK: Final = "127.0.0.1"
_SIOCGIFADDR: Final = 0x8915
# Reserved for documentation: only the route to it is asked for, nothing is sent.
_ANYWHERE: Final = (("192.0.2.1", 9), ("2001:db8::1", 9))


def find_local_address(peers: Iterable[tuple[str, int]]) -> str:
    """The source address of the route to the first of `peers` (host, port) that has one, else of the default route.

    Sends nothing. Blocks for the look-up of names. Loopback where there is no network, or where the peer is this
    machine.
    """
    for host, port in (*peers, *_ANYWHERE):
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        except OSError:
            continue  # a name that is not known yet: the default route has to do
        for family, kind, protocol, _, address in found:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
            except OSError:
                continue
    return LOOPBACK


def find_own_address(host: str, port: int) -> str:
    """The address of this node for others that reach `host`:`port`, which may be this machine.

    Blocks for the look-up of the name. A machine's own name often means loopback on that machine alone: then it is the
    address of the default route.
    """
    found = find_local_address([(host, port)])
    is_meant = host == "localhost" or host.startswith("127.") or host == "::1"
    return found if is_meant or not (found.startswith("127.") or found == "::1") else find_local_address(())


def make_node_id() -> str:
    """A name that no other start of an agent has, on this machine or another: `<host name>-<8 hex digits>`."""
    import secrets

    return f"{host_label()}-{secrets.token_hex(4)}"


def host_label() -> str:
    """The host name as it may stand in file names and keys."""
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in socket.gethostname())
    return name.strip("-_") or "node"


def interface_of(address: str) -> str | None:
    """The name of the network interface that has `address`, None where none is found."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address).hex()
        table = Path("/proc/net/if_inet6")
        lines = table.read_text().splitlines() if table.exists() else []
        return next((line.split()[-1] for line in lines if line.startswith(packed)), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
