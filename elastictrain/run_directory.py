"""A run directory: claimed by one agent at a time, its specification written once and read back.

RUN_DIR/run.json     the specification; write-once; its presence makes the folder a run directory
RUN_DIR/agent.lock   held by the living agent (flock); holds its pid as text
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from elastictrain.config import SPEC_VERSION, RunConfig
from elastictrain.errors import ConfigError
from elastictrain.log import get_logger
from elastictrain.notation import closest

SPEC_NAME = "run.json"
LOCK_NAME = "agent.lock"
# Folders that only a run makes: without run.json beside them something was lost, and a new run would mix with it.
_RUN_FOLDERS = ("ledger", "checkpoints")
_MAX_SPEC_BYTES = 16 * 2**20
# A file system without locks or hard links: common on object-store mounts.
_UNSUPPORTED = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.EMLINK})

_log = get_logger(__name__)


class RunClaim:
    """The exclusive right to use a run directory, held until `close()` or the end of this process.

    Processes forked from this one without exec share the right, so that it ends with the last of them.
    """

    def __init__(self, run_dir: Path, lock_fd: int) -> None:
        self.run_dir = run_dir
        self._lock_fd: int | None = lock_fd

    def close(self) -> None:
        """Give the right back; calling it again does nothing."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def claim_run_dir(config: RunConfig, *, resume: bool) -> RunClaim:
    """Make sure that this process alone uses `config.run_dir`.

    A new run creates the folder and writes run.json, durably and once; a resume changes neither. Blocks on the disk.
    Raises ConfigError, before anything is written, where the folder holds another run, belongs to a living agent, is
    a file, cannot be written, or (resume) is no run directory.
    """
    run_dir = config.run_dir
    if config.world.is_shared:
        return _join_run_dir(config)
    if resume:
        read_spec(run_dir)
    else:
        _check_vacant(run_dir)
    try:
        if not resume:
            run_dir.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    try:
        _lock(lock_fd, run_dir)
        if not resume:
            _check_vacant(run_dir)  # again, now that no other agent can come between
            _write_once(run_dir / SPEC_NAME, json.dumps(config.to_spec(), indent=1).encode() + b"\n")
    except OSError as error:
        os.close(lock_fd)
        raise _unwritable(run_dir, error) from None
    except BaseException:
        os.close(lock_fd)
        raise
    return RunClaim(run_dir, lock_fd)


def _join_run_dir(config: RunConfig) -> RunClaim:
    """Be one of the agents of this run's nodes that share the folder, as the first or beside others, or come back."""
    run_dir = config.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(run_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    try:
        _lock(lock_fd, run_dir, is_shared=True)
        if not (run_dir / SPEC_NAME).exists():
            with contextlib.suppress(FileExistsError):  # another node was faster
                _write_once(run_dir / SPEC_NAME, json.dumps(config.to_spec(), indent=1).encode() + b"\n")
        if read_spec(run_dir)["run_id"] != config.run_id:
            _check_vacant(run_dir)
    except OSError as error:
        os.close(lock_fd)
        raise _unwritable(run_dir, error) from None
    except BaseException:
        os.close(lock_fd)
        raise
    return RunClaim(run_dir, lock_fd)


def read_spec(run_dir: Path) -> dict[str, Any]:
    """Read and check run.json: a JSON object of a known version with a run id; the rest is the caller's to check.

    Raises ConfigError where `run_dir` is no run directory, or its run.json is damaged or of another version.
    """
    path = run_dir / SPEC_NAME
    try:
        if path.stat().st_size > _MAX_SPEC_BYTES:
            raise _damaged(path, f"{path.stat().st_size} bytes")
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _no_run_dir(run_dir) from None
    except OSError as error:
        raise ConfigError(f"{path}: expected to read it, seen: {error.strerror}; check its permissions") from None
    try:
        spec = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"no JSON ({error})") from None
    if not isinstance(spec, dict) or not isinstance(spec.get("run_id"), str):
        raise _damaged(path, "JSON without a run_id")
    if spec.get("version") != SPEC_VERSION:
        raise ConfigError(
            f"{path}: expected format version {SPEC_VERSION}, seen {spec.get('version')!r}; "
            f"use the elastictrain that wrote it ({_versions(spec)})",
            field="version",
            seen=spec.get("version"),
        )
    return spec


