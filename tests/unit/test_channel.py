"""The conversation between agent and worker when the peer sends nonsense, half a message, or goes away."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Iterator

import pytest

from elastictrain.channel import (
    AGENT_KINDS,
    MAX_LINE_BYTES,
    WORKER_KINDS,
    Channel,
    ChannelError,
    channel_pair,
    worker_channel,
)


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    channel, raw = channel_pair()
    raw.settimeout(5)
    yield channel, raw
    channel.close()
    raw.close()


def line(kind: str, **fields: object) -> bytes:
    return json.dumps({"kind": kind, **fields}).encode() + b"\n"


def receive_until_refused(channel: Channel) -> None:
    while channel.receive() == []:
        pass


def test_message_arrives_whole_when_it_came_in_pieces(ends: tuple[Channel, socket.socket]) -> None:
    channel, raw = ends
    data = line("hello", pid=1) + line("commit", step=2)
    raw.sendall(data[:5])
    assert channel.receive() == []
    raw.sendall(data[5:-3])
    assert channel.receive() == [{"kind": "hello", "pid": 1}]
    raw.sendall(data[-3:])
    assert channel.receive() == [{"kind": "commit", "step": 2}]


def test_torn_line_is_dropped_when_the_peer_closes_in_the_middle(ends: tuple[Channel, socket.socket]) -> None:
    channel, raw = ends
    raw.sendall(line("hello") + b'{"kind":"com')
    raw.close()
    assert channel.receive() == [{"kind": "hello"}]
    assert channel.receive() is None
    assert channel.send("stop") is False


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\n",
        b"\xff\xfe\n",
        b"[]\n",
        b"null\n",
        b'{"kind":"pickle"}\n',
        b'{"kind":7}\n',
        b'{"kind":["hello"]}\n',
        b"{}\n",
        b"\n",
        b"[" * 200_000 + b"\n",
    ],
)
def test_conversation_ends_with_a_typed_error_when_a_line_is_no_message(
    ends: tuple[Channel, socket.socket], data: bytes
) -> None:
    channel, raw = ends
    sender = threading.Thread(target=raw.sendall, args=(data,))
    sender.start()
    with pytest.raises(ChannelError, match="expected"):
        receive_until_refused(channel)
    sender.join()


def test_conversation_ends_when_a_line_has_no_end(ends: tuple[Channel, socket.socket]) -> None:
    channel, raw = ends

    def flood() -> None:
        try:
            for _ in range(MAX_LINE_BYTES // 65536 + 2):
                raw.sendall(b"x" * 65536)
        except OSError:
            pass

    sender = threading.Thread(target=flood)
    sender.start()
    with pytest.raises(ChannelError, match="without an end"):
        receive_until_refused(channel)
    channel.close()
    sender.join()


def test_messages_stay_whole_when_several_threads_send() -> None:
    agent, raw = channel_pair()
    worker = worker_channel(raw.detach())
    threads = [
        threading.Thread(target=lambda n=n: [worker.send("commit", step=n, text="x" * 2000) for _ in range(50)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    got: list[int] = []
    while len(got) < 200:
        got.extend(message["step"] for message in agent.receive() or [])
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted([0, 1, 2, 3] * 50)
    agent.close()
    worker.close()


def test_message_is_refused_when_it_is_of_the_other_direction(ends: tuple[Channel, socket.socket]) -> None:
    channel, raw = ends
    raw.sendall(line(next(iter(AGENT_KINDS - WORKER_KINDS))))
    with pytest.raises(ChannelError, match="kinds"):
        channel.receive()


def is_ringing(channel: Channel) -> bool:
    return bool(select.select([channel.doorbell], [], [], 0)[0])


def test_doorbell_rings_for_everything_but_commits_when_the_hello_has_brought_it() -> None:
    agent, raw = channel_pair()
    worker = worker_channel(raw.detach())
    worker.send_hello(pid=1)
    assert agent.receive() == [{"kind": "hello", "pid": 1}]
    for step in range(3):
        worker.send("commit", step=step)
        assert not is_ringing(agent)
    worker.send("parked", step=2)
    assert is_ringing(agent)
    agent.hear()
    assert [message["kind"] for message in agent.receive() or []] == ["commit"] * 3 + ["parked"]
    assert not is_ringing(agent)
    assert agent.receive() == []
    agent.close()
    worker.close()


def test_doorbell_rings_for_commits_when_they_would_fill_the_socket() -> None:
    agent, raw = channel_pair()
    worker = worker_channel(raw.detach())
    worker.send_hello(pid=1)
    agent.receive()
    num_sent = 0
    while not is_ringing(agent):
        worker.send("commit", step=num_sent, text="x" * 2000)  # blocks for ever in the end, unless it rings
        num_sent += 1
    received: list[int] = []
    while messages := agent.receive():
        received.extend(message["step"] for message in messages)
    assert received == list(range(num_sent))
    agent.close()
    worker.close()
