"""Messages between an agent and its workers: JSON lines over one Unix stream socket per worker.

A message is one JSON object on one line with the key `kind`. Nothing is unpickled. A line longer than
MAX_LINE_BYTES, or one that is not a JSON object with a known kind, ends the conversation with ChannelError.

Commits come with every step and nobody waits for them, so an agent need not wake up for each: it may look at the socket
later, because whatever is urgent also rings the worker's doorbell, an eventfd that comes with the hello. The order of
messages is that of the one socket.

    worker → agent                            agent → worker
    hello        pid, version, doorbell       welcome   run facts, provisional rank; a spare's place and streams
                                              wait      be a spare: the welcome comes with a place
    ready        waits to enter               round     the Round to build
    position     steps begun (answers hold)   hold      say where you are, and pause at the next step
    parked       stands still, step           stop_at   run up to this step, then park
    suspect      a collective failed          fence     the generation is broken
    resumed      seconds of each stage        save      write a checkpoint now, then tell
    whereabouts  what the main thread does    where     tell what your main thread does
    commit       one committed step
    epoch_finished, epoch_left, evaluated, saved, save_failed, resumed_from, exception, finished
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from elastictrain.errors import ElasticTrainError

CHANNEL_VERSION: Final = 1
MAX_LINE_BYTES: Final = 4 << 20
RECEIVE_BYTES: Final = 1 << 16

WORKER_KINDS: Final = frozenset(
    {
        "hello",
        "ready",
        "position",
        "whereabouts",
        "parked",
        "suspect",
        "resumed",
        "commit",
        "epoch_finished",
        "epoch_left",
        "evaluated",
        "saved",
        "save_failed",
        "resumed_from",
        "exception",
        "finished",
    }
)
QUIET_KINDS: Final = frozenset({"commit"})
AGENT_KINDS: Final = frozenset({"welcome", "wait", "round", "hold", "stop_at", "fence", "save", "where"})

Message = dict[str, Any]

_to_json: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=True).encode


class ChannelError(ElasticTrainError):
    """The peer sent something that is no message of this version."""


class Channel:
    """One end of a conversation. `send` may be called from several threads; receiving belongs to one.

    `doorbell` is the eventfd that the worker rings and the agent listens to, -1 before the hello has brought it.
    `streams` are descriptors that came to the worker with its welcome; they belong to who takes them.
    """

    def __init__(self, sock: socket.socket, *, accepts: frozenset[str], waits: bool) -> None:
        self._sock = sock
        self._flags = 0 if waits else socket.MSG_DONTWAIT
        self._accepts = accepts
        self._pending = bytearray()
        self._send_lock = threading.Lock()
        self._unheard_bytes = 0
        self.doorbell = -1
        self.streams: list[int] = []

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, kind: str, **fields: Any) -> bool:
        """Send one message; blocks while the socket is full. False when the peer is gone."""
        line = _to_json({"kind": kind, **fields}).encode() + b"\n"
        try:
            with self._send_lock:
                self._sock.sendall(line)
        except (BrokenPipeError, ConnectionError, OSError):
            return False
        self._unheard_bytes += len(line)
        # Many quiet ones ring as well, before they fill the socket and the training waits for the agent.
        if kind not in QUIET_KINDS or self._unheard_bytes > RECEIVE_BYTES:
            self.ring()
        return True

    def send_hello(self, **fields: Any) -> bool:
        """Send the hello, and with it the doorbell that every later message but a quiet one rings."""
        doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        line = _to_json({"kind": "hello", **fields}).encode() + b"\n"
        try:
            with self._send_lock:
                socket.send_fds(self._sock, [line], [doorbell])
        except (BrokenPipeError, ConnectionError, OSError):
            os.close(doorbell)
            return False
        self.doorbell = doorbell
        return True

    def send_welcome(self, streams: Sequence[int], **fields: Any) -> bool:
        """Send the welcome, and with it descriptors for stdout and stderr where they change. False: nobody is there."""
        line = _to_json({"kind": "welcome", **fields}).encode() + b"\n"
        try:
            with self._send_lock:
                if streams:
                    socket.send_fds(self._sock, [line], list(streams))
                else:
                    self._sock.sendall(line)
        except (BrokenPipeError, ConnectionError, OSError):
            return False
        return True

    def ring(self) -> None:
        """Make the agent read what was sent, now. Does nothing before the hello; never blocks."""
        self._unheard_bytes = 0
        if self.doorbell >= 0:
            with contextlib.suppress(BlockingIOError):  # it rings already, as often as it can count
                os.eventfd_write(self.doorbell, 1)

    def hear(self) -> None:
        """Take the ringing back; call it before `receive`, so that no later one is lost."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.doorbell)

    def receive(self) -> list[Message] | None:
        """Read what is there, at least one read. None when the peer is gone and everything it sent was returned.

        The worker's end blocks while nothing has arrived, the agent's returns nothing. Raises ChannelError on a line
        that is no message.
        """
        try:
            data = self._receive_bytes()
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            return None
        self._pending += data
        return list(self._split())

    def _receive_bytes(self) -> bytes:
        is_worker = self._accepts is AGENT_KINDS
        if self.doorbell >= 0 and not is_worker:
            return self._sock.recv(RECEIVE_BYTES, self._flags)
        data, fds, *_ = socket.recv_fds(self._sock, RECEIVE_BYTES, 2, self._flags | socket.MSG_CMSG_CLOEXEC)
        if is_worker:
            self.streams += fds
        elif fds:
            self.doorbell = fds[0]
        return data

    def _split(self) -> Iterator[Message]:
        while (end := self._pending.find(b"\n")) >= 0:
            line = bytes(self._pending[:end])
            del self._pending[: end + 1]
            yield self._parse(line)
        if len(self._pending) > MAX_LINE_BYTES:
            raise ChannelError(
                f"expected a line of at most {MAX_LINE_BYTES} bytes, saw {len(self._pending)} without an end"
            )

    def _parse(self, line: bytes) -> Message:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise ChannelError(f"expected a JSON line, saw {line[:80]!r}") from None
        kind = message.get("kind") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(kind, str) or kind not in self._accepts:
            raise ChannelError(f"expected a message of kinds {sorted(self._accepts)}, saw {line[:80]!r}")
        return message

    def close(self) -> None:
        self._sock.close()
        if self.doorbell >= 0:
            os.close(self.doorbell)
            self.doorbell = -1


def channel_pair() -> tuple[Channel, socket.socket]:
    """The agent's end, which never waits when it is read, and the raw socket that the worker inherits."""
    agent_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(agent_end, accepts=WORKER_KINDS, waits=False), worker_end


def worker_channel(fd: int) -> Channel:
    """The worker's end, on the inherited descriptor `fd`; it blocks when read."""
    return Channel(socket.socket(fileno=fd), accepts=AGENT_KINDS, waits=True)
