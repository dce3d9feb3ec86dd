"""``file:`` URLs, below folders that the operator named."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

from shared.errors import FetchFailed, ImageTooLarge

_REFUSED = "file URLs lead only to regular files below the folders set in images.file_roots; this one does not"


def read_file_url(url: str, roots: Sequence[Path], max_bytes: int) -> bytes:
    """Content of a file; ``url`` is ``file:/path``, ``file:///path`` or ``file://localhost/path``.

    The path is decoded once and resolved; after opening, the path of the opened file itself is checked, so a link
    that is swapped in between gains nothing. Hard links cannot be told apart: do not let strangers write to a root.

    Args:
        url: the URL.
        roots: folders, resolved.
        max_bytes: limit.

    Raises:
        FetchFailed: no roots, or a file that is not below one; the same words whether it exists or not.
        ImageTooLarge: above ``max_bytes``.
    """
    if not roots:
        raise FetchFailed("file URLs are not accepted: images.file_roots is empty. Send a data: or an http(s) URL")
    rest = url[len("file:") :]
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            raise FetchFailed("file URLs with a host are not accepted; write file:///path")
        rest = slash + rest
    path = os.fsdecode(unquote_to_bytes(rest))
    if not path.startswith("/") or path.endswith(("/", "/.")) or "\0" in path or set("?#") & set(rest):
        raise FetchFailed(_REFUSED)
    try:
        real = Path(path).resolve(strict=True)
        if not _is_below(real, roots):
            raise FetchFailed(_REFUSED)
        return _read(real, roots, max_bytes)
    except (OSError, RuntimeError, ValueError) as error:
        raise FetchFailed(_REFUSED) from error


def _is_below(path: Path, roots: Sequence[Path]) -> bool:
    return any(root in path.parents for root in roots)


def _read(path: Path, roots: Sequence[Path], max_bytes: int) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as file:  # noqa: PTH123 - an open descriptor, not a path
        status = os.fstat(handle)
        own_path = Path(f"/proc/self/fd/{handle}")
        opened = own_path.readlink() if own_path.is_symlink() else path.resolve(strict=True)
        if not stat.S_ISREG(status.st_mode) or not _is_below(opened, roots):
            raise FetchFailed(_REFUSED)
        data = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
    if status.st_size > max_bytes or len(data) > max_bytes:
        raise ImageTooLarge(f"the file has more than {max_bytes} bytes")
    return data
