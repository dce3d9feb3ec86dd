"""Whose folder it is and who uses it: opened with distrust, removed by the last process that leaves."""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from pathlib import Path

from blake3 import blake3

from shared.cache.local.locks import TRIES, locked

#: where memory is a file system
SHARED_MEMORY = Path("/dev/shm")
#: whoever uses the folder holds a shared lock on this file
USERS = "users"


class Unusable(Exception):
    """The folder cannot be used; says why."""


def folder_of(url: str) -> Path:
    """The folder of all processes of this user on this machine that share a Redis."""
    return SHARED_MEMORY / f"lookonce-{os.geteuid()}-{blake3(url.encode()).hexdigest(8)}"


def enter(path: Path) -> tuple[int, int]:
    """Descriptors of the folder, which is made when it is missing, and of the file whose lock says that we use it.

    Raises:
        OSError: somebody else's, open to others, a link, no folder, or nowhere.
    """
    for _ in range(TRIES):
        with suppress(FileExistsError):
            path.mkdir(0o700)
        with suppress(FileNotFoundError), ExitStack() as stack:
            folder = open_folder(path)
            stack.callback(os.close, folder)
            users = _open_users(folder)
            stack.callback(os.close, users)
            # whoever removes the folder just now lets go of the lock only after that
            if locked(users, fcntl.LOCK_SH) and os.path.samestat(os.fstat(folder), path.lstat()):
                stack.pop_all()
                return folder, users
    raise OSError(0, "somebody removes it, and does not finish")


def open_folder(path: Path) -> int:
    """A descriptor of the folder, for looking at it.

    Raises:
        OSError: as :func:`enter`.
    """
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not private(os.fstat(folder)):
        os.close(folder)
        raise PermissionError(0, "it belongs to somebody else, or others may enter it")
    return folder


def private(about: os.stat_result) -> bool:
    """Whether it is this user's and closed to everybody else."""
    return about.st_uid == os.geteuid() and not about.st_mode & 0o077


def remove_unused(path: Path | None = None) -> None:
    """Removes a folder, or all of this user's, that no process uses: those whose processes were killed."""
    for folder in [path] if path else SHARED_MEMORY.glob(f"lookonce-{os.geteuid()}-*"):
        with suppress(OSError):
            _remove_unused(folder)


def _remove_unused(path: Path) -> None:
    folder = open_folder(path)
    try:
        users = _open_users(folder)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with os.scandir(folder) as entries:
                for entry in entries:
                    os.unlink(entry.name, dir_fd=folder)
            path.rmdir()
        finally:
            os.close(users)
    finally:
        os.close(folder)


def _open_users(folder: int) -> int:
    return os.open(USERS, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
