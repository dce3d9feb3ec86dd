"""A page with samples of a job: pictures with their captions, and rows that failed with their reasons."""

from __future__ import annotations

import asyncio
import base64
import io
import random
from collections.abc import Iterable, Mapping
from contextlib import suppress
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from llm_service.captioning.images import read_image
from llm_service.captioning.rows import Row, Source
from shared import images
from shared.config import ImageSettings
from shared.durable import write_whole
from shared.errors import LookonceError
from shared.fetch import ImageFetcher

#: pictures on the page, and failures
SAMPLES, FAILURES = 48, 100
#: longer side of a picture on the page, pixels
THUMBNAIL = 240

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif }}
body {{ max-width: 80rem; margin: 2rem auto; padding: 0 1rem }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(16rem, 1fr)); gap: 1rem }}
figure {{ margin: 0; padding: .75rem; border: 1px solid #8884; border-radius: .5rem; overflow-wrap: anywhere }}
img {{ display: block; max-width: 100%; margin: 0 auto .5rem }}
small, dt {{ opacity: .7 }}
td {{ padding: .1rem 1rem .1rem 0; overflow-wrap: anywhere; vertical-align: top }}
</style></head><body>
<h1>{title}</h1>
<p>{summary}</p>
<main>
{figures}
</main>
{failures}
</body></html>
"""


def write_report(
    path: Path,
    source: Source,
    rows: Iterable[Mapping[str, Any]],
    failures: Iterable[Mapping[str, Any]],
    limits: ImageSettings,
    title: str,
    summary: str,
) -> None:
    """Writes the page; the same rows give the same samples.

    Args:
        path: of the page.
        source: where the pictures are; it is read again up to the last sample.
        rows: of the output.
        failures: rows with ``id`` and ``error``.
        limits: on pictures.
        title, summary: text above the samples.

    Raises:
        StorageError, ConfigError: the page cannot be written.
    """
    samples = _sample(rows)
    thumbnails = asyncio.run(_thumbnails(source, set(samples), limits))
    figures = "\n".join(_figure(name, lines, thumbnails.get(name)) for name, lines in samples.items())
    broken = list(islice(failures, FAILURES))
    table = "\n".join(f"<tr><td>{_text(row['id'])}</td><td>{_text(row['error'])}</td></tr>" for row in broken)
    page = _PAGE.format(
        title=_text(title),
        summary=_text(summary),
        figures=figures,
        failures=f"<h2>Rows that failed</h2>\n<table>\n{table}\n</table>" if broken else "",
    )
    write_whole(path, page.encode())


def _sample(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Output rows of a uniform sample of source rows, by id (Vitter's algorithm R)."""
    chance = random.Random(0)
    chosen: list[list[Mapping[str, Any]]] = []
    seen, latest, kept = 0, None, None
    for row in rows:
        if row["id"] == latest:  # further prompts of one row follow each other
            if kept is not None:
                kept.append(row)
            continue
        latest, kept = row["id"], None
        place = seen if seen < SAMPLES else chance.randrange(seen + 1)
        seen += 1
        if place < SAMPLES:
            kept = [row]
            chosen[place : place + 1] = [kept]
    return {str(lines[0]["id"]): lines for lines in sorted(chosen, key=lambda lines: str(lines[0]["id"]))}


async def _thumbnails(source: Source, names: set[str], limits: ImageSettings) -> dict[str, bytes]:
    fetcher, found = ImageFetcher(limits), {}
    try:
        for row in (row for fragment in source.fragments for row in fragment.rows()):
            name = row.id
            if name in names:
                with suppress(LookonceError):  # the picture was there when it was captioned
                    found[name] = await _thumbnail(row, fetcher, limits)
                names.discard(name)
            if not names:
                break
    finally:
        await fetcher.aclose()
    return found


async def _thumbnail(row: Row, fetcher: ImageFetcher, limits: ImageSettings) -> bytes:
    """A small JPEG."""
    data = await read_image(row.image, fetcher, limits)
    picture = Image.fromarray(images.decode(data, limits))
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def _figure(name: str, lines: list[Mapping[str, Any]], thumbnail: bytes | None) -> str:
    image = ""
    if thumbnail is not None:
        image = f'<img alt="" src="data:image/jpeg;base64,{base64.b64encode(thumbnail).decode()}">'
    texts = "".join(f"<p><small>{_text(line['prompt'])}</small><br>{_text(line['caption'])}</p>" for line in lines)
    size = f"{lines[0]['width']}×{lines[0]['height']}"
    return f"<figure>{image}<figcaption><small>{_text(name)} · {size}</small>{texts}</figcaption></figure>"


def _text(value: object) -> str:
    return escape(str(value).encode(errors="replace").decode())
