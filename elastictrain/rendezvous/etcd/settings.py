"""How to reach etcd: `--rdzv-endpoint` and `--rdzv-conf` read into frozen settings. Pure: opens no file, asks no name.

The keys of `--rdzv-conf` have the names that torch's own etcd backends give them, under both spellings that those use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from elastictrain.config import ETCD_PASSWORD_VARIABLE
from elastictrain.errors import ConfigError
from elastictrain.notation import Given, read_choice, read_seconds
from elastictrain.rendezvous.endpoint import Endpoint, read_endpoint
from elastictrain.rendezvous.secret import Secret

Protocol = Literal["http", "https"]

DEFAULT_PORT = 2379
PASSWORD_VARIABLE = ETCD_PASSWORD_VARIABLE
ENDPOINT_OPTION = "--rdzv-endpoint"
CONF_OPTION = "--rdzv-conf"
_PORT_HINT = f"etcd's clients use {DEFAULT_PORT}"
# The second spelling is that of torch's etcd-v2 backend.
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "protocol": ("protocol",),
    "cacert": ("cacert", "ca_cert"),
    "cert": ("cert", "ssl_cert"),
    "key": ("key", "ssl_cert_key"),
    "user": ("user",),
    "password_file": ("password_file",),
    "read_timeout": ("read_timeout",),
}
CONF_KEYS = frozenset(name for names in _SPELLINGS.values() for name in names)
"""The keys of `--rdzv-conf` that are read here; all others are somebody else's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSettings:
    """Everything an `EtcdStore` needs to know. Times are seconds; files are paths that are read when it connects."""

    endpoints: tuple[Endpoint, ...]
    """Members of one cluster; each node begins with another one, and goes on to the next when one does not answer."""
    protocol: Protocol = "http"
    cacert: str | None = None
    """PEM file of the authority that signed the servers' certificates; None: those that this machine trusts."""
    cert: str | None = None
    """PEM file of this client's certificate, for servers that ask for one."""
    key: str | None = None
    """PEM file of the private key of `cert`."""
    user: str | None = None
    password: Secret | None = None
    password_file: str | None = None
    """File that holds the password, read at every login: a secret that is rotated is taken up."""
    attempt_timeout_s: float = 2.0
    """How long one request waits for its answer before the next member is asked."""
    write_timeout_s: float = 30.0
    """How long a write is tried before it fails with a StoreError that may be retried."""
    join_timeout_s: float = 600.0
    """How long etcd may be unreachable at the start; once it has answered, an outage may last for ever."""
    report_every_s: float = 5.0
    """Pause between two lines about one outage."""
    is_multi_node: bool = False
    """Other nodes are to reach the same endpoints: an address that only this machine knows is worth a warning."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise _endpoint_error("", "give the host and port of etcd, e.g. etcd-0.example:2379")
        if self.protocol == "http" and (self.cacert or self.cert or self.key):
            raise _conf_error("protocol", "https with cacert, cert or key", "http", "set protocol=https, or drop them")
        if (self.cert is None) != (self.key is None):
            given, missing = ("cert", "key") if self.key is None else ("key", "cert")
            raise _conf_error(given, f"{given} and {missing} together", f"{given} alone", f"add {missing}=FILE")
        has_password = self.password is not None or self.password_file is not None
        if self.user is not None and not has_password:
            raise _conf_error(
                "user", "a password for it", "none", f"set {PASSWORD_VARIABLE}, or password_file=FILE in {CONF_OPTION}"
            )
        if has_password and self.user is None:
            origin = PASSWORD_VARIABLE if self.password is not None else "password_file"
            raise _conf_error("user", f"the user whose password {origin} is", "none", "add user=NAME")

    @property
    def names(self) -> str:
        """The addresses, for messages."""
        return ", ".join(endpoint.address for endpoint in self.endpoints)


def read_etcd_settings(
    endpoint: str,
    conf: Mapping[str, str],
    *,
    password: str | None = None,
    join_timeout_s: float = 600.0,
    is_multi_node: bool = False,
) -> EtcdSettings:
    """Read the text of `--rdzv-endpoint`, the pairs of `--rdzv-conf` and the value of PASSWORD_VARIABLE, if set.

    Keys of `conf` outside CONF_KEYS are left alone. Raises ConfigError; no message ever holds a password.
    """
    if "password" in conf:
        raise ConfigError(
            f"{CONF_OPTION} password: expected not to be given there, where `ps` and the run directory show it; "
            f"set {PASSWORD_VARIABLE}, or password_file=FILE in {CONF_OPTION}",
            field=f"{CONF_OPTION} password",
        )
    given = {name: _spelled(name, conf) for name in _SPELLINGS}
    endpoints, scheme = parse_endpoints(endpoint)
    has_files = any(given[name] for name in ("cacert", "cert", "key"))
    protocol = given["protocol"] or scheme or ("https" if has_files else "http")
    read_choice(Given(f"{CONF_OPTION} protocol", protocol), ("http", "https"))
    if scheme is not None and protocol != scheme:
        raise _conf_error("protocol", f"{scheme}, as {ENDPOINT_OPTION} says", protocol, "drop one of the two")
    timeout = Given(f"{CONF_OPTION} read_timeout", given["read_timeout"] or "2")
    attempt_timeout_s = read_seconds(timeout, example="2")
    if attempt_timeout_s <= 0:
        raise timeout.error(expected="more than 0 seconds", fix="give e.g. read_timeout=2")
    return EtcdSettings(
        endpoints=endpoints,
        protocol="https" if protocol == "https" else "http",
        cacert=given["cacert"],
        cert=given["cert"],
        key=given["key"],
        user=given["user"],
        password=None if password is None or given["password_file"] is not None else Secret(password),
        password_file=given["password_file"],
        attempt_timeout_s=attempt_timeout_s,
        join_timeout_s=join_timeout_s,
        is_multi_node=is_multi_node,
    )


def parse_endpoints(text: str) -> tuple[tuple[Endpoint, ...], Protocol | None]:
    """Read `HOST[:PORT],HOST[:PORT]`, each with or without `http://`; gives the scheme too, None where none is written.

    Each is read as `read_endpoint` says. Raises ConfigError.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise _endpoint_error(text, "give the host and port of etcd, e.g. etcd-0.example:2379")
    endpoints: list[Endpoint] = []
    schemes: set[Protocol] = set()
    for word in words:
        if "@" in word:
            raise _endpoint_error("***", f"write no password into an address: use user=NAME in {CONF_OPTION}")
        scheme, mark, rest = word.rpartition("://")
        if mark:
            if scheme not in ("http", "https"):
                raise _endpoint_error(word, "give HOST:PORT, http://HOST:PORT or https://HOST:PORT")
            schemes.add("https" if scheme == "https" else "http")
        try:
            endpoint = read_endpoint(rest.removesuffix("/"), default_port=DEFAULT_PORT, port_hint=_PORT_HINT)
        except ValueError as error:
            raise _endpoint_error(word, str(error)) from None
        if endpoint not in endpoints:
            endpoints.append(endpoint)
    if len(schemes) > 1:
        raise _endpoint_error(text, "use http:// or https:// for all of them")
    return tuple(endpoints), next(iter(schemes), None)


def _spelled(name: str, conf: Mapping[str, str]) -> str | None:
    """Give the value under whichever of its spellings was used, None where none was."""
    used = [spelling for spelling in _SPELLINGS[name] if spelling in conf]
    if len(used) > 1:
        raise _conf_error(used[0], "one of its two spellings", " and ".join(used), f"keep {used[0]}")
    return conf[used[0]] if used else None


def _endpoint_error(seen: str, fix: str) -> ConfigError:
    return ConfigError(
        f"{ENDPOINT_OPTION}: expected HOST:PORT[,HOST:PORT...], seen {seen!r}; {fix}", field=ENDPOINT_OPTION, seen=seen
    )


def _conf_error(name: str, expected: str, seen: str, fix: str) -> ConfigError:
    option = f"{CONF_OPTION} {name}"
    return ConfigError(f"{option}: expected {expected}, seen {seen}; {fix}", field=option, seen=seen)
