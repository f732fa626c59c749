"""What can be known to fail before any process starts: the program that cannot run, the port that is taken.

Nothing of the user's is executed or imported, and nothing is written.
"""

from __future__ import annotations

import errno
import importlib.machinery
import os
import pkgutil
import shutil
import socket
import stat
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from elastictrain.config import RunConfig
from elastictrain.errors import ConfigError
from elastictrain.notation import closest


def check_script(config: RunConfig) -> None:
    """Check that the program is there, can be read and, where it is Python, compiles.

    Blocks for the reading and compiling of one file. Raises ConfigError naming the file, and the line of a syntax
    error. What only another interpreter or the script itself can tell is not checked.
    """
    program = config.program
    if not config.cwd.is_dir():
        raise ConfigError(f"expected the folder {config.cwd} in which the run was started, seen none; create it again")
    if program.module:
        if program.interpreter == sys.executable:
            _check_module(program.script, config.cwd)
    elif program.no_python and not program.run_path:
        _check_command(program.script, config.cwd)
    else:
        _check_file(program.script, config.cwd, compiles=program.interpreter == sys.executable)


def check_metrics_port(config: RunConfig) -> None:
    """Check that the address and port of /metrics can be listened at; a port of 0 is left to the system.

    Raises ConfigError naming port and option.
    """
    host, port = config.metrics.host, config.metrics.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)  # with SO_REUSEADDR, a bind alone passes beside a bound port
    except OSError as error:
        if error.errno in {errno.EADDRINUSE, errno.EACCES} and port:
            raise ConfigError(
                f"--metrics-port: expected a port that is free at {host}, seen {port}: {error.strerror}; "
                "give another port, or 0 for a free one",
                field="--metrics-port",
                seen=port,
            ) from None
        raise ConfigError(
            f"--metrics-host: expected an address of this machine, seen {host!r}: {error.strerror}; "
            "give e.g. 127.0.0.1, or 0.0.0.0 for all",
            field="--metrics-host",
            seen=host,
        ) from None


def _check_file(script: str, cwd: Path, *, compiles: bool) -> None:
    path = cwd / script
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            if (path / "__main__.py").is_file():  # Python runs such a folder
                return
            raise _refusal(script, "a folder", _near_name(path, script) or "name the script in it")
        if not stat.S_ISREG(mode):
            raise _refusal(script, "no regular file", "several workers read it: save it to a file first")
        with path.open("rb") as file:
            source = file.read() if compiles and path.suffix == ".py" else b""
    except (FileNotFoundError, NotADirectoryError):
        raise _refusal(script, f"nothing there (from {cwd})", _near_name(path, script) or "check the path") from None
    except OSError as error:
        raise _refusal(script, f"a file that cannot be read: {error.strerror}", "check its permissions") from None
    _compile(source, path)


def _compile(source: bytes, path: Path) -> None:
    """Raise ConfigError for what the compiler refuses; the code object is dropped."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers' interpreter shows them
            compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{path}:{error.lineno}" if error.lineno else str(path)
        line = f": {error.text.strip()}" if error.text and error.text.strip() else ""
        raise ConfigError(
            f"{place}: expected Python {sys.version_info.major}.{sys.version_info.minor}, "
            f"seen {type(error).__name__}: {error.msg}{line}; correct that line",
            field="script",
            seen=str(path),
        ) from None
    except ValueError as error:  # a null byte, before Python 3.12
        raise ConfigError(f"{path}: expected Python source, seen: {error}; name the script", field="script") from None
    except (RecursionError, MemoryError):
        # Too deep for this thread's stack: not known to be wrong, so the workers decide.
        return


def _check_command(command: str, cwd: Path) -> None:
    if os.sep not in command:
        if shutil.which(command) is None:
            hint = f"; did you mean ./{command}?" if (cwd / command).exists() else ""
            raise _refusal(command, f"no such command on PATH{hint}", "install it, or drop --no-python for a script")
        return
    path = cwd / command
    if not path.is_file():
        raise _refusal(command, "no file there", _near_name(path, command) or "check the path")
    if not os.access(path, os.X_OK):
        raise _refusal(command, "a file without execute permission", f"chmod +x {command}, or drop --no-python")


def _check_module(name: str, cwd: Path) -> None:
    """Find the module as `python -m` would, part by part, so that no parent package is imported."""
    if name.endswith(".py") or os.sep in name:
        raise _refusal(name, "a path", "drop -m, or name the module with dots and without .py")
    paths: list[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        spec = _find_part(parts[:depth], paths, cwd)
        if spec is None:
            raise _missing_module(parts, depth, paths if depth > 1 else [str(cwd), *sys.path])
        if spec.submodule_search_locations is None:
            if depth < len(parts):
                raise _refusal(name, f"{'.'.join(parts[:depth])} to be a module, no package", "check the name")
            _compile_module(spec)
            return
        paths = list(spec.submodule_search_locations)
    main = _find_part([*parts, "__main__"], paths, cwd)
    if main is None:
        raise _refusal(name, "a package without __main__", f"name a module in it, such as {name}.train")
    _compile_module(main)


def _compile_module(spec: importlib.machinery.ModuleSpec) -> None:
    if spec.has_location and spec.origin and spec.origin.endswith(".py"):
        path = Path(spec.origin)
        try:
            source = path.read_bytes()
        except OSError:
            return  # from a zip or the like: its loader decides
        _compile(source, path)


def _find_part(parts: Sequence[str], paths: list[str] | None, cwd: Path) -> importlib.machinery.ModuleSpec | None:
    """Ask the finders of this interpreter; a first part is also looked for in `cwd`, where workers start."""
    if not parts[-1]:
        return None
    name = ".".join(parts)
    if paths is None:
        here = importlib.machinery.PathFinder.find_spec(name, [str(cwd)])
        if here is not None and here.loader is not None:
            return here
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, paths)
        except KeyError:  # a namespace package below another wants its parent, which is not imported
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            folders = (os.path.join(path, parts[-1]) for path in paths or ())
            spec.submodule_search_locations = [folder for folder in folders if os.path.isdir(folder)]
        if spec is not None:
            return spec
    return importlib.machinery.PathFinder.find_spec(name, [str(cwd)]) if paths is None else None


def _missing_module(parts: Sequence[str], depth: int, paths: Sequence[str] | None) -> ConfigError:
    found = closest(parts[depth - 1], (module.name for module in pkgutil.iter_modules(paths)))
    meant = ".".join([*parts[: depth - 1], found, *parts[depth:]]) if found else None
    name, missing = ".".join(parts), ".".join(parts[:depth])
    seen = "no such module" if missing == name else f"no module {missing}"
    return _refusal(name, seen, f"did you mean {meant}?" if meant else "check the name and PYTHONPATH")


def _near_name(path: Path, script: str) -> str | None:
    """Suggest a script of a like name in the same folder, or the only ones inside a folder."""
    folder = path if path.is_dir() else path.parent
    try:
        names = [entry.name for entry in folder.iterdir() if entry.suffix in {".py", path.suffix} and entry.is_file()]
    except OSError:
        return None
    if folder == path:
        meant = names[0] if len(names) == 1 else None
        return f"did you mean {os.path.join(script, meant)}?" if meant else None
    near = closest(path.name, names)
    return f"did you mean {os.path.join(os.path.dirname(script), near)}?" if near else None


def _refusal(script: str, seen: str, fix: str) -> ConfigError:
    return ConfigError(f"{script}: expected a script to run, seen {seen}; {fix}", field="script", seen=script)
