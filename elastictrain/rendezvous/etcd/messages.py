"""etcd's messages, from the `etcd3` package, with the protobuf that is installed.

The code that etcd3 0.12 was generated into is refused by protobuf 4 and later, and its file names (`rpc.proto`,
`kv.proto`) clash with those of other packages in protobuf's one default pool. Its descriptors are sound: they are taken
out of the installed package and built into classes in a pool of our own. No file of etcd3 and no variable is changed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import threading
import types
from typing import Any

from elastictrain.errors import ConfigError

_FILES = ("kv", "auth", "rpc")  # in the order in which they need each other
_lock = threading.Lock()


def load_rpc() -> Any:
    """Give the module `etcd3.etcdrpc`: etcd's messages and gRPC stubs. Any thread; blocks for the import (about 0.1 s).

    Raises ConfigError when etcd3 or a protobuf that fits is not installed.
    """
    with _lock:
        if "etcd3" not in sys.modules:
            try:
                _install()
            except ImportError as error:
                raise _not_installed(str(error)) from error
    try:
        import etcd3.etcdrpc
    except ImportError as error:
        raise _not_installed(str(error)) from error
    return etcd3.etcdrpc


def read_descriptor(name: str) -> bytes:
    """Give the serialized FileDescriptorProto of `<name>.proto` out of the installed etcd3. Raises ImportError."""
    package = importlib.util.find_spec("etcd3")
    if package is None or not package.submodule_search_locations:
        raise ImportError("No module named 'etcd3'")
    folder = f"{next(iter(package.submodule_search_locations))}/etcdrpc"
    spec = importlib.machinery.PathFinder.find_spec(f"etcd3.etcdrpc.{name}_pb2", [folder])
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader | _Sourceless):
        raise ImportError(f"etcd3 in {folder} has no {name}_pb2")
    code = spec.loader.get_code(spec.name)
    # A descriptor begins with field 1, the file's name: a mark that no other constant of the module has.
    head = f"\n{chr(len(name) + len('.proto'))}{name}.proto"
    texts = [text for text in (code.co_consts if code else ()) if isinstance(text, str) and text.startswith(head)]
    if len(texts) != 1:
        raise ImportError(f"etcd3 in {folder} has no descriptor of {name}.proto")
    return texts[0].encode("latin1")


_Sourceless = importlib.machinery.SourcelessFileLoader


def _install() -> None:
    """Put modules of our own making where etcd3 looks for the generated ones."""
    from google.protobuf import descriptor_pool, message_factory
    from google.protobuf.internal import enum_type_wrapper

    if not hasattr(message_factory, "GetMessageClass"):
        raise ImportError("protobuf is older than 4.22")
    pool = descriptor_pool.DescriptorPool()
    modules = {}
    for name in _FILES:
        pool.AddSerializedFile(read_descriptor(name))
        file = pool.FindFileByName(f"{name}.proto")
        module: Any = types.ModuleType(f"etcd3.etcdrpc.{name}_pb2")
        module.DESCRIPTOR = file
        for message_name, descriptor in file.message_types_by_name.items():
            setattr(module, message_name, message_factory.GetMessageClass(descriptor))
        for enum_name, descriptor in file.enum_types_by_name.items():
            setattr(module, enum_name, enum_type_wrapper.EnumTypeWrapper(descriptor))
            for value in descriptor.values:
                setattr(module, value.name, value.number)
        modules[module.__name__] = module
    sys.modules.update(modules)


def _not_installed(seen: str) -> ConfigError:
    return ConfigError(
        "--rdzv-backend etcd3: expected the packages etcd3 0.12 and protobuf 4.22 or later, "
        f"seen: {seen}; run `pip install 'etcd3>=0.12,<0.13' 'protobuf>=4.22'`",
        field="--rdzv-backend",
    )
