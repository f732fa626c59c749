"""Whatever a state holds comes back exactly, through the very bytes of the files; whatever a file holds is survived."""

from __future__ import annotations

import collections
import contextlib
import enum
import math
import random
import struct
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastictrain.checkpoint import strict_json, tensor_file, tree
from elastictrain.checkpoint.save import capture
from elastictrain.errors import CheckpointError

quick = settings(deadline=None, database=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow])

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]

any_str = st.text(st.characters(exclude_categories=()), max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(60, 20_000).map(lambda bits: 1 - 2**bits)
    | st.floats(allow_nan=True)
    | any_str
    | st.sampled_from(["$tensor", "$dict", "__metadata__", "", "a.b", "\ud83d\ude00"])
    | st.binary(max_size=9)
    | st.complex_numbers()
)
keys = scalars | st.tuples(scalars, st.integers())


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    value = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
    twist = draw(st.sampled_from(["as is", "transposed", "strided", "expanded"]))
    if twist == "transposed":
        return value.permute(list(reversed(range(value.dim()))))
    if twist == "strided" and value.dim():
        return value[::2]
    if twist == "expanded":
        return value.unsqueeze(0).expand(3, *value.shape)
    return value


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype = np.dtype(draw(st.sampled_from(["?", "<i8", ">i4", "u1", "<u8", "<f8", ">f8", "<f2", "<c16", "<u2"])))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        raw = bytes(byte & 1 for byte in raw)
    value = np.ndarray(shape, dtype, buffer=bytearray(raw))
    if draw(st.booleans()):
        return value.T
    return value[(0,) * value.ndim] if value.size and draw(st.booleans()) else value


leaves = (
    scalars
    | tensors()
    | arrays()
    | st.frozensets(keys, max_size=3)
    | st.sets(keys, max_size=3)
    | st.sampled_from([torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), torch.device("cuda:1")])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(any_str, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def fingerprint(value: Any) -> Any:
    """Reduce a value to something that compares equal only for exactly the same type and bits."""
    if isinstance(value, torch.Tensor):
        dense = torch.empty(value.shape, dtype=value.dtype).copy_(value)
        return "tensor", value.dtype, tuple(value.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    if type(value) in (dict, collections.OrderedDict, collections.defaultdict):
        return "dict", [(fingerprint(key), fingerprint(item)) for key, item in value.items()]
    if type(value) in (list, tuple):
        return type(value), [fingerprint(item) for item in value]
    if type(value) in (set, frozenset):
        return type(value), sorted(repr(fingerprint(item)) for item in value)
    if type(value) is float:
        return "float", struct.pack(">d", value)
    if type(value) is complex:
        return "complex", struct.pack(">dd", value.real, value.imag)
    if type(value) is int:
        return "int", hex(value)
    return type(value), value


def through_files(state: dict[str, Any]) -> Any:
    captured = capture(state)
    data = b"".join(bytes(piece) for piece in tensor_file.to_pieces(captured.tensors))
    text = strict_json.dump(captured.tree)
    return tree.decode(strict_json.parse(text, what="tree"), tensor_file.from_bytes(data))


@quick
@given(values)
def test_state_comes_back_exactly_when_it_went_through_the_files(value: Any) -> None:
    assert fingerprint(through_files({"part": value})) == fingerprint({"part": value})


@quick
@given(values)
def test_tree_comes_back_exactly_when_nothing_is_written(value: Any) -> None:
    encoded = tree.encode(value)
    assert fingerprint(tree.decode(encoded.tree, encoded.tensors)) == fingerprint(value)


NUMBER_TAGS = ["$int", "$float", "$complex", "$number", "$array", "$tensor", "$size", "$dtype", "$device"]
TAGS = [*NUMBER_TAGS, "$str", "$bytes", "$tuple", "$set", "$frozenset", "$dict", "$new"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("t") | st.just("float32"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(
            lambda tag, payload: {tag: payload},
            st.sampled_from(TAGS),
            inner
            | st.fixed_dictionaries({"name": st.just("t"), "dtype": st.just("float32"), "shape": inner})
            | st.fixed_dictionaries({"tensor": st.just("t"), "dtype": inner | st.just("<f4"), "shape": inner})
            | st.fixed_dictionaries({"dtype": inner | st.just("<f4"), "bytes": inner}),
        )
    ),
    max_leaves=15,
)


@quick
@given(json_values)
def test_decode_answers_with_a_value_or_a_checkpoint_error_when_the_tree_is_any_json(node: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(CheckpointError):  # any other exception fails the test
            tree.decode(node, {"t": torch.zeros(4)})


class Colour(enum.IntEnum):
    RED = 1


class Subtensor(torch.Tensor):
    pass


Pair = collections.namedtuple("Pair", "a b")  # the untyped kind is what states hold


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Colour.RED, "Colour"),
        (object(), "builtins.object"),
        (Pair(1, 2), "Pair"),
        (lambda: None, "function"),
        (torch.zeros(2).as_subclass(Subtensor), "Subtensor"),
        (torch.zeros(2).to_sparse(), "Tensor"),
        (torch.empty(2, device="meta"), "Tensor"),
        (np.array(["a"]), "ndarray"),
        (np.array([None]), "ndarray"),
        (np.str_("a"), "str_"),
        (collections.Counter("aab"), "Counter"),
        ({Colour.RED: 1}, "Colour"),
        ({torch.float32}, "dtype"),
        (range(3), "range"),
    ],
)
def test_encode_names_place_and_type_when_the_value_could_not_come_back(value: Any, kind: str) -> None:
    with pytest.raises(CheckpointError, match=rf"state at ema\.3.*{kind}.*; .*(store|use|convert)"):
        tree.encode({"ema": [0, 1, 2, value]})


