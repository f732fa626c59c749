"""The first contact with etcd: before anything of the run is started or written.

A user who has named etcd wrongly is told so while nothing has happened yet. A run that merely comes before its etcd, or
before DNS knows it, waits here. gRPC's threads do not survive the forks to come, so a process of its own asks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection

from elastictrain.agent.forkserver import PR_SET_PDEATHSIG, prctl
from elastictrain.agent.meeting import etcd_settings
from elastictrain.clock import SystemClock
from elastictrain.config import RunConfig
from elastictrain.errors import ConfigError, InternalError, StoreError
from elastictrain.ledger_reader import newest_generation
from elastictrain.meeting_options import SERVED_BACKEND
from elastictrain.rendezvous.etcd.opening import open_etcd_store
from elastictrain.rendezvous.etcd.settings import EtcdSettings
from elastictrain.rendezvous.records import Keys
from elastictrain.rendezvous.store import Inbox, WatchFailed


def reach_store(config: RunConfig, environ: Mapping[str, str], *, forks: bool = True) -> None:
    """Wait until etcd has answered; blocks for the join time-out at most. Nothing to do for other stores.

    With `forks` this process must have no threads. Raises ConfigError when what the user has given leads to no etcd;
    and StoreError, for which trying again can help, when a run that has met before does not find its etcd in time.
    """
    if not config.world.is_shared or config.world.rdzv_backend == SERVED_BACKEND:
        return  # a served store comes with one of the nodes, which may be this one
    settings, keys = etcd_settings(config, environ), Keys(config.run_id)
    error = _ask_in_child(settings, keys) if forks else _ask(settings, keys)
    if isinstance(error, StoreError) and newest_generation(config.run_dir) == 0:
        raise ConfigError(str(error))
    if error is not None:
        raise error


def _ask(settings: EtcdSettings, keys: Keys) -> ConfigError | StoreError | None:
    """Why etcd will not do; None as soon as it answers."""
    store, inbox = open_etcd_store(settings, SystemClock()), Inbox()
    watch = store.watch(keys.prefix, inbox, without=keys.members)
    try:
        while not (items := inbox.drain()):
            # The store's own join time-out ends it: the watch fails then.
            select.select([inbox], [], [])
    finally:
        watch.close()
        store.close()
        inbox.close()
    return items[0].error if isinstance(items[0], WatchFailed) else None


def _ask_in_child(settings: EtcdSettings, keys: Keys) -> ConfigError | StoreError | None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_tell, args=(settings, keys, sender), name="elastictrain-contact")
    child.start()
    sender.close()
    try:
        kind, text, field = receiver.recv_bytes(), receiver.recv_bytes().decode(), receiver.recv_bytes().decode()
    except EOFError:
        child.join()
        raise InternalError(f"the process that asks for etcd ended with {child.exitcode} and no answer") from None
    finally:
        receiver.close()
        if child.is_alive():
            child.kill()
        child.join()
    if kind == b"config":
        return ConfigError(text, field=field or None)
    return StoreError(text, retryable=False) if kind == b"store" else None


def _tell(settings: EtcdSettings, keys: Keys, sender: Connection) -> None:
    """The child: ask, send the answer in three parts, and end."""
    parent = os.getppid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    error: ConfigError | StoreError | None
    try:
        error = _ask(settings, keys)
    except (ConfigError, StoreError) as raised:
        error = raised
    kind = b"config" if isinstance(error, ConfigError) else b"store" if error is not None else b"found"
    with contextlib.suppress(BrokenPipeError):
        for part in (kind, str(error or "").encode(), (getattr(error, "field", None) or "").encode()):
            sender.send_bytes(part)
