"""The pure parts of the served store: frames, proofs, settings, and whose memory of a lost store is taken."""

from __future__ import annotations

import dataclasses
import math

import pytest

from elastictrain.errors import ConfigError
from elastictrain.rendezvous.secret import Secret
from elastictrain.rendezvous.served.handshake import Handshake, Hello
from elastictrain.rendezvous.served.hosting import read_secret
from elastictrain.rendezvous.served.past import Envelope, LeaseTerms, Offer, View, choose, is_complete
from elastictrain.rendezvous.served.settings import read_served_settings
from elastictrain.rendezvous.served.wire import MAGIC, MAX_FRAME_BYTES, Reader, Seal, WireError, encode
from elastictrain.rendezvous.store import KeyEvent

SECRET = "never to be seen"

# ---------------------------------------------------------------- frames


def test_messages_come_whole_when_their_bytes_come_one_by_one() -> None:
    messages = [{"op": "a", "text": "ü\ud800"}, {}, {"list": [1, None, {"x": 2.5}]}]
    data = MAGIC + b"".join(encode(message, None) for message in messages)
    reader, found = Reader(), []
    for byte in data:
        reader.feed(bytes([byte]))
        while (message := reader.next()) is not None:
            found.append(message)
    assert found == messages
    assert not reader.is_amid_frame


def test_frame_is_refused_when_it_says_that_it_is_too_long() -> None:
    reader = Reader()
    reader.feed(MAGIC + (5000).to_bytes(4, "big"))
    with pytest.raises(WireError, match="5000 bytes: expected at most 4096"):
        reader.next()
    reader = Reader()
    reader.max_bytes = MAX_FRAME_BYTES
    reader.feed(MAGIC + (5000).to_bytes(4, "big"))
    assert reader.next() is None


@pytest.mark.parametrize("value", [math.nan, b"x", "x" * (MAX_FRAME_BYTES + 1)], ids=["nan", "bytes", "long"])
def test_message_is_refused_when_the_other_side_could_not_read_it(value: object) -> None:
    with pytest.raises((WireError, TypeError)):
        encode({"x": value}, None)


def test_sealed_frames_are_taken_once_and_in_their_order() -> None:
    first, second = (encode({"n": number}, seal) for seal in [Seal(b"key")] for number in (1, 2))

    def read(*frames: bytes, key: bytes = b"key") -> list[dict[str, int]]:
        reader, found = Reader(), []
        reader.seal = Seal(key)
        reader.feed(MAGIC + b"".join(frames))
        while (message := reader.next()) is not None:
            found.append(message)
        return found

    assert read(first, second) == [{"n": 1}, {"n": 2}]
    for frames in ((second,), (second, first), (first, first)):
        with pytest.raises(WireError, match="valid mark"):
            read(*frames)
    with pytest.raises(WireError, match="valid mark"):
        read(first, key=b"other")
    with pytest.raises(WireError, match="valid mark"):
        read(encode({"n": 1}, None))


def test_proofs_differ_by_side_nonce_and_secret() -> None:
    secret = Secret(SECRET)
    client, server = Hello.make(secret), Hello.make(secret)
    one = Handshake(secret, client, server)
    assert one.is_proven("client", one.proof_of("client"))
    others = [
        one.proof_of("server"),
        Handshake(secret, Hello.make(secret), server).proof_of("client"),
        Handshake(secret, client, Hello.make(secret)).proof_of("client"),
        Handshake(Secret("other"), client, server).proof_of("client"),
        Handshake(secret, server, client).proof_of("client"),
        "",
        None,
        7,
        "ü",
    ]
    assert not any(one.is_proven("client", proof) for proof in others)
    assert one.seal_of("client").mark(b"x") != one.seal_of("server").mark(b"x")
    assert Hello.from_json(client.to_json()) == client


# ---------------------------------------------------------------- settings


def test_settings_are_read_when_they_have_torchs_names() -> None:
    found = read_served_settings("node-0", {"is_host": "True", "read_timeout": "60", "join_timeout": "4"})
    assert found.endpoint.address == "node-0:29400"
    assert found.is_host is True
    assert found.read_timeout_s == 60.0
    assert read_served_settings("[::1]:7", {"is_host": "0", "timeout": "3"}).is_host is False
    assert read_served_settings("h:1", {}).is_host is None


