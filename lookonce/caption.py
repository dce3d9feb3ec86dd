"""Captions for a folder of pictures: one JSON line per image, failures listed with their reasons."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lookonce.client import Client, data_url
from shared.errors import ConfigError, LookonceError

#: by name, in any case; what a file holds is decided by its bytes when it is read
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"})
#: how often a "busy" or "unavailable" answer is tried again, and the first pause in seconds
RETRIES, FIRST_PAUSE = 6, 0.5
RETRYABLE = frozenset({429, 503})


@dataclass(frozen=True)
class Caption:
    """One line of the output.

    Attributes:
        image: path relative to the folder.
        caption: the model's text; None when the image failed.
        error: why it failed.
        finish_reason, prompt_tokens, completion_tokens, image_tokens: as the service counted them.
        cached: no encoder forward was needed.
        key: the embedding's cache key.
    """

    image: str
    caption: str | None = None
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    image_tokens: int = 0
    cached: bool = False
    key: str | None = None


def find_images(folder: Path) -> list[Path]:
    """All picture files below ``folder``, sorted by path.

    Raises:
        ConfigError: no such folder, or no picture in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix.lower() in SUFFIXES)
    if not found:
        raise ConfigError(f"no pictures below {folder} (looked for {', '.join(sorted(SUFFIXES))})")
    return found


def _is_one_of(path: Path, others: Sequence[Path]) -> bool:
    return path.resolve() in {other.resolve() for other in others}


async def captions(
    client: Client, folder: Path, images: Sequence[Path], prompt: str, *, max_tokens: int, parallel: int
) -> AsyncIterator[Caption]:
    """Captions images ``parallel`` at a time and yields them in the given order."""
    model = await client.model()
    gate = asyncio.Semaphore(parallel)

    async def one(path: Path) -> Caption:
        async with gate:
            return await _caption(client, model, folder, path, prompt, max_tokens)

    window: list[asyncio.Task[Caption]] = []
    pending = iter(images)
    try:
        while True:
            # a window of twice the parallel work keeps memory flat however many images there are
            while len(window) < 2 * parallel and (path := next(pending, None)) is not None:
                window.append(asyncio.create_task(one(path)))
            if not window:
                return
            yield await window[0]
            window.pop(0)
    finally:
        for task in window:
            task.cancel()
        await asyncio.gather(*window, return_exceptions=True)


async def _caption(client: Client, model: str, folder: Path, path: Path, prompt: str, max_tokens: int) -> Caption:
    name = str(path.relative_to(folder))
    try:
        url = await asyncio.to_thread(data_url, path)
        pause = FIRST_PAUSE
        for attempt in range(RETRIES + 1):
            try:
                answer = await client.ask(model, [url], prompt, max_tokens=max_tokens)
                break
            except LookonceError as error:
                if error.status not in RETRYABLE or attempt == RETRIES:
                    raise
                await asyncio.sleep(pause)
                pause *= 2
    except LookonceError as error:
        return Caption(name, error=error.message)
    details = answer.usage["prompt_tokens_details"]
    image = answer.report["images"][0]
    return Caption(
        name,
        answer.text,
        None,
        answer.finish_reason,
        answer.usage["prompt_tokens"],
        answer.usage["completion_tokens"],
        details["image_tokens"],
        image["source"] == "cache",
        image["key"],
    )


async def write_captions(
    client: Client,
    folder: Path,
    out: Path,
    prompt: str,
    *,
    max_tokens: int,
    parallel: int,
    progress: Callable[[int, int, Caption], None],
) -> list[Caption]:
    """Captions a folder into a JSON Lines file and returns the failures.

    Args:
        progress: called after every image with (done, total, its caption).

    Raises:
        ConfigError: the output would overwrite a picture, or cannot be written.
    """
    images = find_images(folder)
    if await asyncio.to_thread(_is_one_of, out, images):
        raise ConfigError(f"--out {out} is one of the pictures")
    failures = []
    try:
        with out.open("w", encoding="utf-8") as lines:
            stream = captions(client, folder, images, prompt, max_tokens=max_tokens, parallel=parallel)
            done = 0
            async for caption in stream:
                done += 1
                if caption.error is not None:
                    failures.append(caption)
                lines.write(json.dumps(asdict(caption), ensure_ascii=False) + "\n")
                lines.flush()
                progress(done, len(images), caption)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    return failures
