"""Which options of the rendezvous go together. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elastictrain.config import RDZV_SECRET_VARIABLE
from elastictrain.errors import ConfigError
from elastictrain.notation import Given, read_choice, read_nodes, read_pairs

EMBEDDED_BACKENDS = ("embedded", "static")
SERVED_BACKEND = "c10d"
ETCD_BACKEND = "etcd3"
# Backends that torch registers: known words, so that the error is about them.
OTHER_BACKENDS = ("etcd", "etcd-v2")
# Keys of --rdzv-conf by which torch's own backend notices lost nodes.
TORCHRUN_CONF_KEYS = frozenset({"close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt"})


@dataclass(frozen=True, slots=True)
class MeetingOptions:
    """The options as they were given."""

    nnodes: Given
    backend: Given
    endpoint: Given
    run_id: Given
    conf: Given


def is_shared_backend(backend: str, nnodes: Given) -> bool:
    """Whether other nodes may take part; see `World.is_shared`. Raises ConfigError."""
    return backend == ETCD_BACKEND or (backend == SERVED_BACKEND and read_nodes(nnodes)[1] > 1)


def check_meeting_options(given: MeetingOptions, *, is_standalone: bool) -> None:
    """Raise ConfigError for what one node cannot do, what contradicts --standalone, and what is missing."""
    most = read_nodes(given.nnodes)[1]
    backend, endpoint = given.backend, given.endpoint
    read_choice(backend, (*EMBEDDED_BACKENDS, SERVED_BACKEND, ETCD_BACKEND, *OTHER_BACKENDS))
    _check_no_secret(given.conf)
    if is_standalone:
        is_etcd = backend.text == ETCD_BACKEND
        for contradicts, option in ((most > 1, given.nnodes), (bool(endpoint.text), endpoint), (is_etcd, backend)):
            if contradicts:
                raise option.error(expected="one node without an address, as --standalone says", fix="drop one of them")
    if backend.text in OTHER_BACKENDS:
        raise backend.error(
            expected=f"{ETCD_BACKEND}, which speaks version 3 of etcd's interface", fix=f"give {ETCD_BACKEND}"
        )
    if is_shared_backend(backend.text, given.nnodes):
        if given.run_id.text in {"", "none"}:  # "none" is torchrun's default
            raise given.run_id.error(expected="a name for the run, the same on every node", fix="give --rdzv-id NAME")
        if not endpoint.text and backend.text == ETCD_BACKEND:
            raise endpoint.error(expected="HOST:PORT of etcd", fix="give e.g. --rdzv-endpoint etcd-0.example:2379")
        if not endpoint.text:
            raise endpoint.error(
                expected="HOST[:PORT] of the node that is to serve the store, the same on every node",
                fix="give e.g. --rdzv-endpoint node-0.example:29400",
            )
    elif most > 1:
        raise backend.error(
            expected=f"{SERVED_BACKEND} or {ETCD_BACKEND}, by which several nodes meet",
            fix="give --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME, where HOST is one of the nodes, or "
            "--nnodes 1",
        )


def _check_no_secret(conf: Given) -> None:
    """Refuse a secret where `ps` and the run directory would show it."""
    if "secret" in read_pairs(conf):
        raise ConfigError(
            "--rdzv-conf secret: expected not to be given there, where `ps` and the run directory show it; set "
            f"{RDZV_SECRET_VARIABLE}, or secret_file=FILE in --rdzv-conf",
            field="--rdzv-conf secret",
        )
