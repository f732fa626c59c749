"""Where a store is reached: `HOST[:PORT]` read into a host and a port. Pure: asks no name."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server, as its clients reach it. `host` is a name or an address without brackets."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """`host:port`, IPv6 addresses in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_endpoint(text: str, *, default_port: int, port_hint: str) -> Endpoint:
    """Read `HOST`, `HOST:PORT` or `[IPv6]:PORT`. `port_hint` says which port is the usual one.

    Without brackets the last group of an IPv6 address is the port where the rest is an address, as torchrun reads it:
    `::1:2379` is port 2379 of ::1, `2001:db8::1` is an address. Raises ValueError whose text says what to write.
    """
    if text.startswith("["):
        host, mark, port = text[1:].partition("]")
        if not mark or not _is_ipv6(host) or (port and not port.startswith(":")):
            raise ValueError("write an IPv6 address as [ADDRESS]:PORT")
        return Endpoint(host, _read_port(port[1:], port_hint) if port else default_port)
    host, mark, port = text.rpartition(":")
    if not mark or (":" in host and not _is_ipv6(host)):
        # No colon at all, or an IPv6 address without brackets and without a port.
        host, port = text, str(default_port)
    if not _is_ipv6(host) and not _HOST.fullmatch(host):
        raise ValueError("give a host name, an IPv4 address, or an IPv6 address in brackets")
    return Endpoint(host, _read_port(port, port_hint))


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _read_port(text: str, hint: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError(f"give a port from 1 to 65535; {hint}")
    return int(text)