@pytest.mark.parametrize(
    ("endpoint", "conf", "says"),
    [
        ("node:port", {}, "--rdzv-endpoint: expected HOST[:PORT]"),
        ("node:70000", {}, "the usual one is 29400"),
        ("a:1,b:2", {}, "--rdzv-endpoint"),
        ("node", {"is_host": "maybe"}, "expected true or false, seen 'maybe'"),
        ("node", {"read_timeout": "0"}, "more than 0 seconds"),
        ("node", {"timeout": "soon"}, "--rdzv-conf timeout"),
        ("node", {"store_type": "file"}, "expected tcp, seen 'file'"),
    ],
)
def test_settings_are_refused_in_one_line_when_wrong(endpoint: str, conf: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_served_settings(endpoint, conf)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_secret_is_read_from_its_file_first_and_never_shown(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "secret"
    file.write_bytes(SECRET.encode() + b"\xff\n")
    settings = read_served_settings("h", {"secret_file": str(file)}, secret="of the variable")
    secret = read_secret(settings)
    assert secret is not None
    assert secret.reveal().encode(errors="surrogateescape") == SECRET.encode() + b"\xff"
    given = read_served_settings("h", {}, secret=SECRET)
    assert read_secret(given) == Secret(SECRET)
    assert SECRET not in f"{settings} {given} {dataclasses.asdict(given)} {secret!r}"
    assert read_secret(read_served_settings("h", {})) is None


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), (b" \n", "without any"), (b"x" * 5000, "with more")]
)
def test_secret_is_refused_in_one_line_when_its_file_is_wrong(  # type: ignore[no-untyped-def]
    tmp_path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        read_secret(read_served_settings("h", {"secret_file": str(file)}))
    assert "secret_file" in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="ELASTICTRAIN_RDZV_SECRET"):
        read_served_settings("h", {}, secret="")


# ---------------------------------------------------------------- memories


def entry(key: str, revision: int, lease: LeaseTerms | None = None) -> KeyEvent:
    value = Envelope("w/1", lease, {"at": revision}).to_json()
    return KeyEvent(key=key, value=value, revision=revision, created_revision=1)


def offer(session: str, *views: View, store: str = "s1", lineage: tuple[str, ...] = (), **rest: object) -> Offer:
    leases = rest.get("leases", ())
    assert isinstance(leases, tuple)
    return Offer(session=session, store=store, lineage=lineage, host="host", views=views, leases=leases)


def test_furthest_view_is_taken_whole_when_memories_differ() -> None:
    """What it does not list was deleted, whatever the others still know."""
    near = View("/run/", 5, (entry("/run/old", 3), entry("/run/gone", 4)))
    far = View("/run/", 7, (entry("/run/old", 6), entry("/run/new", 7)))
    for offers in ([offer("a", near), offer("b", far)], [offer("b", far), offer("a", near)]):
        past = choose(offers)
        assert past.views == (far,)
        assert past.revision == 7
        assert past.lineage == ("s1",)
        assert not past.strangers


def test_views_of_several_runs_are_taken_each_for_itself() -> None:
    one, other = View("/run1/", 9, (entry("/run1/a", 9),)), View("/run2/", 4, (entry("/run2/a", 4),))
    assert choose([offer("a", one), offer("b", other)]).views == (one, other)


def test_memory_of_an_older_store_is_kin_and_of_a_strange_one_is_not() -> None:
    newest = offer("a", View("/run/", 9, ()), store="s2", lineage=("s1", "s2"))
    older = offer("b", View("/run/", 5, ()), store="s1")
    strange = offer("c", View("/run/", 7, ()), store="s9")
    past = choose([strange, older, newest])
    assert past.strangers == {"c"}
    assert past.lineage == ("s1", "s2")
    assert past.revision == 9


def test_nobody_is_waited_for_when_all_holders_of_leases_but_the_dead_host_are_there() -> None:
    leases = {name: LeaseTerms(f"lease-{name}", 5.0, name) for name in ("a", "b", "host")}
    entries = tuple(entry(f"/run/{name}", 1, lease) for name, lease in leases.items())
    told = offer("a", View("/run/", 3, entries), leases=(leases["a"],))
    assert not is_complete([], ["fresh"])
    assert not is_complete([offer("a", View("/run/", 3, (entry("/run/host", 1, leases["host"]),)))], ["a", "fresh"])
    assert not is_complete([told], ["a", "fresh"])
    assert is_complete([told], ["a", "b", "fresh"])
    past = choose([told])
    assert past.leases == set(leases.values())
    assert past.hosts == {"host"}


def test_offer_comes_back_when_it_was_sent() -> None:
    lease = LeaseTerms("l", 2.0, "a")
    one = offer("a", View("/run/", 3, (entry("/run/x", 2, lease),)), leases=(lease,), lineage=("s0", "s1"))
    assert Offer.from_json("a", one.to_json()) == one
    for broken in ({}, {**one.to_json(), "views": [["/run/", 3, [["k", {}, 1, 1]]]]}, {**one.to_json(), "leases": [1]}):
        with pytest.raises(WireError):
            Offer.from_json("a", broken)
