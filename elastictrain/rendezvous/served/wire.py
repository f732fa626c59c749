"""How client and server of the served store write to each other: JSON objects in frames. No socket in here.

Each side begins with MAGIC, so that a stranger is known by its first bytes. A frame is its length (4 bytes,
big-endian), the object, and, once a connection has a key, a mark (HMAC-SHA256 over the frame's number on this
connection and the object): nobody can put in, leave out, change, repeat or reorder a frame. Without a secret there are
no marks.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any

MAGIC = b"ELTSTOR1"
PROTOCOL_VERSION = 1
MAX_GREETING_BYTES = 4096
"""Longest frame of somebody who has not proven anything yet."""
MAX_FRAME_BYTES = 16 << 20
_LENGTH_BYTES = 4
_MARK_BYTES = hashlib.sha256().digest_size

Message = Mapping[str, Any]


class WireError(Exception):
    """What came is no frame of this protocol; the connection cannot be used any more."""


class Seal:
    """Marks the frames of one direction of one connection, and checks them, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def mark(self, body: bytes) -> bytes:
        """The mark of the next frame."""
        numbered = self._number.to_bytes(8, "big") + body
        self._number += 1
        return hmac.digest(self._key, numbered, "sha256")

    def check(self, body: bytes, mark: bytes) -> None:
        """Raise WireError unless `mark` belongs to the next frame."""
        if not hmac.compare_digest(self.mark(body), mark):
            raise WireError("a frame without a valid mark")


def encode(message: Message, seal: Seal | None) -> bytes:
    """One frame. Raises WireError for one that the other side would refuse."""
    try:
        # ASCII only: half a surrogate pair, which JSON can bring in, could not be sent on to others otherwise.
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message that is no JSON: {error}") from None
    if len(body) > MAX_FRAME_BYTES - _MARK_BYTES:
        raise WireError(f"a message of {len(body)} bytes: expected at most {MAX_FRAME_BYTES}")
    mark = b"" if seal is None else seal.mark(body)
    return (len(body) + len(mark)).to_bytes(_LENGTH_BYTES, "big") + body + mark


class Reader:
    """Takes in bytes as they come and gives whole messages.

    Holds at most one frame's bytes beyond what `feed` brought, and never more than were really sent. `seal` and
    `max_bytes` hold from the next message on.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._has_magic = False
        self.seal: Seal | None = None
        self.max_bytes = MAX_GREETING_BYTES

    @property
    def is_amid_frame(self) -> bool:
        """Part of something has come."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take in what was received. Raises WireError at the first wrong byte."""
        self._buffer += data
        if not self._has_magic:
            begin = bytes(self._buffer[: len(MAGIC)])
            if not MAGIC.startswith(begin):
                raise WireError(f"a greeting that begins with {begin!r}")
            if begin == MAGIC:
                self._has_magic = True
                del self._buffer[: len(MAGIC)]

    def next(self) -> dict[str, Any] | None:
        """The next message, None until it is whole. Raises WireError."""
        if not self._has_magic or len(self._buffer) < _LENGTH_BYTES:
            return None
        length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if length > self.max_bytes:
            raise WireError(f"a frame of {length} bytes: expected at most {self.max_bytes}")
        end = _LENGTH_BYTES + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH_BYTES:end])
        del self._buffer[:end]
        if self.seal is not None:
            body, mark = body[:-_MARK_BYTES], body[-_MARK_BYTES:]
            self.seal.check(body, mark)
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise WireError("a frame that is no JSON") from None
        if not isinstance(message, dict):
            raise WireError("a frame that is no JSON object")
        return message
