"""Named tensors as one safetensors file, which any tool of that format opens.

Written here, piece by piece, so that the digests come from the memory that was captured; read by the safetensors
library, so that its checks of header and offsets guard the way back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import safetensors
import safetensors.torch
import torch

from elastictrain.errors import CheckpointError

_ALIGNMENT_BYTES = 4096
_MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library accepts."""

# Only dtypes that every safetensors since 0.4.3 reads; another is stored as its bytes, and the tree knows what it was.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def to_pieces(tensors: Mapping[str, torch.Tensor]) -> list[bytes | memoryview]:
    """Return the file's content in order, without copying: `tensors` are contiguous, on the CPU, and stay unchanged.

    The data begins at a 4 KiB boundary and every tensor at a multiple of its element size. Raises CheckpointError
    where the format cannot hold the tensors.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    pieces: list[bytes | memoryview] = []
    offset = 0
    # Wide elements first keeps each aligned without holes, which the format forbids.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        raw = _bytes_of(name, tensor)
        stored = _NAMES.get(tensor.dtype)
        header[name] = {
            "dtype": stored or "U8",
            "shape": list(tensor.shape) if stored else [len(raw)],
            "data_offsets": [offset, offset + len(raw)],
        }
        offset += len(raw)
        if len(raw):
            pieces.append(raw)
    text = json.dumps(header, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(tensors)} tensors need a header of {len(text)} bytes; store fewer, larger ones")
    return [len(text).to_bytes(8, "little") + text, *pieces]


def from_bytes(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, each with memory of its own. Raises CheckpointError."""
    try:
        return safetensors.torch.load(data)
    # The library raises its own error for the format, and KeyError or RuntimeError for a dtype or shape torch lacks.
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError, AssertionError) as error:
        raise CheckpointError(
            f"expected a safetensors file, saw {data[:16]!r}... ({type(error).__name__}: {error})"
        ) from None


def _bytes_of(name: str, tensor: torch.Tensor) -> memoryview:
    try:
        return tensor.reshape(-1).view(torch.uint8).numpy().data
    except RuntimeError as error:
        raise CheckpointError(f"state at {name}: cannot store a tensor of {tensor.dtype} ({error})") from None
