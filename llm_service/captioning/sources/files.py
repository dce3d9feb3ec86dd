"""Pictures as files: folders, globs, lists of paths and URLs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from llm_service.captioning.rows import Fragment, Row, Source, printable
from shared.errors import ConfigError

#: by name, in any case; what a file holds is decided by its bytes when it is read
PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"})
#: files in one fragment
FRAGMENT = 256
#: fields of every picture file
FIELDS = frozenset({"id", "name", "stem", "folder"})


@dataclass(frozen=True)
class PathFragment:
    """Some pictures below a folder, or anywhere.

    Attributes:
        root: what the names are relative to; URLs and absolute paths are not.
        names: also the rows' ids.
    """

    root: str
    names: tuple[str, ...]

    def rows(self) -> Iterator[Row]:
        """One row a name; nothing is opened here."""
        for name in self.names:
            image = name if "://" in name or name.startswith("data:") else os.path.join(self.root, name)  # noqa: PTH118
            own = printable(name)
            path = Path(own)
            yield Row(own, image, {"id": own, "name": path.name, "stem": path.stem, "folder": path.parent.name})


def pictures_below(folder: Path) -> Iterator[str]:
    """Paths of picture files below a folder, relative to it, folder by folder; linked folders are not entered."""
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(files):
            if os.path.splitext(name)[1].lower() in PICTURES:  # noqa: PTH122 - a Path each costs more than the walk
                yield os.path.relpath(os.path.join(place, name), folder)  # noqa: PTH118


def find_pictures(folder: Path) -> list[Path]:
    """All picture files of a folder and its subfolders, sorted by path.

    Raises:
        ConfigError: no such folder, or no picture in it.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder")
    names = sorted(pictures_below(folder))
    if not names:
        raise ConfigError(f"no pictures below {folder} (looked for {', '.join(sorted(PICTURES))})")
    return [folder / name for name in names]


def folder_source(folder: Path) -> Source:
    """All picture files of a folder and its subfolders.

    Raises:
        ConfigError: there is none.
    """
    return pictures_source(find_pictures(folder), folder)


def pictures_source(files: Sequence[Path], root: Path) -> Source:
    """Picture files that a person named one by one, or by a glob."""
    base = str(root.absolute())
    names = sorted(os.path.relpath(path, base) for path in files)
    inputs = frozenset(str(path.absolute()) for path in files)
    return Source(_fragments(base, names), FIELDS, len(names), inputs, pictures=True, root=root)


def list_source(files: Sequence[Path]) -> Source:
    """Paths and URLs, one a line; paths are relative to the list. A line that comes again is the same row.

    Raises:
        ConfigError: a list that is empty, or no UTF-8 text.
    """
    fragments: list[Fragment] = []
    total = repeated = 0
    for file in files:
        try:
            lines = [line.strip("\r\n") for line in file.read_text("utf-8", "surrogateescape").split("\n")]
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
        names = list(dict.fromkeys(line for line in lines if line.strip()))
        if any("\0" in name for name in names):
            raise ConfigError(f"{file} is not a list of paths or URLs: it is not text")
        repeated += sum(bool(line.strip()) for line in lines) - len(names)
        if len(files) > 1:  # the same name in two folders is two pictures
            names = [name if "://" in name else str(file.absolute().parent / name) for name in names]
        fragments += _fragments(str(file.absolute().parent), names)
        total += len(names)
    if not total:
        raise ConfigError(f"{files[0]} names no pictures")
    notes = (f"{repeated} lines repeat others and count once",) if repeated else ()
    inputs = frozenset(str(file.absolute()) for file in files)
    return Source(fragments, FIELDS, total, inputs, notes=notes)


def _fragments(root: str, names: Iterable[str]) -> list[Fragment]:
    todo = iter(names)
    chunks = iter(lambda: tuple(islice(todo, FRAGMENT)), ())
    return [PathFragment(root, chunk) for chunk in chunks]
