"""How to reach the served store: `--rdzv-endpoint` and `--rdzv-conf` of the c10d backend, read and frozen. Pure.

The keys of `--rdzv-conf` have the names that torch's own c10d backend gives them, and some more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastictrain.config import RDZV_SECRET_VARIABLE
from elastictrain.errors import ConfigError
from elastictrain.notation import Given, read_seconds
from elastictrain.rendezvous.endpoint import Endpoint, read_endpoint
from elastictrain.rendezvous.secret import Secret

DEFAULT_PORT = 29400
ENDPOINT_OPTION = "--rdzv-endpoint"
CONF_OPTION = "--rdzv-conf"
SECRET_HINT = f"set the same {RDZV_SECRET_VARIABLE}, or {CONF_OPTION} secret_file=FILE, on every node"
CONF_KEYS = frozenset({"is_host", "bind", "secret_file", "read_timeout", "timeout", "store_type"})
"""The keys of `--rdzv-conf` that are read here; all others are somebody else's."""
_TRUE = frozenset({"1", "true", "t", "yes", "y"})
_FALSE = frozenset({"0", "false", "f", "no", "n"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSettings:
    """Everything that a client or the host of the served store needs to know. Times are seconds."""

    endpoint: Endpoint
    is_host: bool | None = None
    """Whether this node serves the store; None: it does where the endpoint's host is this machine."""
    bind: str | None = None
    """Address at which the host listens; None: those that the endpoint's host means on this machine."""
    secret: Secret | None = None
    secret_file: str | None = None
    """File that holds the secret; it goes before `secret`."""
    read_timeout_s: float = 5.0
    """How long an answer is waited for before the connection is made anew."""
    write_timeout_s: float = 30.0
    """How long a write is tried before it fails with a StoreError that may be retried."""
    join_timeout_s: float = 600.0
    """How long the store may be unreachable at the start; once it was reached, an outage may last for ever."""
    report_every_s: float = 5.0
    """Pause between two lines about one outage."""


def read_served_settings(
    endpoint: str, conf: Mapping[str, str], *, secret: str | None = None, join_timeout_s: float = 600.0
) -> ServedSettings:
    """Read the text of `--rdzv-endpoint`, the pairs of `--rdzv-conf` and the value of RDZV_SECRET_VARIABLE, if set.

    Keys of `conf` outside CONF_KEYS are left alone. Raises ConfigError; no message ever holds a secret.
    """
    try:
        where = read_endpoint(endpoint, default_port=DEFAULT_PORT, port_hint=f"the usual one is {DEFAULT_PORT}")
    except ValueError as error:
        raise ConfigError(
            f"{ENDPOINT_OPTION}: expected HOST[:PORT] of the node that serves the store, seen {endpoint!r}; {error}",
            field=ENDPOINT_OPTION,
            seen=endpoint,
        ) from None
    if conf.get("store_type", "tcp") != "tcp":
        raise Given(f"{CONF_OPTION} store_type", conf["store_type"]).error(expected="tcp", fix="drop it")
    if secret == "":
        raise ConfigError(
            f"{RDZV_SECRET_VARIABLE}: expected a secret, seen the variable set to nothing; set it, or unset it",
            field=RDZV_SECRET_VARIABLE,
        )
    name = "read_timeout" if "read_timeout" in conf else "timeout"
    timeout = Given(f"{CONF_OPTION} {name}", conf.get(name, "5"))
    read_timeout_s = read_seconds(timeout, example="5")
    if read_timeout_s <= 0:
        raise timeout.error(expected="more than 0 seconds", fix=f"give e.g. {name}=5")
    return ServedSettings(
        endpoint=where,
        is_host=_read_is_host(conf),
        bind=conf.get("bind"),
        secret=None if secret is None or "secret_file" in conf else Secret(secret),
        secret_file=conf.get("secret_file"),
        read_timeout_s=read_timeout_s,
        join_timeout_s=join_timeout_s,
    )


def _read_is_host(conf: Mapping[str, str]) -> bool | None:
    text = conf.get("is_host")
    if text is None:
        return None
    word = text.lower()
    if word not in _TRUE | _FALSE:
        raise Given(f"{CONF_OPTION} is_host", text).error(expected="true or false", fix="give is_host=true on one node")
    return word in _TRUE
