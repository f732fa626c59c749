"""What listens at an address that is no etcd as configured: asked by hand, once, when the first contact fails.

gRPC tells a refused connection, a wrong certificate and a web server in words that change with its version. A user who
has made a mistake needs one sure sentence, so the connection is made again with Python's own socket and TLS.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass

from elastictrain.errors import ConfigError
from elastictrain.rendezvous.endpoint import Endpoint
from elastictrain.rendezvous.etcd.settings import CONF_OPTION, ENDPOINT_OPTION, EtcdSettings

PROBE_TIMEOUT_S = 2.0
# What an HTTP/2 client says first, with an empty SETTINGS frame; a server's answer is a SETTINGS frame (type 4).
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS_TYPE = 4
_HEADER_BYTES = 9
_PORT_HINT = "give the host and client port of etcd (usually 2379)"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found out. `field` names the option to change where waiting cannot help, else None."""

    text: str
    field: str | None = None

    def to_error(self, endpoint: Endpoint) -> ConfigError:
        return ConfigError(f"etcd at {endpoint.address}: {self.text}", field=self.field)


def make_tls_context(settings: EtcdSettings) -> ssl.SSLContext:
    """Give Python's TLS context for the settings. Blocks on files. Raises ConfigError naming the file and option."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["h2"])
    try:
        if settings.cacert is not None:
            context = ssl.create_default_context(cafile=settings.cacert)
            context.set_alpn_protocols(["h2"])
    except (OSError, ssl.SSLError) as error:
        raise _unreadable("cacert", settings.cacert, error) from None
    if settings.cert is not None and settings.key is not None:
        try:
            context.load_cert_chain(settings.cert, settings.key)
        except (OSError, ssl.SSLError) as error:
            raise _unreadable("cert, key", f"{settings.cert}, {settings.key}", error) from None
    return context


async def probe(endpoint: Endpoint, settings: EtcdSettings) -> Finding:
    """Say what happens at the address. Takes at most some PROBE_TIMEOUT_S."""
    if settings.protocol == "https":
        return await _probe_tls(endpoint, settings)
    finding = await _greet(endpoint, None)
    if finding is not None and finding.field is None and await _speaks_tls(endpoint):
        return Finding(
            "expected http, seen TLS; set protocol=https (with cacert=FILE) in --rdzv-conf", f"{CONF_OPTION} protocol"
        )
    return finding or Finding("it speaks HTTP/2, but does not answer as etcd does")


async def find_loopback_only(endpoint: Endpoint) -> bool:
    """Tell whether the endpoint's name or address means this machine alone. False while the name is not known."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = [str(entry[4][0]).partition("%")[0] for entry in found]
    return bool(addresses) and all(ipaddress.ip_address(address).is_loopback for address in addresses)


async def _probe_tls(endpoint: Endpoint, settings: EtcdSettings) -> Finding:
    context = make_tls_context(settings)
    finding = await _greet(endpoint, context)
    if finding is None:
        return Finding("it speaks HTTP/2 over TLS, but does not answer as etcd does")
    if finding.field is None and await _greet(endpoint, None) is None:
        return _no_tls("it speaks HTTP/2")
    return finding


async def _greet(endpoint: Endpoint, context: ssl.SSLContext | None) -> Finding | None:
    """Connect and say hello as an HTTP/2 client; None when the answer is that of an HTTP/2 server."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
            writer.write(_PREFACE)
            answer = await reader.read(_HEADER_BYTES)
    except TimeoutError:
        return Finding(f"no answer within {PROBE_TIMEOUT_S:g} s")
    except socket.gaierror:
        return Finding("the name is not known (DNS)")
    except ssl.SSLError as error:
        return _explain_tls(error)
    except ConnectionRefusedError:
        return Finding("connection refused")
    except OSError as error:
        return Finding(os.strerror(error.errno) if error.errno else "the connection was reset")
    finally:
        if writer is not None:
            writer.transport.abort()
    if not answer:
        return Finding("it closes the connection without an answer")
    if len(answer) > 3 and answer[3] == _SETTINGS_TYPE and answer[0] == 0:
        return None
    return Finding(f"expected etcd, seen a server that answers {answer[:8]!r}; {_PORT_HINT}", ENDPOINT_OPTION)


def _explain_tls(error: ssl.SSLError) -> Finding:
    if isinstance(error, ssl.SSLCertVerificationError):
        what = f"its certificate is not trusted: {error.verify_message or error.reason}"
        return Finding(f"{what}; give the authority's file as cacert=FILE in {CONF_OPTION}", f"{CONF_OPTION} cacert")
    reason = error.reason or str(error)
    if "CERTIFICATE" in reason:
        text = f"it refuses this client's certificate ({reason}); give cert=FILE,key=FILE in {CONF_OPTION}"
        return Finding(text, f"{CONF_OPTION} cert")
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return _no_tls(reason)
    return Finding(f"TLS failed: {reason}")


def _no_tls(seen: str) -> Finding:
    text = f"expected TLS, seen none ({seen}); set protocol=http in {CONF_OPTION}, or give a port that speaks TLS"
    return Finding(text, f"{CONF_OPTION} protocol")


async def _speaks_tls(endpoint: Endpoint) -> bool:
    """Tell whether a TLS server answers; whom it belongs to does not matter, so nothing is verified or sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # refused in the language of TLS, for want of a client certificate
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()
    return True


def _unreadable(name: str, path: str | None, error: Exception) -> ConfigError:
    option = f"{CONF_OPTION} {name}"
    what = getattr(error, "strerror", None) or getattr(error, "reason", None) or type(error).__name__
    return ConfigError(f"{option}: expected PEM files, seen {path} ({what}); check the path and content", field=option)
