"""The encoded file of a row, from wherever it is."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from shared.config import ImageSettings
from shared.errors import FetchFailed, ImageTooLarge
from shared.fetch import ImageFetcher


async def read_image(image: bytes | str, fetcher: ImageFetcher, limits: ImageSettings) -> bytes:
    """Bytes of a picture's file; whether they are a picture is for `shared.images` to say.

    Args:
        image: the bytes, a path on this machine, or a ``data:`` or ``http(s)`` URL.
        fetcher: for URLs.
        limits: on bytes.

    Raises:
        FetchFailed, ImageTooLarge, BadImage: with the reason.
    """
    if isinstance(image, bytes):
        if len(image) > limits.max_bytes:
            raise ImageTooLarge(f"the file has {len(image)} bytes; the limit is {limits.max_bytes}")
        return image
    if "://" in image[:64] or image.startswith("data:"):
        return await fetcher.load(image)
    return await asyncio.to_thread(_read, image, limits.max_bytes)


def _read(path: str, limit: int) -> bytes:
    try:
        size = os.stat(path).st_size  # noqa: PTH116 - names need not be valid text
        if size > limit:
            raise ImageTooLarge(f"the file has {size} bytes; the limit is {limit}")
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FetchFailed(f"the file cannot be read: {reason}") from error
