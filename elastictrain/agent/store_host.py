"""The store through which the members of a process group find each other, served by the agent on one address only.

torch's own TCPStore server listens on all interfaces; it is handed a socket that is already bound instead.
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastictrain.errors import ConfigError


class StoreHost:
    """A TCPStore server. `port` is free when it was made; the server ends with `close`."""

    def __init__(self, host: str) -> None:
        """Raises ConfigError when `host` is no address of this machine."""
        listener = _listen(host)
        self.host = host
        self.port: int = listener.getsockname()[1]
        self._server: TCPStore | None = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def close(self) -> None:
        """End the server. Idempotent."""
        self._server = None


def find_master_port(store_host: StoreHost, *, uses_agent_store: bool) -> int:
    """The MASTER_PORT of the workers: the agent's store, or a port on which rank 0 can serve one of its own."""
    if uses_agent_store:
        return store_host.port
    with _listen(store_host.host) as probe:
        port: int = probe.getsockname()[1]
        return port


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=512)
    except OSError as error:
        raise ConfigError(
            f"--local-addr: expected an address of this machine, seen {host!r}: {error.strerror}; give one that the "
            "other nodes reach, e.g. one that `ip -br address` shows",
            field="--local-addr",
            seen=host,
        ) from None
