"""Who serves the store: the node whose address the endpoint names, as with torch's own c10d backend.

Of several agents on that machine the first one serves. The others find the port taken and are clients; when the one
that served is gone, and the port with it, whichever of them notices first serves from then on.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from elastictrain.clock import Clock
from elastictrain.errors import ConfigError
from elastictrain.log import get_logger
from elastictrain.rendezvous.endpoint import Endpoint
from elastictrain.rendezvous.host_probe import HostProbe
from elastictrain.rendezvous.secret import Secret
from elastictrain.rendezvous.served.server import GATHER_S, StoreServer
from elastictrain.rendezvous.served.settings import CONF_OPTION, ENDPOINT_OPTION, SECRET_HINT, ServedSettings

_log = get_logger(__name__)
_BACKLOG = 512
_MAX_SECRET_BYTES = 4096


def read_secret(settings: ServedSettings) -> Secret | None:
    """The secret, from its file where one is named. Blocks on the file. Raises ConfigError, which never shows it."""
    if settings.secret_file is None:
        return settings.secret
    option, path = f"{CONF_OPTION} secret_file", settings.secret_file
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(_MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"{option}: expected a file with the secret, seen {path} ({error.strerror}); check the path",
            field=option,
            seen=path,
        ) from None
    if not 0 < len(content) <= _MAX_SECRET_BYTES:
        seen = f"{path} without any" if not content else f"{path} with more"
        raise ConfigError(
            f"{option}: expected 1 to {_MAX_SECRET_BYTES} bytes, seen {seen}; write the secret into it",
            field=option,
            seen=path,
        )
    return Secret(content.decode(errors="surrogateescape"))


class Hosting:
    """This node's part in serving the store. Any thread may call it; blocks for the look-up of the name when made.

    `may_serve`: this is the machine that the endpoint names. `was_taken`: the port belonged to another process when it
    was last tried. Where the run was here before, nodes may still train that cannot reach a new server at once: they
    are given `patience_s`, unless the agent at `last_host`, without which none can go on, is seen to be dead.
    Raises ConfigError where this node shall serve and cannot.
    """

    def __init__(
        self,
        settings: ServedSettings,
        secret: Secret | None,
        clock: Clock,
        *,
        session: str,
        report: Callable[[str], None],
        node_address: str | None = None,
        gather_s: float = GATHER_S,
        patience_s: float = 0.0,
        last_host: tuple[str, int] | None = None,
    ) -> None:
        self._patience_s, self._last_host = patience_s, last_host
        self._probe: HostProbe | None = None
        self._settings, self._secret, self._clock = settings, secret, clock
        self._session, self._report, self._gather_s = session, report, gather_s
        self._lock = threading.Lock()
        self._is_closed = False
        self._server: StoreServer | None = None
        self.was_taken = False
        self.own_endpoint: Endpoint | None = None
        self._addresses: list[str] = []
        if settings.is_host is not False:
            self._addresses = self._find_addresses(node_address)
        self.may_serve = bool(self._addresses)
        if settings.is_host and not self.may_serve:
            raise ConfigError(
                f"{CONF_OPTION} is_host: expected {ENDPOINT_OPTION} to name an address of this machine, seen "
                f"{settings.endpoint.host}, which does not; start with is_host=true on that machine, or say at which "
                f"address of this one to listen: bind=ADDRESS in {CONF_OPTION}",
                field=f"{CONF_OPTION} is_host",
            )

    def try_serve(self) -> bool:
        """Serve, if this machine may and the port is free. Does not block. Raises ConfigError when it cannot listen."""
        with self._lock:
            if self._server is not None or not self.may_serve or self._is_closed:
                return self._server is not None
            listeners = self._listen()
            self.was_taken = listeners is None
            if listeners is None:
                return False
            self._server = StoreServer(
                listeners,
                secret=self._secret,
                host=self._session,
                clock=self._clock,
                report=self._report,
                gather_s=self._gather_s,
                patience_s=self._patience_s,
            )
            self._look_for_survivors(self._server)
        if self._secret is None:
            self._report(
                f"anybody who reaches {self._settings.endpoint.address} can join this run; to prevent it, {SECRET_HINT}"
            )
        return True

    def close(self, **times_s: float) -> None:
        """End the server, if there is one, as `StoreServer.close` does: blocks while others need it. Idempotent."""
        with self._lock:
            self._is_closed = True
            server, probe, self._probe = self._server, self._probe, None
        if probe is not None:
            probe.close()
        if server is not None:
            if server.service.num_others:
                _log.info("serving the store to the other nodes until they are done with it")
            server.close(**times_s)

    def _look_for_survivors(self, server: StoreServer) -> None:
        """Find out that nobody trains any more, so that nobody has to be waited for."""
        if self._patience_s <= self._gather_s:
            return
        _log.info(
            "the run was here before: nodes that may still train get up to %g s to come back (ttl and outage_timeout), "
            "less when one has, or when the agent of the last rank 0 is seen to be gone",
            self._patience_s,
        )
        if self._last_host is not None:
            host, port = self._last_host
            self._probe = HostProbe(host, port, timeout_s=self._patience_s, clock=self._clock, on_gone=server.hurry)

    def _listen(self) -> list[socket.socket] | None:
        """Listen at every address; None where the port is taken at one."""
        port, listeners = self._settings.endpoint.port, list[socket.socket]()
        problem: OSError | None = None
        for address in self._addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                listeners.append(socket.create_server((address, port), family=family, backlog=_BACKLOG))
            except OSError as error:
                problem = error
                if error.errno == errno.EADDRINUSE:
                    break
        if problem is not None and problem.errno == errno.EADDRINUSE:
            for one in listeners:
                one.close()
            return None
        if not listeners:
            assert problem is not None
            raise ConfigError(
                f"{ENDPOINT_OPTION}: expected a port at which this node can listen, seen {port} at "
                f"{', '.join(self._addresses)}: {problem.strerror}; give another port",
                field=ENDPOINT_OPTION,
            )
        host = str(listeners[0].getsockname()[0])
        own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self.own_endpoint = Endpoint(own, port)
        return listeners

    def _find_addresses(self, node_address: str | None) -> list[str]:
        """The addresses at which this machine would listen; none where it is not the one that is named."""
        settings, host = self._settings, self._settings.endpoint.host
        found = _resolve(host)
        local = [address for address in found if _is_local(address)]
        is_named = bool(local) or host in {"localhost", socket.gethostname()} or host == socket.getfqdn()
        if settings.bind is not None:
            return [settings.bind] if settings.is_host or is_named else []
        is_strange = node_address is not None and node_address not in local and not _means_loopback(host)
        if is_named and is_strange and all(_is_loopback(one) for one in local):
            # The machine's own name, which here may mean loopback, or is not known yet: the others come to its address
            # in the network.
            local.append(str(node_address))
        return local


def _means_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []  # a name that is not known, at least not yet
    return sorted({str(entry[4][0]) for entry in found}, key=lambda address: (":" in address, address))


def _is_local(address: str) -> bool:
    """Tell whether the address belongs to this machine: only then a socket can have it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
            return True
    except OSError:
        return False