def test_encode_refuses_when_a_list_contains_itself() -> None:
    knot: list[Any] = []
    knot.append(knot)
    with pytest.raises(CheckpointError, match="contains itself"):
        tree.encode(knot)


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {1: x}])
def test_depth_passes_both_ways_when_it_is_at_the_limit(wrap: Any) -> None:
    value: Any = {}
    for _ in range(tree.MAX_DEPTH - 1):
        value = wrap(value)
    assert through_files({"deep": value}) == {"deep": value}


def test_strict_json_refuses_when_text_is_nested_without_end() -> None:
    with pytest.raises(CheckpointError, match="expected strict JSON"):
        strict_json.parse(b"[" * 200_000, what="tree.json")
    node: Any = 0
    for _ in range(500):
        node = [node]
    with pytest.raises(CheckpointError, match="levels"):
        tree.decode(node, {})


@pytest.mark.parametrize("text", [b"NaN", b"[-Infinity]", b'{"a":1,"a":2}', b"", b"\xff", b"1" * 5000])
def test_strict_json_refuses_when_python_would_be_lenient(text: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"tree\.json"):
        strict_json.parse(text, what="tree.json")


def test_decode_refuses_when_a_tensor_is_missing_unused_or_of_another_kind() -> None:
    encoded = tree.encode({"w": torch.zeros(3)})
    for tensors_there, expected in (
        ({}, "the name of a stored tensor"),
        ({"w": torch.zeros(4)}, r"float32 \[3\]"),
        ({"w": torch.zeros(3, dtype=torch.float64)}, r"float32 \[3\]"),
        ({"w": torch.zeros(3), "x": torch.zeros(1)}, "first is 'x'"),
    ):
        with pytest.raises(CheckpointError, match=expected):
            tree.decode(encoded.tree, tensors_there)


def test_tensor_names_stay_unique_when_paths_meet() -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, "__metadata__": torch.ones(2), "": torch.ones(3)}
    encoded = tree.encode(state)
    assert len(encoded.tensors) == 4
    assert "__metadata__" not in encoded.tensors
    assert fingerprint(through_files(state)) == fingerprint(state)


def test_encode_references_tensors_and_capture_copies_them_when_training_goes_on() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    array = np.arange(3)
    state = {"w": weight, "view": weight.t(), "n": array}
    assert tree.encode(state).tensors["w"].data_ptr() == weight.data_ptr()
    captured = capture(state)
    with torch.no_grad():
        weight.fill_(-1)
    array.fill(-1)
    restored = tree.decode(captured.tree, captured.tensors)
    assert isinstance(restored, dict)
    assert restored["w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert restored["view"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert not restored["w"].requires_grad
    assert restored["n"].tolist() == [0, 1, 2]


def test_random_streams_go_on_when_their_states_come_back() -> None:
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "generator": np.random.default_rng(5).bit_generator.state,
    }
    expected = random.random(), float(np.random.rand()), torch.rand(1).item()
    back = through_files(state)
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    assert (random.random(), float(np.random.rand()), torch.rand(1).item()) == expected
    assert back["generator"] == state["generator"]


def test_optimizer_goes_on_identically_when_its_state_comes_back() -> None:
    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    train(model, optimizer)
    back = through_files({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer)

    other = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    other_optimizer = torch.optim.AdamW(other.parameters(), amsgrad=True)
    other.load_state_dict(back["model"])
    other_optimizer.load_state_dict(back["optimizer"])
    train(other, other_optimizer)
    assert fingerprint(other.state_dict()) == fingerprint(model.state_dict())
    assert fingerprint(other_optimizer.state_dict()) == fingerprint(optimizer.state_dict())


def test_complex_views_come_back_when_conjugation_is_lazy() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert through_files({"c": value.conj(), "i": value.conj().imag})["c"].tolist() == [1 - 2j, 3 + 4j]


def test_thousand_tensors_share_one_file_when_other_tools_read_it(tmp_path: Any) -> None:
    state = {f"layer{index}": {"weight": torch.full((8,), float(index))} for index in range(1000)}
    captured = capture(state)
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"".join(bytes(piece) for piece in tensor_file.to_pieces(captured.tensors)))
    import safetensors

    with safetensors.safe_open(path, framework="pt") as file:
        assert len(list(file.keys())) == 1000
        assert file.get_tensor("layer7.weight").tolist() == [7.0] * 8
