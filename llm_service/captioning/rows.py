"""Rows of a source on their way to a worker, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

#: a value of a row that a prompt may name
Value = str | int | float | bool | None


def printable(name: str) -> str:
    """An id as it can stand in any file: bytes of a file name that are no UTF-8 become ``\\xNN``."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


@dataclass(frozen=True)
class Row:
    """One picture to caption.

    Attributes:
        id: unique in its source and the same in every run: a path below the folder, a line, a file's row, a tar's key;
            :func:`printable`.
        image: the encoded file, or where it is: a path or a URL.
        fields: what prompts may name.
        error: why the source could not give this row; then there is no image.
    """

    id: str
    image: bytes | str = b""
    fields: Mapping[str, Value] = field(default_factory=dict)
    error: str | None = None

    def pack(self) -> tuple[str, bytes | None]:
        """The row as ASCII JSON and bytes, for tables whose text must be Unicode; file names need not be."""
        plain = asdict(self)
        data = plain.pop("image")
        if isinstance(data, str):
            plain["image"], data = data, None
        return json.dumps(plain, default=str), data

    @staticmethod
    def unpack(text: str, data: bytes | None) -> Row:
        """The row that :meth:`pack` packed."""
        plain = json.loads(text)
        if data is not None:
            plain["image"] = data
        return Row(**plain)


class Fragment(Protocol):
    """A part of a source that one worker reads; small, and travels to it."""

    def rows(self) -> Iterator[Row]:
        """Reads it. What cannot be read becomes a row with an error, never an exception."""


@dataclass(frozen=True)
class Source:
    """Everything that is to be captioned.

    Attributes:
        fragments: its parts, in order.
        fields: what prompts may name; None when only the rows themselves can tell.
        total: how many rows; None when nobody knows before reading.
        files: the input files as far as they are on this machine, which the output must not touch.
        pictures: rows are picture files on this machine, so that captions may stand beside them.
        root: folder that the ids of pictures are relative to.
        notes: sentences for the person who asked, about what was left out.
        identity: what a job's output depends on, as JSON values.
    """

    fragments: list[Fragment]
    fields: frozenset[str] | None
    total: int | None
    files: frozenset[str] = frozenset()
    pictures: bool = False
    root: Path = Path()
    notes: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a row.

    Attributes:
        id: of the row.
        lines: rows of the output, one per prompt; empty when the row failed.
        error: why it failed.
        seconds: by stage: ``read``, ``encode``, ``answer``.
        cached: no encoder forward ran for it.
        duplicate: it took the captions of another picture of the same content.
    """

    id: str
    lines: tuple[Mapping[str, Any], ...] = ()
    error: str | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    cached: bool = False
    duplicate: bool = False

    def pack(self) -> str:
        """As ASCII JSON; see :meth:`Row.pack`."""
        return json.dumps(asdict(self))

    @staticmethod
    def unpack(text: str) -> Outcome:
        """The outcome that :meth:`pack` packed."""
        plain = json.loads(text)
        return Outcome(**plain | {"lines": tuple(plain["lines"])})
