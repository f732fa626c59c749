"""Messages between an agent and its workers: JSON lines over one Unix stream socket per worker.

A message is one JSON object on one line with the key `kind`. Nothing is unpickled. A line longer than
MAX_LINE_BYTES, or one that is not a JSON object with a known kind, ends the conversation with ChannelError.

    worker → agent                            agent → worker
    hello        pid, version                 welcome   run facts, provisional rank
    ready        waits to enter               round     the Round to build
    position     steps begun (answers hold)   hold      say where you are, and pause at the next step
    parked       stands still, step           stop_at   run up to this step, then park
    suspect      a collective failed          fence     the generation is broken
    resumed      seconds of each stage        save      write a checkpoint now, then tell
    commit       one committed step
    epoch_finished, epoch_left, evaluated, saved, save_failed, resumed_from, exception, finished
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
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
AGENT_KINDS: Final = frozenset({"welcome", "round", "hold", "stop_at", "fence", "save"})

Message = dict[str, Any]

_to_json: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=True).encode


class ChannelError(ElasticTrainError):
    """The peer sent something that is no message of this version."""


class Channel:
    """One end of a conversation. `send` may be called from several threads; receiving belongs to one."""

    def __init__(self, sock: socket.socket, *, accepts: frozenset[str]) -> None:
        self._sock = sock
        self._accepts = accepts
        self._pending = bytearray()
        self._send_lock = threading.Lock()

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
        return True

    def receive(self) -> list[Message] | None:
        """Read what is there, at least one read. None when the peer is gone and everything it sent was returned.

        Blocks if the socket blocks and nothing has arrived. Raises ChannelError on a line that is no message.
        """
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            return None
        self._pending += data
        return list(self._split())

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


def channel_pair() -> tuple[Channel, socket.socket]:
    """The agent's end, which is read only when something is there, and the raw socket that the worker inherits."""
    agent_end, worker_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(agent_end, accepts=WORKER_KINDS), worker_end


def worker_channel(fd: int) -> Channel:
    """The worker's end, on the inherited descriptor `fd`; it blocks when read."""
    return Channel(socket.socket(fileno=fd), accepts=AGENT_KINDS)
