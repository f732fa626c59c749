"""State as typed JSON and named tensors, and back, exactly; nothing here can run code from a file.

JSON values stand for themselves; an object stands for a dict, unless its one key begins with `$`:

    $int "-0x1f"   $float "7ff8..."   $str [code points]   $bytes base64   $complex [re, im]
    $tuple [...]   $set [...]   $frozenset [...]   $dict [[key, value], ...]
    $tensor {name, dtype, shape}   $size [...]   $dtype "bfloat16"   $device "cuda:0"
    $array {tensor, dtype, shape}   $number {dtype, bytes}                            (numpy)

Dicts keep their order and come back as plain dicts; a Parameter comes back as a Tensor without gradient.
"""

from __future__ import annotations

import base64
import collections
import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch

from elastictrain.errors import CheckpointError

MAX_DEPTH = 100
_MAX_NAME_CHARS = 400
_NUMERIC = re.compile(r"[<>|=]?[biufc][0-9]{1,2}", re.ASCII)
_HEX_INT = re.compile(r"-?0x[0-9a-f]+", re.ASCII)
_DICT_TYPES = (dict, collections.OrderedDict, collections.defaultdict)


@dataclass(slots=True)
class Encoded:
    """`tree` is JSON-able; `tensors` maps unique path-like names to the tensors themselves (no copy, no gradient)."""

    tree: Any
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def encode(value: object) -> Encoded:
    """Take `value` apart. Numpy arrays are copied, tensors are referenced.

    Raises CheckpointError with the place in the tree for a type that could not come back exactly.
    """
    encoder = _Encoder()
    return Encoded(tree=encoder.node(value, "", 0), tensors=encoder.tensors)


def decode(tree: object, tensors: Mapping[str, torch.Tensor]) -> object:
    """Put together what `encode` took apart; tensors are used as they are, or viewed where stored as raw bytes.

    Raises CheckpointError for anything malformed, for a tensor that is missing, unused, or of another dtype or shape.
    """
    decoder = _Decoder(tensors)
    value = decoder.node(tree, "", 0)
    unused = sorted(set(tensors) - decoder.used)
    if unused:
        _malformed("", "every stored tensor to have a place", f"{len(unused)} without, the first is {unused[0]!r}")
    return value


# ---- taking apart ------------------------------------------------------------------------------------------------


def _encode_int(value: int) -> Any:
    # Longer ones go as hexadecimal: decimal conversion is quadratic, limited by Python, and lossy in other readers.
    return value if value.bit_length() < 64 else {"$int": hex(value)}


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _encode_str(value: str) -> Any:
    return value if _is_clean(value) else {"$str": [ord(char) for char in value]}


def _encode_bytes(value: bytes) -> Any:
    return {"$bytes": base64.b64encode(value).decode("ascii")}


