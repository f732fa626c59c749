"""How a value lies in etcd: the value, who wrote it, and, after etcd has lost its data, what it was before. Pure.

    {"v": 1, "by": "<writer>/<number>", "value": {...}, "was": {"created": 7, "revision": 9, "base": 1048590}}

`by` is unique to one write: a writer whose answer was lost finds out by it whether its write took effect. `was` is
there only on a key that was put back after etcd came up without its data (see `watching.py`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from elastictrain.rendezvous.store import Value

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Was:
    """The numbers of a key from before etcd lost it.

    `revision` is None once the key was written again. `base` is added to every revision of etcd's new count, so that
    revisions go on growing; it is the same for all nodes because they read it here.
    """

    created: int
    revision: int | None
    base: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """One value with its marks."""

    by: str
    value: Value
    was: Was | None = None

    def encode(self) -> bytes:
        found: dict[str, Any] = {"v": FORMAT_VERSION, "by": self.by, "value": self.value}
        if self.was is not None:
            found["was"] = {"created": self.was.created, "revision": self.was.revision, "base": self.was.base}
        return json.dumps(found, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes) -> Envelope | None:
    """Read a value back; None for what this version of elastictrain did not write."""
    try:
        found = json.loads(data)
        if found["v"] != FORMAT_VERSION or not isinstance(found["value"], dict):
            return None
        was = found.get("was")
        return Envelope(
            by=str(found["by"]),
            value=found["value"],
            was=None if was is None else _read_was(was),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _read_was(found: Any) -> Was:
    revision = found["revision"]
    return Was(
        created=int(found["created"]), revision=None if revision is None else int(revision), base=int(found["base"])
    )
