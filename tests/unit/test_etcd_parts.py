"""The pure parts of the store on etcd: what a failure means, how a value is written, when people are told."""

from __future__ import annotations

import json

import pytest

from elastictrain.clock import ManualClock
from elastictrain.errors import StoreError
from elastictrain.rendezvous.etcd.envelope import Envelope, Was, decode
from elastictrain.rendezvous.etcd.failures import RULES, Action, failed_call
from elastictrain.rendezvous.store import copy_value
from elastictrain.rendezvous.trouble import Trouble


@pytest.mark.parametrize(
    ("status", "details", "action", "is_retryable"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; Connection refused", Action.RECONNECT, True),
        ("UNAVAILABLE", "etcdserver: leader changed", Action.RETRY, True),
        ("UNAVAILABLE", "etcdserver: no leader", Action.RECONNECT, True),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Action.RECONNECT, True),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", Action.LOGIN, True),
        ("INVALID_ARGUMENT", "etcdserver: authentication failed, invalid user ID or password", Action.CONFIG, True),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", Action.CONFIG, True),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", Action.LOGIN, True),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", Action.REFUSED, False),
        ("PERMISSION_DENIED", "etcdserver: permission denied", Action.FORBIDDEN, True),
        ("NOT_FOUND", "etcdserver: requested lease not found", Action.LEASE_LOST, False),
        ("FAILED_PRECONDITION", "etcdserver: authentication is not enabled", Action.NO_LOGIN, False),
        ("FAILED_PRECONDITION", "etcdserver: lease already exists", Action.LEASE_EXISTS, False),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", Action.COMPACTED, False),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", Action.RETRY, True),
        ("RESOURCE_EXHAUSTED", "Received message larger than max (5 vs. 4)", Action.REFUSED, False),
        ("UNIMPLEMENTED", "unknown service etcdserverpb.KV", Action.CONFIG, True),
        ("SOMETHING_NEW", "of a later gRPC", Action.RECONNECT, True),
    ],
)
def test_failure_means_one_thing_when_looked_up(status: str, details: str, action: Action, is_retryable: bool) -> None:
    error = failed_call("etcd:2379", status, details)
    assert (error.action, error.retryable) == (action, is_retryable)
    assert "etcd:2379" in str(error)
    assert "\n" not in str(error)


def test_every_rule_can_be_reached_when_rules_are_tried_in_order() -> None:
    for number, rule in enumerate(RULES):
        hidden = [one for one in RULES[:number] if one.status == rule.status and one.words in rule.words]
        assert not hidden, rule


def test_message_is_one_short_line_when_grpc_says_a_lot() -> None:
    error = failed_call("etcd:2379", "INTERNAL", "a\nlong " * 300)
    assert len(str(error)) < 300
    assert "\n" not in str(error)


def test_envelope_comes_back_when_decoded() -> None:
    for was in (None, Was(created=7, revision=9, base=1 << 20), Was(created=7, revision=None, base=0)):
        envelope = Envelope(by="w/1", value={"a": [1, None, "ü"]}, was=was)
        assert decode(envelope.encode()) == envelope


def test_envelope_is_readable_when_looked_at_by_a_person() -> None:
    text = Envelope(by="w/1", value={"a": "ü"}).encode().decode()
    assert json.loads(text) == {"v": 1, "by": "w/1", "value": {"a": "ü"}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"{}",
        b"[]",
        b"1",
        b'{"v":2,"by":"w","value":{}}',
        b'{"v":1,"by":"w","value":[]}',
        b'{"v":1,"value":{}}',
        b'{"v":1,"by":"w","value":{},"was":5}',
        b'{"v":1,"by":"w","value":{},"was":{}}',
    ],
)
def test_envelope_is_none_when_somebody_else_wrote_it(data: bytes) -> None:
    assert decode(data) is None


def test_value_is_copied_when_checked() -> None:
    value = {"list": [1]}
    copy = copy_value("k", value)
    value["list"].append(2)
    assert copy == {"list": [1]}
    with pytest.raises(StoreError, match="k: the value is not a JSON object"):
        copy_value("k", {1: 2})  # type: ignore[dict-item]


def test_trouble_is_told_rarely_when_it_lasts() -> None:
    clock, lines = ManualClock(), list[str]()
    trouble = Trouble(clock, lines.append, every_s=5.0)
    for _ in range(200):
        trouble.failed("etcd", "etcd is away")
        clock.advance(0.1)
    assert lines == [f"etcd is away (for {seconds} s)" for seconds in (1, 6, 11, 16)]
    trouble.ended("etcd", "etcd answers again")
    trouble.ended("etcd", "etcd answers again")
    assert lines[4:] == ["etcd answers again after 20 s"]


def test_trouble_is_not_told_when_it_is_short() -> None:
    clock, lines = ManualClock(), list[str]()
    trouble = Trouble(clock, lines.append, every_s=5.0)
    for _ in range(50):
        trouble.failed("etcd", "etcd is away")
        clock.advance(0.5)
        trouble.ended("etcd", "etcd answers again")
    assert lines == []