_SCALARS: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: _encode_bytes,
    complex: lambda value: {"$complex": [_encode_float(value.real), _encode_float(value.imag)]},
}


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._repeats: dict[str, int] = {}

    def node(self, value: Any, path: str, depth: int) -> Any:
        scalar = _SCALARS.get(type(value))
        if scalar is not None:
            return scalar(value)
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"state at {path[:200]}...: nested more than {MAX_DEPTH} deep, or it contains itself; store it flat"
            )
        if type(value) is list:
            return self._items(value, path, depth)
        if type(value) is tuple:
            return {"$tuple": self._items(value, path, depth)}
        if type(value) in _DICT_TYPES:
            return self._dict(value, path, depth)
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._tensor(value, path)}
        if type(value) is np.ndarray:
            return {"$array": self._array(value, path)}
        if isinstance(value, np.generic):
            _check_numeric(value.dtype, value, path)
            return {"$number": {"dtype": value.dtype.str, "bytes": base64.b64encode(value.tobytes()).decode("ascii")}}
        return self._rare(value, path, depth)

    def _items(self, values: list[Any] | tuple[Any, ...], path: str, depth: int) -> list[Any]:
        encoded = []
        for index, value in enumerate(values):
            scalar = _SCALARS.get(type(value))
            # A Mersenne twister has 624 numbers: a path is made only for what can need one.
            encoded.append(self.node(value, _join(path, index), depth + 1) if scalar is None else scalar(value))
        return encoded

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if all(type(key) is str and not key.startswith("$") and _is_clean(key) for key in value):
            return {key: self.node(item, _join(path, key), depth + 1) for key, item in value.items()}
        return {
            "$dict": [
                [self._hashable(key, path, "key", depth + 1), self.node(item, _join(path, key), depth + 1)]
                for key, item in value.items()
            ]
        }

    def _hashable(self, value: Any, path: str, role: str, depth: int) -> Any:
        """Encode a dict key or a set's member: a scalar, or a tuple or frozenset of such."""
        if type(value) in (tuple, frozenset) and depth <= MAX_DEPTH:
            encoded = [self._hashable(item, path, role, depth + 1) for item in value]
            return {"$tuple": encoded} if type(value) is tuple else {"$frozenset": _in_order(encoded)}
        scalar = _SCALARS.get(type(value))
        if scalar is None:
            _refuse(value, path, f"as a {role}; use None, a number, a string or bytes, or a tuple of such")
        return scalar(value)

    def _rare(self, value: Any, path: str, depth: int) -> Any:
        if type(value) in (set, frozenset):
            tag = "$set" if type(value) is set else "$frozenset"
            return {tag: _in_order([self._hashable(item, path, "member", depth + 1) for item in value])}
        if type(value) is torch.Size:
            return {"$size": [int(length) for length in value]}
        if type(value) is torch.dtype:
            return {"$dtype": _dtype_name(value)}
        if type(value) is torch.device:
            return {"$device": str(value)}
        advice = "store plain values in its state_dict(): numbers, strings, bytes, lists, dicts, sets, arrays, tensors"
        if isinstance(value, tuple):
            advice = "store it as a plain tuple or dict"
        elif hasattr(type(value), "__members__"):
            advice = "store the member's name or value"
        _refuse(value, path, f"here; {advice}")

    def _tensor(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            _refuse(value, path, "here; store a plain tensor (its full value) instead")
        if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            kind = f"{value.layout} {value.dtype} on {value.device}"
            _refuse(value, path, f"that is not dense with data of its own ({kind}); store its dense value")
        name = self._add(path, value.detach())
        return {"name": name, "dtype": _dtype_name(value.dtype), "shape": list(value.shape)}

    def _array(self, value: np.ndarray[Any, Any], path: str) -> dict[str, Any]:
        _check_numeric(value.dtype, value, path)
        raw = bytearray(value.tobytes())
        data = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return {"tensor": self._add(path, data), "dtype": value.dtype.str, "shape": list(value.shape)}

    def _add(self, path: str, tensor: torch.Tensor) -> str:
        """Name a tensor by its path, made unique: `{"a.b": x}` and `{"a": {"b": y}}` may meet in one tree."""
        base = path[:_MAX_NAME_CHARS].encode("utf-8", "backslashreplace").decode("utf-8") or "value"
        name = base
        # The safetensors format has one name of its own.
        while name in self.tensors or name == "__metadata__":
            self._repeats[base] = self._repeats.get(base, 1) + 1
            name = f"{base}#{self._repeats[base]}"
        self.tensors[name] = tensor
        return name


def _join(path: str, key: object) -> str:
    try:
        text = key if type(key) is str else repr(key)[:80]
    except ValueError:  # an integer with more decimal digits than Python is willing to write
        text = f"<{type(key).__name__}>"
    return f"{path}.{text}" if path else text


def _in_order(encoded: list[Any]) -> list[Any]:
    """Order a set's members by their text, so that equal states give equal files."""
    return sorted(encoded, key=lambda item: json.dumps(item))


def _is_clean(text: str) -> bool:
    """Whether JSON keeps it: a lone surrogate is no Unicode text, and two of them would be joined by a reader."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _check_numeric(dtype: np.dtype[Any], value: object, path: str) -> None:
    if dtype.kind not in "biufc" or _NUMERIC.fullmatch(dtype.str) is None:
        _refuse(value, path, f"of dtype {dtype}; only bool and numeric ones are stored, so convert it or use a list")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse(value: object, path: str, where_and_advice: str) -> NoReturn:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(f"state at {path or '(top)'}: cannot store a {kind} {where_and_advice}")


# ---- putting together --------------------------------------------------------------------------------------------


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.used: set[str] = set()
        self._tags: dict[str, Callable[[Any, str, int], Any]] = {
            "$int": self._int,
            "$float": self._float,
            "$str": self._str,
            "$bytes": self._bytes,
            "$complex": self._complex,
            "$tuple": lambda payload, path, depth: tuple(self._list(payload, path, depth)),
            "$set": lambda payload, path, depth: self._members(payload, path, depth, set),
            "$frozenset": lambda payload, path, depth: self._members(payload, path, depth, frozenset),
            "$dict": self._dict,
            "$tensor": self._tensor,
            "$size": lambda payload, path, _: torch.Size(_shape(payload, path)),
            "$dtype": lambda payload, path, _: _dtype_named(payload, path),
            "$device": self._device,
            "$array": self._array,
            "$number": self._number,
        }

    def node(self, node: Any, path: str, depth: int) -> Any:
        kind = type(node)
        if node is None or kind is bool or kind is int or kind is str:
            return node
        if kind is float:
            return node if math.isfinite(node) else _malformed(path, "a finite number", node)
        # A tagged value is two levels of JSON or more; what `encode` lets pass must pass here too.
        if depth > 2 * MAX_DEPTH + 4:
            _malformed(path, f"at most {MAX_DEPTH} levels", "more")
        if kind is list:
            return self._list(node, path, depth)
        if kind is not dict or not all(type(key) is str for key in node):
            _malformed(path, "a JSON value", node)
        tag = next((key for key in node if key.startswith("$")), None)
        if tag is None:
            return {key: self.node(item, _join(path, key), depth + 1) for key, item in node.items()}
        if len(node) != 1 or tag not in self._tags:
            _malformed(path, f"one of {' '.join(self._tags)} alone", list(node))
        return self._tags[tag](node[tag], path, depth + 1)

    def _list(self, payload: Any, path: str, depth: int) -> list[Any]:
        if type(payload) is not list:
            _malformed(path, "a list", payload)
        return [self.node(item, _join(path, index), depth + 1) for index, item in enumerate(payload)]

    def _members(self, payload: Any, path: str, depth: int, kind: Callable[[list[Any]], Any]) -> Any:
        items = self._list(payload, path, depth)
        try:
            members = kind(items)
        except TypeError as error:
            _malformed(path, "hashable members", error)
        return members if len(members) == len(items) else _malformed(path, "each member once", payload)

    def _dict(self, payload: Any, path: str, depth: int) -> dict[Any, Any]:
        if type(payload) is not list or not all(type(pair) is list and len(pair) == 2 for pair in payload):
            _malformed(path, "a list of [key, value]", payload)
        value: dict[Any, Any] = {}
        for pair in payload:
            key = self.node(pair[0], path, depth + 1)
            try:
                value[key] = self.node(pair[1], _join(path, key), depth + 1)
            except TypeError as error:
                _malformed(path, "a hashable key", error)
        return value if len(value) == len(payload) else _malformed(path, "each key once", "one twice")

    def _int(self, payload: Any, path: str, depth: int) -> int:
        if type(payload) is not str or _HEX_INT.fullmatch(payload) is None:
            _malformed(path, "a hexadecimal integer", payload)
        return int(payload, 16)

    def _float(self, payload: Any, path: str, depth: int) -> float:
        if type(payload) is not str or re.fullmatch(r"[0-9a-f]{16}", payload, re.ASCII) is None:
            _malformed(path, "the 16 hex digits of a float", payload)
        return float(struct.unpack(">d", bytes.fromhex(payload))[0])

    def _str(self, payload: Any, path: str, depth: int) -> str:
        if type(payload) is not list or not all(type(code) is int and 0 <= code < 0x110000 for code in payload):
            _malformed(path, "a list of code points", payload)
        return "".join(map(chr, payload))

    def _bytes(self, payload: Any, path: str, depth: int) -> bytes:
        try:
            return base64.b64decode(payload, validate=True) if type(payload) is str else _malformed(path, "", payload)
        except ValueError as error:
            _malformed(path, "base64", error)

    def _complex(self, payload: Any, path: str, depth: int) -> complex:
        parts = self._list(payload, path, depth)
        if len(parts) != 2 or not all(type(part) is float for part in parts):
            _malformed(path, "two floats", payload)
        return complex(*parts)

    def _device(self, payload: Any, path: str, depth: int) -> torch.device:
        try:
            return torch.device(payload) if type(payload) is str else _malformed(path, "a device", payload)
        except RuntimeError as error:
            _malformed(path, "a device", error)

    def _take(self, name: Any, path: str) -> torch.Tensor:
        if type(name) is not str or name not in self._tensors:
            _malformed(path, "the name of a stored tensor", name)
        self.used.add(name)
        return self._tensors[name]

    def _tensor(self, payload: Any, path: str, depth: int) -> torch.Tensor:
        name, dtype_name, shape = _exactly(payload, ("name", "dtype", "shape"), path)
        tensor, dtype, sizes = self._take(name, path), _dtype_named(dtype_name, path), _shape(shape, path)
        if tensor.dtype == dtype and list(tensor.shape) == sizes:
            return tensor
        # A dtype that the file format lacks is stored as its bytes.
        if tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.numel() == math.prod(sizes) * dtype.itemsize:
            try:
                return tensor.view(dtype).reshape(sizes)
            except RuntimeError as error:
                _malformed(path, f"a {dtype} that this torch can hold", error)
        _malformed(path, f"{dtype} {sizes}", f"{tensor.dtype} {list(tensor.shape)}")

    def _array(self, payload: Any, path: str, depth: int) -> np.ndarray[Any, Any]:
        name, dtype_name, shape = _exactly(payload, ("tensor", "dtype", "shape"), path)
        raw, dtype, sizes = self._take(name, path), _numpy_dtype(dtype_name, path), _shape(shape, path)
        if raw.dtype != torch.uint8 or raw.dim() != 1 or raw.numel() != math.prod(sizes) * dtype.itemsize:
            _malformed(path, f"the bytes of a {dtype} array {sizes}", f"{raw.dtype} {list(raw.shape)}")
        return np.ndarray(sizes, dtype, buffer=bytearray(raw.numpy().tobytes()))

    def _number(self, payload: Any, path: str, depth: int) -> np.generic:
        dtype_name, text = _exactly(payload, ("dtype", "bytes"), path)
        dtype, raw = _numpy_dtype(dtype_name, path), self._bytes(text, path, depth)
        if len(raw) != dtype.itemsize:
            _malformed(path, f"{dtype.itemsize} bytes", len(raw))
        return np.frombuffer(raw, dtype)[0]  # type: ignore[no-any-return]  # indexing is Any in numpy's stubs


def _exactly(payload: Any, names: tuple[str, ...], path: str) -> list[Any]:
    if type(payload) is not dict or set(payload) != set(names):
        _malformed(path, f"exactly {', '.join(names)}", payload)
    return [payload[name] for name in names]


def _shape(payload: Any, path: str) -> list[int]:
    if type(payload) is not list or not all(type(size) is int and 0 <= size < 2**40 for size in payload):
        _malformed(path, "a shape", payload)
    if len(payload) > 64 or math.prod(max(size, 1) for size in payload) >= 2**48:
        _malformed(path, "a shape that fits in memory", payload)
    return list(payload)


def _dtype_named(name: Any, path: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if type(name) is str and name.isidentifier() else None
    return dtype if isinstance(dtype, torch.dtype) else _malformed(path, "a dtype of this torch", name)


def _numpy_dtype(name: Any, path: str) -> np.dtype[Any]:
    try:
        if type(name) is str and _NUMERIC.fullmatch(name):
            return np.dtype(name)
    except TypeError:
        pass
    _malformed(path, "a numeric numpy dtype of this machine", name)


def _malformed(path: str, expected: str, seen: object) -> NoReturn:
    raise CheckpointError(
        f"stored state at {path[:200] or '(top)'}: expected {expected}, saw {seen!r:.200}; "
        "use another checkpoint, or the elastictrain that wrote this one"
    )
