"""Bytes on a disk: written so that they are whole or absent, read so that they are right or refused.

Everything here blocks on the disk. Files are opened relative to their folder and never through a symbolic link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from elastictrain.checkpoint.manifest import MAX_CHUNK_BYTES, FileRecord, digest
from elastictrain.errors import CheckpointError


class ChunkHasher:
    """Digests of each `chunk_bytes` of a stream that arrives in pieces of any length."""

    def __init__(self, chunk_bytes: int = MAX_CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._hash = xxhash.xxh3_64()
        self._in_chunk = 0
        self._digests: list[str] = []
        self.size_bytes = 0

    def update(self, piece: bytes | memoryview) -> None:
        view = memoryview(piece)
        while len(view):
            part = view[: self._chunk_bytes - self._in_chunk]
            self._hash.update(part)
            self._in_chunk += len(part)
            self.size_bytes += len(part)
            view = view[len(part) :]
            if self._in_chunk == self._chunk_bytes:
                self._close_chunk()

    def finish(self, name: str) -> FileRecord:
        """Close the last chunk, and describe the stream as the file `name`."""
        if self._in_chunk:
            self._close_chunk()
        return FileRecord(
            name=name, size_bytes=self.size_bytes, chunk_bytes=self._chunk_bytes, digests=tuple(self._digests)
        )

    def _close_chunk(self) -> None:
        self._digests.append(self._hash.hexdigest())
        self._hash.reset()
        self._in_chunk = 0


def write_durably(path: Path, pieces: Sequence[bytes | memoryview]) -> ChunkHasher:
    """Write a new file: temp beside it, fsync, rename. The folder's own fsync is the caller's, once for all files.

    Returns the hasher that saw it: its digests come from the memory that was written, so they tell what was meant.
    Raises OSError; a full disk shows before the first byte where the file system can reserve space. No temp file stays
    after an error.
    """
    temp = path.with_name(f".{path.name}.tmp")
    hasher = ChunkHasher()
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with open(descriptor, "wb", buffering=1 << 20) as file:
            _reserve(file.fileno(), sum(len(piece) for piece in pieces))
            for piece in pieces:
                hasher.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:  # also an interrupt must not leave a temp file that nobody will ever rename
        with contextlib.suppress(OSError):
            os.unlink(temp)
        raise
    return hasher


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a rename is only a promise until then."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents, durably; one that is there is fine."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the place of the folder", str(folder)) from None
    fsync_folder(folder.parent)


def remove_folder(folder: Path, *, first: str) -> None:
    """Delete a checkpoint folder: the file `first` durably before the rest, so a crash leaves garbage, never a half.

    Only files directly inside are touched; something else in there makes the last step fail. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder / first)
        fsync_folder(folder)
    for name in os.listdir(folder):
        os.unlink(folder / name)
    os.rmdir(folder)
    fsync_folder(folder.parent)


def read_file(folder: Path, name: str, *, limit_bytes: int) -> bytes:
    """Return a whole small file. Raises OSError (FileNotFoundError where it is absent) or CheckpointError."""
    with _opened(folder, name) as (descriptor, size_bytes):
        if size_bytes > limit_bytes:
            raise CheckpointError(
                f"{name}: expected at most {limit_bytes} bytes, saw {size_bytes}", path=str(folder / name)
            )
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.read()


def size_problem(folder: Path, record: FileRecord) -> str | None:
    """Compare presence, kind and length with the record, without reading. Returns the problem or None."""
    try:
        with _opened(folder, record.name) as (_, size_bytes):
            return _length_problem(record, size_bytes)
    except (OSError, CheckpointError) as error:
        return describe(error, record.name)


def digest_problem(folder: Path, record: FileRecord) -> str | None:
    """Read the whole file in chunks and check each digest. Returns the problem, with file and chunk, or None."""
    try:
        with _opened(folder, record.name) as (descriptor, size_bytes):
            problem = _length_problem(record, size_bytes)
            buffer = memoryview(bytearray(min(record.chunk_bytes, size_bytes)))
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                for index in range(0 if problem else len(record.digests)):
                    start, end = record.chunk_range(index)
                    chunk = buffer[: end - start]
                    if not _read_exactly(file.fileno(), chunk):
                        return f"{record.name}: chunk {index} ends early"
                    problem = problem or _chunk_problem(record, index, chunk)
            return problem
    except (OSError, CheckpointError) as error:
        return describe(error, record.name)


def read_verified(folder: Path, record: FileRecord) -> bytes:
    """Return the file's content, every chunk's digest checked on the very bytes that are returned.

    Needs the file's size in memory. Raises CheckpointError with file and chunk.
    """
    try:
        with (
            _opened(folder, record.name) as (descriptor, _),
            open(descriptor, "rb", buffering=0, closefd=False) as file,
        ):
            data = file.read()
    except OSError as error:
        raise CheckpointError(describe(error, record.name), path=str(folder / record.name)) from None
    problem = _length_problem(record, len(data))
    view = memoryview(data)
    for index in range(0 if problem else len(record.digests)):
        start, end = record.chunk_range(index)
        problem = problem or _chunk_problem(record, index, view[start:end])
    if problem:
        raise CheckpointError(f"{folder.name}/{problem}", path=str(folder / record.name))
    return data


def describe(error: OSError | CheckpointError, name: str) -> str:
    """Say in a few words why `name` could not be read."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return f"{name}: missing"
    if error.errno == errno.ELOOP:
        return f"{name}: is a symbolic link, which is never followed"
    return f"{name}: {error.strerror or error}"


@contextlib.contextmanager
def _opened(folder: Path, name: str) -> Iterator[tuple[int, int]]:
    """Yield (descriptor, size) of a regular file in `folder` itself."""
    folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        # O_NONBLOCK: a named pipe in place of a file must be refused, not waited for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=folder_descriptor)
    finally:
        os.close(folder_descriptor)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise CheckpointError(f"{name}: expected a regular file", path=str(folder / name))
        yield descriptor, facts.st_size
    finally:
        os.close(descriptor)


def _read_exactly(descriptor: int, target: memoryview) -> bool:
    while len(target):
        count = os.readv(descriptor, [target])
        if count == 0:
            return False
        target = target[count:]
    return True


def _length_problem(record: FileRecord, size_bytes: int) -> str | None:
    if size_bytes == record.size_bytes:
        return None
    return f"{record.name}: expected {record.size_bytes} bytes, saw {size_bytes}"


def _chunk_problem(record: FileRecord, index: int, chunk: memoryview) -> str | None:
    seen = digest(chunk)
    if seen == record.digests[index]:
        return None
    start, end = record.chunk_range(index)
    return (
        f"{record.name}: chunk {index} (bytes {start} to {end}) has digest {seen}, the manifest says "
        f"{record.digests[index]}"
    )


def _reserve(descriptor: int, size_bytes: int) -> None:
    if size_bytes == 0:
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        # Some file systems cannot reserve; there a full disk shows at the write.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