def _check_vacant(run_dir: Path) -> None:
    """Raise ConfigError where a new run must not begin; writes nothing."""
    try:
        if not run_dir.exists():
            return
        if not run_dir.is_dir():
            raise ConfigError(
                f"--run-dir: expected a folder or a free name, seen a file: {run_dir}; give another --run-dir",
                field="--run-dir",
                seen=str(run_dir),
            )
        if (run_dir / SPEC_NAME).exists():
            raise ConfigError(
                f"--run-dir: expected a folder without a run, seen {run_dir} with {_description(run_dir)}; "
                f"use `elastictrain resume {run_dir}` to continue that run, or give another --run-dir",
                field="--run-dir",
                seen=str(run_dir),
            )
        parts = [name for name in _RUN_FOLDERS if (run_dir / name).exists()]
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    if parts:
        raise ConfigError(
            f"--run-dir: expected a folder without a run, seen {run_dir} with {' and '.join(parts)} of a run whose "
            f"{SPEC_NAME} is gone; restore that file, or give another --run-dir",
            field="--run-dir",
            seen=str(run_dir),
        )


def _description(run_dir: Path) -> str:
    try:
        spec = read_spec(run_dir)
    except ConfigError:
        return f"a {SPEC_NAME} that cannot be read"
    program = spec.get("program")
    script = program.get("script") if isinstance(program, dict) else None
    return f"run {spec['run_id']} of {script}"


def _lock(lock_fd: int, run_dir: Path, *, is_shared: bool = False) -> None:
    """Take the lock without waiting, and leave our pid in the file for whoever finds it held."""
    try:
        fcntl.flock(lock_fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
        raise ConfigError(
            f"--run-dir: expected a run directory that no agent uses, seen {run_dir} in use by process {holder}; "
            f"wait for it or stop it (kill -TERM {holder}), or give another --run-dir",
            field="--run-dir",
            seen=str(run_dir),
        ) from None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _log.warning("%s: this file system has no locks: see to it that one agent at a time uses it", run_dir)
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)


def _write_once(path: Path, content: bytes) -> None:
    """Create a file whole and durable, or fail; an existing one is never replaced. The caller holds the lock."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike a rename it fails where the name exists
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.rename(temporary, path)  # no hard links here: the lock and the check before have to do
    finally:
        temporary.unlink(missing_ok=True)
    folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def _unwritable(run_dir: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"--run-dir: expected a folder that can be written, seen {run_dir}: {error.strerror}; "
        "fix its permissions or space, or give another --run-dir",
        field="--run-dir",
        seen=str(run_dir),
    )


def _no_run_dir(run_dir: Path) -> ConfigError:
    """Say what is at the path instead, and which run directories are near it."""
    if run_dir.is_dir():
        seen = f"a folder without {SPEC_NAME}"
        inside = sorted(entry.parent.name for entry in run_dir.glob(f"*/{SPEC_NAME}"))
        meant = str(run_dir / inside[-1]) if inside else None
    else:
        seen = "a file" if run_dir.exists() else "nothing there"
        beside = run_dir.parent.glob(f"*/{SPEC_NAME}") if run_dir.parent.is_dir() else ()
        near = closest(run_dir.name, [entry.parent.name for entry in beside])
        meant = str(run_dir.with_name(near)) if near else None
    fix = f"did you mean {meant}?" if meant else "give the --run-dir of a run that was started"
    return ConfigError(
        f"{run_dir} is no run directory: expected {SPEC_NAME} in it, seen {seen}; {fix}",
        field="RUN_DIR",
        seen=str(run_dir),
    )


def _damaged(path: Path, seen: str) -> ConfigError:
    return ConfigError(f"{path}: expected the specification of a run, seen {seen}; restore the file from a copy")


def _versions(spec: Mapping[str, Any]) -> str:
    versions = spec.get("versions")
    return str(versions.get("elastictrain", "unknown")) if isinstance(versions, dict) else "unknown"
