"""Files that survive a crash: whole or not there, one writer at a time, a full disk said in one sentence."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from shared.errors import ConfigError, InUse, StorageError

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns what the system says about a disk into our words.

    Raises:
        StorageError: the disk is full, or broken.
        ConfigError: the path cannot be written at all.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise StorageError(
                f"no space left for {path}: what was finished is safe; make room and run the same again"
            ) from error
        if error.errno == errno.EIO:
            raise StorageError(f"the disk under {path} reports an error: {reason}") from error
        raise ConfigError(f"cannot write {path}: {reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes its place only when the block ends well, on disk for good by then.

    The new file is written beside the old one, synced, renamed over it, and the folder is synced too. On an error
    nothing of it is left.

    Raises:
        StorageError, ConfigError: see :func:`storage_errors`.
    """
    temporary = path.with_name(f".{path.name[:200]}.{os.getpid()}.tmp")
    with storage_errors(path):
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a small file by :func:`replacing`."""
    with replacing(path) as file:
        file.write(data)


def sync_folder(folder: Path) -> None:
    """Makes renames and removals in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Adds a JSON line by :func:`append_lines`."""
    append_lines(path, [line])


def append_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Adds JSON lines to a file that is only ever added to, on disk when this returns.

    A line that a crash cut short ends here and now: it must not swallow a new one.

    Raises:
        StorageError, ConfigError: see :func:`storage_errors`.
    """
    data = b"".join(json.dumps(line, ensure_ascii=True, separators=(",", ":")).encode() + b"\n" for line in lines)
    with storage_errors(path), path.open("ab+") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                data = b"\n" + data
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                os.truncate(path, end)  # a full disk may have taken half of it
            raise


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that :func:`append_line` wrote; what a crash cut short is skipped. Nothing if there is no such file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


@contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Holds a lock file for the length of a block. The system lets go of it when this process ends, however it ends.

    Args:
        path: of the lock file; made if missing, and left there.
        what: what the lock is about, for the message.

    Raises:
        InUse: another process holds it.
        StorageError, ConfigError: the file cannot be made or written.
    """
    with storage_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "?"
            raise InUse(f"process {owner} is at work on {what}; wait for it, or end it first") from error
        with storage_errors(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
