"""JSON as RFC 8259 has it: no NaN, no key given twice, no surprise exceptions. Pure."""

from __future__ import annotations

import json
from typing import Any

from elastictrain.errors import CheckpointError


def parse(data: bytes, *, what: str) -> Any:
    """Parse `data` (UTF-8). Raises CheckpointError, which names `what`, on anything that is not strict JSON."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique)
    # JSONDecodeError, UnicodeDecodeError and the limit on digits are all ValueErrors; depth is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: expected strict JSON, saw {data[:24]!r}... ({error})") from None


def dump(value: Any) -> bytes:
    """Write `value` on one line of ASCII. Raises ValueError or TypeError where it is not strict JSON."""
    return json.dumps(value, allow_nan=False).encode("ascii")


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is given twice in one object")
    return value
