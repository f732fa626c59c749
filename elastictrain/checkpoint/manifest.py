"""The manifest: what makes a folder of files a checkpoint. Pure.

The file is one JSON object, `{"digest": "<xxh3_64>", "manifest": {...}}`, in exactly this framing; the digest covers
the bytes of the inner object, so no bit of the file can change unnoticed. A digest here finds accidents (torn writes,
flipped bits, swapped files); it is no signature against somebody who means harm.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

import xxhash

from elastictrain.checkpoint import strict_json
from elastictrain.checkpoint.layout import MANIFEST_NAME
from elastictrain.errors import CheckpointError

FORMAT_VERSION = 1
MAX_CHUNK_BYTES = 8 * 1024 * 1024
MAX_MANIFEST_BYTES = 64 * 1024 * 1024

_HEAD, _MIDDLE, _TAIL = b'{"digest": "', b'", "manifest": ', b"}\n"
_DIGEST_CHARS = 16
_DIGEST = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One data file. `digests` holds the xxh3_64 of each `chunk_bytes` of it in hex; the last may be short."""

    name: str
    size_bytes: int
    chunk_bytes: int
    digests: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_name(self.name)
        _check_int("files.size_bytes", self.size_bytes, least=0)
        _check_int("files.chunk_bytes", self.chunk_bytes, least=1, most=MAX_CHUNK_BYTES)
        if type(self.digests) is not tuple or not all(type(d) is str and _DIGEST.fullmatch(d) for d in self.digests):
            _refuse("files.digests", "a list of 16 lower-case hex digits each", self.digests)
        expected = -(-self.size_bytes // self.chunk_bytes)
        if len(self.digests) != expected:
            _refuse("files.digests", f"{expected} digests for {self.size_bytes} bytes", len(self.digests))

    def chunk_range(self, index: int) -> tuple[int, int]:
        """First byte and end of chunk `index`."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint's facts. `cursor` is a JSON object; `created_wall_s` is for people and never compared."""

    run_id: str
    generation: int
    step: int
    cursor: Mapping[str, Any]
    created_wall_s: float
    world_size: int
    files: tuple[FileRecord, ...]
    version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if type(self.version) is not int or self.version != FORMAT_VERSION:
            _refuse("version", f"{FORMAT_VERSION} (another elastictrain wrote it: use that one)", self.version)
        if type(self.run_id) is not str or not self.run_id:
            _refuse("run_id", "a name", self.run_id)
        _check_int("generation", self.generation, least=0)
        _check_int("step", self.step, least=0)
        _check_int("world_size", self.world_size, least=1)
        if type(self.created_wall_s) is not float or not math.isfinite(self.created_wall_s):
            _refuse("created_wall_s", "seconds as a finite float", self.created_wall_s)
        if type(self.files) is not tuple or not all(isinstance(record, FileRecord) for record in self.files):
            _refuse("files", "a tuple of FileRecord", self.files)
        names = [record.name for record in self.files]
        if len(set(names)) != len(names):
            _refuse("files.name", "each file once", names)
        _check_cursor(self.cursor)

    @property
    def size_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(record.size_bytes for record in self.files)

    def file(self, name: str) -> FileRecord | None:
        return next((record for record in self.files if record.name == name), None)

    def to_json_bytes(self) -> bytes:
        """Return the content of manifest.json, with the digest of itself."""
        body = strict_json.dump(
            {
                "version": self.version,
                "run_id": self.run_id,
                "generation": self.generation,
                "step": self.step,
                "cursor": dict(self.cursor),
                "created_wall_s": self.created_wall_s,
                "world_size": self.world_size,
                "files": [asdict(record) for record in self.files],
            }
        )
        return _HEAD + digest(body).encode("ascii") + _MIDDLE + body + _TAIL

    @classmethod
    def from_json_bytes(cls, data: bytes) -> Manifest:
        """Read what `to_json_bytes` wrote. Raises CheckpointError with the rule that failed."""
        value = strict_json.parse(_checked_body(data), what=MANIFEST_NAME)
        # The version is looked at first: the other rules are those of this version only.
        if isinstance(value, dict) and value.get("version") != FORMAT_VERSION:
            _refuse("version", f"{FORMAT_VERSION} (another elastictrain wrote it: use that one)", value.get("version"))
        content = _exact_fields(value, cls, rule="fields")
        files = content.pop("files")
        if type(files) is not list:
            _refuse("files", "a list", files)
        return cls(files=tuple(_record(entry) for entry in files), **content)


def digest(data: bytes | memoryview) -> str:
    """Return the xxh3_64 of `data` as 16 hex characters."""
    return xxhash.xxh3_64_hexdigest(data)


def _checked_body(data: bytes) -> bytes:
    start = len(_HEAD) + _DIGEST_CHARS + len(_MIDDLE)
    seen = data[len(_HEAD) : len(_HEAD) + _DIGEST_CHARS]
    framed = data.startswith(_HEAD) and data[start - len(_MIDDLE) : start] == _MIDDLE and data.endswith(_TAIL)
    if not framed or len(data) < start + len(_TAIL):
        _refuse("framing", f"{_HEAD.decode()}<digest>...", data[:40])
    body = data[start : -len(_TAIL)]
    if digest(body).encode("ascii") != seen:
        _refuse("digest", f"{seen!r} over itself", digest(body))
    return body


def _record(entry: Any) -> FileRecord:
    content = _exact_fields(entry, FileRecord, rule="files.fields")
    digests = content.pop("digests")
    if type(digests) is not list:
        _refuse("files.digests", "a list", digests)
    return FileRecord(digests=tuple(digests), **content)


def _exact_fields(value: Any, cls: type[Manifest] | type[FileRecord], *, rule: str) -> dict[str, Any]:
    expected = {field.name for field in fields(cls)}
    if type(value) is not dict or set(value) != expected:
        _refuse(rule, f"exactly {sorted(expected)}", sorted(value) if isinstance(value, dict) else value)
    return dict(value)


def _check_name(name: object) -> None:
    """A name is one plain path component, so that no manifest can point out of its folder."""
    if (
        type(name) is not str
        or not 0 < len(name) <= 200
        or name.startswith(".")
        or ".." in name
        or not name.isascii()
        or not name.isprintable()
        or any(char in "/\\" for char in name)
        or name == MANIFEST_NAME
    ):
        _refuse("files.name", "a plain file name in the folder itself, not hidden", name)


def _check_int(rule: str, value: object, *, least: int, most: int = 2**63 - 1) -> None:
    if type(value) is not int or not least <= value <= most:
        _refuse(rule, f"an integer from {least} to {most}", value)


def _check_cursor(cursor: object) -> None:
    if not isinstance(cursor, Mapping):
        _refuse("cursor", "a JSON object", cursor)
    content: dict[object, object] = dict(cursor)
    try:
        same = bool(strict_json.parse(strict_json.dump(content), what="cursor") == content)
    except (TypeError, ValueError, RecursionError, CheckpointError):
        same = False
    # JSON would turn an integer key or a tuple into something else without a word.
    if not same:
        _refuse("cursor", "only what JSON keeps as it is (string keys, lists, numbers, strings)", cursor)


def _refuse(rule: str, expected: str, seen: object) -> NoReturn:
    raise CheckpointError(f"{MANIFEST_NAME} breaks the rule '{rule}': expected {expected}, saw {seen!r:.200}")
