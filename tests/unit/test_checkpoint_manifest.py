"""The manifest: what it says comes back, and nothing that it must not say is accepted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xxhash

from elastictrain.checkpoint.layout import folder_name, parse_folder_name
from elastictrain.checkpoint.manifest import FileRecord, Manifest
from elastictrain.errors import CheckpointError

D = "0123456789abcdef"


def record(**changes: Any) -> FileRecord:
    return FileRecord(**{"name": "tree.json", "size_bytes": 10, "chunk_bytes": 8, "digests": (D, D), **changes})


def manifest(**changes: Any) -> Manifest:
    facts: dict[str, Any] = {
        "run_id": "digits",
        "generation": 4,
        "step": 1200,
        "cursor": {"epoch": 1, "samples": [3, 4.5, None, "x"]},
        "created_wall_s": 1.7e9,
        "world_size": 3,
        "files": (record(), record(name="state.safetensors", size_bytes=0, digests=())),
    }
    return Manifest(**{**facts, **changes})


def framed(body: Any) -> bytes:
    """Frame a body as the writer does, digest and all, so that only the rules can refuse it."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b'{"digest": "' + xxhash.xxh3_64_hexdigest(text).encode() + b'", "manifest": ' + text + b"}\n"


def test_manifest_comes_back_equal_and_is_plain_json_when_written() -> None:
    data = manifest().to_json_bytes()
    assert Manifest.from_json_bytes(data) == manifest()
    assert json.loads(data)["manifest"]["step"] == 1200
    assert framed(json.loads(data)["manifest"]) == data


def test_manifest_is_refused_when_any_single_bit_is_flipped() -> None:
    data = manifest().to_json_bytes()
    for position in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[position] ^= 1 << bit
            with pytest.raises(CheckpointError, match=r"manifest\.json"):
                Manifest.from_json_bytes(bytes(bad))


def test_manifest_is_refused_when_cut_anywhere_or_followed_by_more() -> None:
    data = manifest().to_json_bytes()
    for bad in [*(data[:length] for length in range(len(data))), data + b"\n", data + data, b"\0" * len(data)]:
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            Manifest.from_json_bytes(bad)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a/b",
        "/etc/passwd",
        "..",
        "../x",
        "a..b",
        ".hidden",
        "a\\b",
        "a\0b",
        "a\nb",
        "é",
        "x" * 201,
        "manifest.json",
        3,
    ],
)
def test_file_record_is_refused_when_the_name_is_no_plain_file(name: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'files\.name'"):
        record(name=name)
    body = json.loads(manifest().to_json_bytes())["manifest"]
    body["files"][0]["name"] = name
    with pytest.raises(CheckpointError, match=r"'files\.name'"):
        Manifest.from_json_bytes(framed(body))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"size_bytes": -1}, r"files\.size_bytes"),
        ({"size_bytes": 10.0}, r"files\.size_bytes"),
        ({"size_bytes": True}, r"files\.size_bytes"),
        ({"size_bytes": 17}, r"files\.digests"),
        ({"chunk_bytes": 0}, r"files\.chunk_bytes"),
        ({"chunk_bytes": 8 * 1024 * 1024 + 1}, r"files\.chunk_bytes"),
        ({"digests": (D,)}, r"files\.digests"),
        ({"digests": (D, D.upper())}, r"files\.digests"),
        ({"digests": (D, 5)}, r"files\.digests"),
    ],
)
def test_file_record_is_refused_when_its_numbers_disagree(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{rule}'"):
        record(**changes)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"version": 2}, "version"),
        ({"version": True}, "version"),
        ({"run_id": ""}, "run_id"),
        ({"run_id": 7}, "run_id"),
        ({"generation": -1}, "generation"),
        ({"step": "5"}, "step"),
        ({"step": 2**63}, "step"),
        ({"world_size": 0}, "world_size"),
        ({"created_wall_s": float("nan")}, "created_wall_s"),
        ({"created_wall_s": 5}, "created_wall_s"),
        ({"cursor": [1]}, "cursor"),
        ({"cursor": {1: 2}}, "cursor"),
        ({"cursor": {"a": (1, 2)}}, "cursor"),
        ({"cursor": {"a": float("inf")}}, "cursor"),
        ({"cursor": {"a": object()}}, "cursor"),
        ({"files": (record(), record())}, r"files\.name"),
    ],
)
def test_manifest_names_the_rule_when_a_fact_is_wrong(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{rule}'"):
        manifest(**changes)


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ([], "fields"),
        ({}, "version"),
        ({"version": 2, "anything": "else"}, "version"),
        (b"5", "fields"),
    ],
)
def test_manifest_is_refused_when_the_digest_fits_and_the_content_does_not(body: Any, rule: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{rule}'"):
        Manifest.from_json_bytes(framed(body))


@pytest.mark.parametrize("where", ["top", "file"])
@pytest.mark.parametrize("how", ["more", "less"])
def test_manifest_is_refused_when_fields_are_more_or_less_than_known(where: str, how: str) -> None:
    body = json.loads(manifest().to_json_bytes())["manifest"]
    target = body if where == "top" else body["files"][0]
    if how == "more":
        target["extra"] = 1
    else:
        target.pop("run_id", None)
        target.pop("name", None)
    with pytest.raises(CheckpointError, match=r"fields'"):
        Manifest.from_json_bytes(framed(body))


@pytest.mark.parametrize("body", [b"[" * 100_000, b"NaN", b'{"a":1,"a":1}', b"\xff", b"", b"\x80\x04N."])
def test_manifest_is_refused_when_the_body_is_not_strict_json(body: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Manifest.from_json_bytes(framed(body))


def test_folder_name_is_the_only_name_that_parses_when_names_are_alike() -> None:
    for place in [(0, 0), (1200, 0), (1200, 3), (10**12, 12)]:
        assert parse_folder_name(folder_name(*place)) == place
    assert folder_name(1200) == "step-0000001200"
    for name in [
        "step-1200",
        "step-0000001200.backup",
        "xstep-0000001200",
        "step-0000001200-a0",
        "step-0000001200-a01",
    ]:
        assert parse_folder_name(name) is None
    for name in [
        "step-00000001200",
        "step-0000001200\n",
        "step-００００００１２００",
        "step-0000001200-a",
        ".step-0000001200",
    ]:
        assert parse_folder_name(name) is None
