"""Captions in ``.txt`` files beside their pictures, as training tools want them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_service.captioning.rows import Source, printable
from shared.durable import write_whole
from shared.errors import ConfigError


@dataclass(frozen=True)
class Written:
    """Files that were written, and files that were there and were left alone."""

    new: int
    left: int


def check_sidecars(source: Source, prompts: int) -> None:
    """Refuses what has no place beside a picture.

    Raises:
        ConfigError: the source is no folder or glob of pictures, or there are several captions for each.
    """
    if not source.pictures:
        raise ConfigError("sidecars stand beside picture files; this source is not a folder or a glob of pictures")
    if prompts > 1:
        raise ConfigError("a sidecar holds one caption, but there are several prompts; run one job for each")


def sidecar_paths(source: Source) -> dict[str, Path]:
    """Where each row's caption belongs: ``a.txt`` for ``a.jpg``; ``a.jpg.txt`` where an ``a.png`` is there as well."""
    pictures = sorted(Path(name) for name in source.files)
    stems = Counter(str(path.with_suffix("")) for path in pictures)
    root = source.root.absolute()
    return {
        printable(os.path.relpath(path, root)): path.with_suffix(".txt")
        if stems[str(path.with_suffix(""))] == 1
        else path.with_name(f"{path.name}.txt")
        for path in pictures
    }


def write_sidecars(source: Source, rows: Iterable[Mapping[str, Any]], *, overwrite: bool) -> Written:
    """Writes the sidecars that are missing.

    Args:
        source: of pictures.
        rows: of the output.
        overwrite: replace those that are there: they may be edited, or by hand.

    Raises:
        StorageError, ConfigError: a full disk, or a folder that may not be written to.
    """
    paths = sidecar_paths(source)
    new = left = 0
    for row in rows:
        path = paths.get(row["id"])
        if path is None:  # the picture is gone
            continue
        if path.exists() and not overwrite:
            left += 1
            continue
        write_whole(path, f"{row['caption']}\n".encode())
        new += 1
    return Written(new, left)
