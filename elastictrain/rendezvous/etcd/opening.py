"""The way into the store on etcd, free of gRPC until it is taken: runs without etcd do not pay for its import."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from elastictrain.clock import Clock
from elastictrain.log import get_logger
from elastictrain.rendezvous.etcd.settings import EtcdSettings

if TYPE_CHECKING:
    from elastictrain.rendezvous.etcd.etcd_store import EtcdStore

_log = get_logger(__name__)
_VERBOSITY = "GRPC_VERBOSITY"


def open_etcd_store(
    settings: EtcdSettings, clock: Clock, *, on_trouble: Callable[[str], None] = _log.warning
) -> EtcdStore:
    """Open a store on etcd. Blocks for the import of gRPC (about 0.2 s) and for small files, never for the network.

    What goes wrong on the network comes later: as the error of every future and as `WatchFailed`. A ConfigError there
    is a mistake of the user (wrong certificate, password or port), a StoreError that is not retryable means that no
    etcd was found within `settings.join_timeout_s`; both come only before etcd has answered for the first time.
    `on_trouble` is called on the I/O thread with one line for people: after a second of trouble, then every
    `settings.report_every_s` seconds, and when it is over. It must not block.

    Raises ConfigError for certificates and password files that cannot be read, and where etcd3 is not installed.
    The caller closes the store, after its watches' owners; one store for the whole process is enough. It does not
    survive a fork: a child opens its own.
    """
    with _quiet_grpc():
        from elastictrain.rendezvous.etcd.messages import load_rpc

        rpc = load_rpc()
        from elastictrain.rendezvous.etcd.connection import read_password_file
        from elastictrain.rendezvous.etcd.etcd_store import EtcdStore
        from elastictrain.rendezvous.etcd.probe import make_tls_context

    if settings.protocol == "https":
        make_tls_context(settings)
    if settings.password_file is not None:
        read_password_file(settings.password_file)
    return EtcdStore(rpc, settings, clock, on_trouble)


@contextlib.contextmanager
def _quiet_grpc() -> Iterator[None]:
    """Import gRPC so that it writes no lines of its own to stderr: what it has to say comes through `on_trouble`.

    It reads the variable as it is imported; workers, which inherit the environment, must not find it.
    """
    if _VERBOSITY in os.environ:
        yield
        return
    os.environ[_VERBOSITY] = "NONE"
    try:
        yield
    finally:
        del os.environ[_VERBOSITY]
