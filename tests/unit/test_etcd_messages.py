from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from elastictrain.rendezvous.etcd.messages import load_rpc, read_descriptor


def run_python(code: str) -> str:
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    return outcome.stdout


@pytest.mark.parametrize(("name", "length"), [("kv", 319), ("auth", 308), ("rpc", 10911)])
def test_descriptor_equals_the_one_in_etcd3s_source(name: str, length: int) -> None:
    package = importlib.util.find_spec("etcd3")
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "etcdrpc" / f"{name}_pb2.py").read_text()
    literals = [
        keyword.value.args[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "serialized_pb" and isinstance(keyword.value, ast.Call)
    ]
    (literal,) = (ast.literal_eval(node) for node in literals)
    assert read_descriptor(name) == literal.encode("latin1")
    assert len(read_descriptor(name)) == length


def test_messages_travel_when_they_are_made_in_our_own_pool() -> None:
    rpc = load_rpc()
    put = rpc.PutRequest(key=b"k", value=b"v", lease=7)
    request = rpc.TxnRequest(
        compare=[rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=b"k", mod_revision=3)],
        success=[rpc.RequestOp(request_put=put)],
    )
    again = rpc.TxnRequest.FromString(request.SerializeToString())
    assert again == request
    assert again.success[0].request_put.lease == 7
    assert load_rpc() is rpc


def test_messages_load_when_another_package_has_taken_the_names() -> None:
    """`rpc.proto` and `kv.proto` are names that others use too; protobuf's default pool has room for one of each."""
    output = run_python(
        "from google.protobuf import descriptor_pb2, descriptor_pool\n"
        "for name in ('rpc', 'kv', 'auth'):\n"
        "    file = descriptor_pb2.FileDescriptorProto(name=f'{name}.proto', package='etcdserverpb')\n"
        "    file.message_type.add(name='PutRequest' if name == 'rpc' else f'Other{name}')\n"
        "    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())\n"
        "from elastictrain.rendezvous.etcd.messages import load_rpc\n"
        "import os, google.protobuf.internal.api_implementation as implementation\n"
        "rpc = load_rpc()\n"
        "assert rpc.PutRequest(key=b'k').key == b'k'\n"
        "assert not any('PROTOCOL_BUFFERS' in name for name in os.environ)\n"
        "print(implementation.Type(), rpc.KVStub.__name__)\n"
    )
    assert output.split() == ["upb", "KVStub"]


def test_grpc_is_not_imported_when_the_run_needs_no_etcd() -> None:
    output = run_python(
        "import sys\n"
        "import elastictrain.cli.main, elastictrain.rendezvous.etcd.opening, elastictrain.rendezvous.etcd.settings\n"
        "import elastictrain.agent.supervisor, elastictrain.launching\n"
        "print({name.split('.')[0] for name in sys.modules} & {'grpc', 'etcd3', 'google', 'tenacity', 'asyncio'})\n"
    )
    assert not {"grpc", "etcd3", "google"} & set(ast.literal_eval(output.replace("set()", "()")))
