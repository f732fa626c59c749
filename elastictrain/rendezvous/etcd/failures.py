"""What a failed request to etcd means: one table from gRPC's status and etcd's words to what is done about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elastictrain.errors import StoreError
from elastictrain.rendezvous.etcd.settings import CONF_OPTION, ENDPOINT_OPTION, PASSWORD_VARIABLE


class Action(Enum):
    """What the client does about a failed request."""

    RETRY = "ask again"
    RECONNECT = "ask the next member, over a new connection"
    LOGIN = "log in again, then ask again"
    NO_LOGIN = "go on without logging in"
    LEASE_EXISTS = "the lease is there"
    LEASE_LOST = "the lease is gone"
    COMPACTED = "read everything anew"
    CONFIG = "the user must change something"
    FORBIDDEN = "this user may not do that"
    REFUSED = "this request can never succeed"


_RETRYABLE = frozenset({Action.RETRY, Action.RECONNECT, Action.LOGIN, Action.CONFIG, Action.FORBIDDEN})


@dataclass(frozen=True, slots=True)
class Rule:
    """The first rule whose status is equal and whose `words` are in the details says what a failure means."""

    status: str
    words: str
    action: Action
    fix: str = ""
    option: str = ""


_USER = f"{CONF_OPTION} user"
_PASSWORD = f"check user in {CONF_OPTION} and {PASSWORD_VARIABLE} or password_file"
_SPACE = "free space in etcd (compact, defragment, then disarm its alarm)"
RULES: tuple[Rule, ...] = (
    Rule("UNAVAILABLE", "leader changed", Action.RETRY),
    Rule("UNAVAILABLE", "too many requests", Action.RETRY),
    Rule("UNAVAILABLE", "", Action.RECONNECT),
    Rule("DEADLINE_EXCEEDED", "", Action.RECONNECT),
    Rule("CANCELLED", "", Action.RECONNECT),
    Rule("UNAUTHENTICATED", "", Action.LOGIN),
    Rule("INVALID_ARGUMENT", "revision of auth store is old", Action.LOGIN),
    Rule("INVALID_ARGUMENT", "authentication failed", Action.CONFIG, _PASSWORD, _USER),
    Rule("INVALID_ARGUMENT", "user name is empty", Action.CONFIG, f"this etcd asks for a user: {_PASSWORD}", _USER),
    Rule("INVALID_ARGUMENT", "", Action.REFUSED),
    Rule("PERMISSION_DENIED", "", Action.FORBIDDEN, "grant the user read and write access to /elastictrain/", _USER),
    Rule("NOT_FOUND", "lease not found", Action.LEASE_LOST),
    Rule("NOT_FOUND", "", Action.REFUSED),
    Rule("FAILED_PRECONDITION", "authentication is not enabled", Action.NO_LOGIN),
    Rule("FAILED_PRECONDITION", "lease already exists", Action.LEASE_EXISTS),
    Rule("FAILED_PRECONDITION", "", Action.RETRY),
    Rule("OUT_OF_RANGE", "", Action.COMPACTED),
    Rule("RESOURCE_EXHAUSTED", "space exceeded", Action.RETRY, _SPACE),
    Rule("RESOURCE_EXHAUSTED", "message larger than max", Action.REFUSED),
    Rule("RESOURCE_EXHAUSTED", "", Action.RETRY),
    Rule(
        "UNIMPLEMENTED",
        "",
        Action.CONFIG,
        f"this is no etcd v3: give the host and client port of one in {ENDPOINT_OPTION}",
        ENDPOINT_OPTION,
    ),
    Rule("ABORTED", "", Action.RETRY),
    Rule("INTERNAL", "", Action.RECONNECT),
    Rule("UNKNOWN", "", Action.RECONNECT),
    Rule("DATA_LOSS", "", Action.RECONNECT, "this member's data is damaged: replace the member"),
)
_OTHER = Rule("", "", Action.RECONNECT)


class EtcdError(StoreError):
    """A request to etcd failed; `action` says what can be done about it, `field` which option may be wrong."""

    def __init__(self, message: str, *, action: Action, field: str | None = None) -> None:
        super().__init__(message, retryable=action in _RETRYABLE)
        self.action = action
        self.field = field


def find_rule(status: str, details: str) -> Rule:
    """Give the rule for a gRPC status by its name, and the details that came with it."""
    text = details.lower()
    return next((rule for rule in RULES if rule.status == status and rule.words in text), _OTHER)


def failed_call(address: str, status: str, details: str) -> EtcdError:
    """The error of a call to the member at `address`."""
    rule = find_rule(status, details)
    fix = f"; {rule.fix}" if rule.fix else ""
    message = f"etcd at {address}: {_in_short(status, details)}{fix}"
    return EtcdError(message, action=rule.action, field=rule.option or None)


def _in_short(status: str, details: str) -> str:
    """One line, as short as it can be: gRPC repeats itself and names files and times of its own."""
    if status == "DEADLINE_EXCEEDED":
        return "no answer"
    if "Connection refused" in details:
        return "connection refused"
    if "DNS resolution failed" in details or "Domain name not found" in details:
        return "the name is not known (DNS)"
    line = " ".join(details.replace("etcdserver: ", "").split())
    return f"{line[:200] or 'no details'} ({status.lower()})"
