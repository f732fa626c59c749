"""One rank's tensors into those of the others: every byte once over each connection, and copied as little as can be.

Large tensors are sent as they lie, in slices of at most SLICE_BYTES; small ones travel together in flat buckets of that
size. Some of these pieces are under way at a time, so that what is copied is copied while others travel. A rank that
only has to pass a state on holds no more of it than those.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from elastictrain.worker.flight import Pending

if TYPE_CHECKING:
    from elastictrain.worker.collectives import Communicator

SLICE_BYTES: Final = 64 << 20
# Below it the fixed cost of a collective is more than that of the copy.
LARGE_BYTES: Final = 1 << 20
IN_FLIGHT: Final = 3
ALIGN_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Part:
    """`length` bytes of tensor `number`, from its byte `first`, which lie at byte `place` of a piece."""

    number: int
    first: int
    place: int
    length: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one collective carries. A single part is sent from where it lies."""

    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return self.parts[-1].place + self.parts[-1].length

    @property
    def is_single(self) -> bool:
        return len(self.parts) == 1


def plan(sizes: Sequence[int]) -> list[Piece]:
    """Cut tensors of these sizes (bytes) into pieces; the same on every rank."""
    pieces: list[Piece] = []
    bucket: list[Part] = []
    for number, size in enumerate(sizes):
        if size >= LARGE_BYTES:
            starts = range(0, size, SLICE_BYTES)
            pieces += [Piece((Part(number, first, 0, min(SLICE_BYTES, size - first)),)) for first in starts]
        elif size:
            place = -(-(bucket[-1].place + bucket[-1].length) // ALIGN_BYTES) * ALIGN_BYTES if bucket else 0
            if place + size > SLICE_BYTES:
                pieces.append(Piece(tuple(bucket)))
                bucket, place = [], 0
            bucket.append(Part(number, 0, place, size))
    if bucket:
        pieces.append(Piece(tuple(bucket)))
    return pieces


def broadcast(comm: Communicator, tensors: Sequence[torch.Tensor] | None, sizes: Sequence[int], source: int) -> None:
    """Fill `tensors` (contiguous, on the communicator's device, of `sizes` bytes) from those of rank `source`; blocks.

    Every rank calls it; one that has nothing to fill gives None. Raises StepAborted when the group broke: what
    `tensors` hold then is undefined, but at the source, and the transport may go on to write there.
    """
    pieces = plan(sizes)
    _Broadcast(comm, tensors, source, max((piece.num_bytes for piece in pieces), default=0)).run(pieces)


class _Broadcast:
    """One call of `broadcast`; `buffer_bytes` is the size of its largest piece."""

    def __init__(
        self, comm: Communicator, tensors: Sequence[torch.Tensor] | None, source: int, buffer_bytes: int
    ) -> None:
        self._comm = comm
        self._source = source
        self._buffer_bytes = buffer_bytes
        self._flat = None if tensors is None else [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        self._flying: deque[tuple[Piece, torch.Tensor | None, Pending]] = deque()
        self._free: list[torch.Tensor] = []

    def run(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if len(self._flying) == IN_FLIGHT:
                self._land()
            self._send(piece)
        while self._flying:
            self._land()

    def _send(self, piece: Piece) -> None:
        if self._flat is not None and piece.is_single:
            buffer, carrier = None, _own(self._flat, piece.parts[0])
        else:
            buffer = self._free.pop() if self._free else self._make_buffer()
            carrier = buffer[: piece.num_bytes]
            if self._flat is not None and self._comm.rank == self._source:
                for part in piece.parts:
                    carrier[part.place : part.place + part.length].copy_(_own(self._flat, part))
        self._flying.append((piece, buffer, self._comm.broadcast_async(carrier, self._source)))

    def _land(self) -> None:
        """Wait for the piece that was sent first, and put it where it belongs."""
        piece, buffer, flight = self._flying.popleft()
        self._comm.wait(flight)
        if buffer is None:
            return
        if self._flat is not None and self._comm.rank != self._source:
            for part in piece.parts:
                _own(self._flat, part).copy_(buffer[part.place : part.place + part.length])
        self._free.append(buffer)

    def _make_buffer(self) -> torch.Tensor:
        return torch.empty(self._buffer_bytes, dtype=torch.uint8, device=self._comm.device)


def _own(flat: Sequence[torch.Tensor], part: Part) -> torch.Tensor:
    return flat[part.number][part.first : part.first + part.length]
