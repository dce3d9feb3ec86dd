"""Rows of JSONL, CSV, Parquet and Arrow files, one picture each: as bytes, a path or a URL in one of the columns."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_service.captioning.rows import Fragment, Row, Source, Value, printable
from llm_service.captioning.sources.readers import Chunk, reader_of
from shared.errors import ConfigError
from shared.idset import IdSet

TABLES = frozenset({".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"})
#: columns that are taken for the picture when nobody names one, best first
IMAGE_COLUMNS = (
    *("image", "img", "picture", "jpg", "jpeg", "png", "webp", "image_bytes", "bytes"),
    *("image_path", "path", "file_name", "filename", "file", "image_url", "url"),
)
ID_COLUMN = "id"
#: how base64 of the accepted formats begins
_BASE64 = re.compile(r"(?:iVBORw0KGgo|/9j/|R0lGOD|UklGR|SUkqA|TU0AK|Qk)[A-Za-z0-9+/\s]{48,}={0,2}\s*")
_ID_CHARACTERS = 512


@dataclass(frozen=True)
class TableFragment:
    """Some rows of a table.

    Attributes:
        chunk: which.
        root: what file names in ids are relative to.
        image, id: columns; without an id column rows are named by file and place.
    """

    chunk: Chunk
    root: str
    image: str
    id: str | None

    def rows(self) -> Iterator[Row]:
        """Reads them."""
        path = Path(self.chunk.path)
        name = printable(os.path.relpath(path, self.root))
        place = self.chunk.first
        try:
            for place, values in enumerate(reader_of(path).read(self.chunk), self.chunk.first):
                yield self._row(path, name, place, values)
        except Exception as error:  # noqa: BLE001 - whatever a decoder of damaged files raises
            reason = f"{name} cannot be read from row {place} on: {error}"
            yield Row(f"{name}#{place}…", error=reason[:500])

    def _row(self, path: Path, name: str, place: int, values: Mapping[str, Any] | str) -> Row:
        own = f"{name}#{place}"
        if isinstance(values, str):
            return Row(own, error=values)
        if self.id is not None:
            own = printable(str(values[self.id]))
        fields = {"id": own, **{key: value for key, value in values.items() if _is_field(value)}}
        try:
            image = picture(values.get(self.image), path.parent)
        except ValueError as error:
            return Row(own, error=f"column {self.image}: {error}", fields=fields)
        fields.pop(self.image, None)
        return Row(own, image, fields)


def _is_field(value: object) -> bool:
    return isinstance(value, Value)


def picture(value: object, folder: Path) -> bytes | str:
    """The picture that a table's cell holds: bytes, or a path or URL.

    Args:
        value: of the cell; data sets of Hugging Face hold a struct of bytes and path.
        folder: what paths are relative to.

    Raises:
        ValueError: nothing of the kind.
    """
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value.strip():
        kind = "nothing" if not value else type(value).__name__
        raise ValueError(f"bytes, a path or a URL is wanted, {kind} is there")
    if "://" in value[:64] or value.startswith("data:"):
        return value
    if _BASE64.fullmatch(value):
        try:
            return base64.b64decode(re.sub(r"\s", "", value), validate=True)
        except binascii.Error as error:
            raise ValueError("the base64 is damaged") from error
    return str(folder.absolute() / value)


def table_source(files: Sequence[Path], root: Path, image: str | None, own_id: str | None) -> Source:
    """Tables of one kind of column layout.

    Args:
        files: read in this order.
        root: what their names in ids are relative to.
        image: column of the picture; None takes the first of :data:`IMAGE_COLUMNS` that there is.
        own_id: column of unique names; None takes ``id`` if it is one.

    Raises:
        ConfigError: a file that cannot be read at all, columns that are not there, names that are not unique.
    """
    columns = _columns(files)
    image = _image_column(image, columns, files[0])
    if own_id is not None and own_id not in columns:
        raise ConfigError(f"{files[0]} has no column {own_id}; there is: {', '.join(columns)}")
    chunks = [chunk for file in files for chunk in reader_of(file).chunks(file)]
    notes: tuple[str, ...] = ()
    wanted = own_id or (ID_COLUMN if ID_COLUMN in columns and image != ID_COLUMN else None)
    if wanted is not None and (problem := _id_problem(files, chunks, wanted)) is not None:
        if own_id is not None:
            raise ConfigError(f"column {own_id} cannot name the rows: {problem}")
        wanted, notes = None, (f"rows are named by file and place, not by their column {wanted}: {problem}",)
    base = str(root.absolute())
    fragments: list[Fragment] = [TableFragment(chunk, base, image, wanted) for chunk in chunks]
    return Source(
        fragments,
        frozenset({*columns, "id"} - {image}),
        sum(chunk.count for chunk in chunks),
        frozenset(str(file.absolute()) for file in files),
        notes=notes,
    )


def _columns(files: Sequence[Path]) -> list[str]:
    """Columns of the first file; the others must have them too."""
    columns = reader_of(files[0]).columns(files[0])
    for file in files[1:]:
        missing = set(columns) - set(reader_of(file).columns(file))
        if missing and file.suffix.lower() not in (".jsonl", ".ndjson"):  # rows of JSONL may leave things out
            raise ConfigError(f"{file} lacks the column {sorted(missing)[0]}, which {files[0]} has")
    return columns


def _image_column(image: str | None, columns: Sequence[str], file: Path) -> str:
    if image is None:
        image = next((name for name in IMAGE_COLUMNS if name in columns), None)
        if image is None:
            raise ConfigError(
                f"no column of {file} looks like pictures; name one with --image-column. There is: {', '.join(columns)}"
            )
    if image not in columns:
        raise ConfigError(f"{file} has no column {image}; there is: {', '.join(columns)}")
    return image


def _id_problem(files: Sequence[Path], chunks: Sequence[Chunk], column: str) -> str | None:
    """Why a column cannot name rows; None when it can."""
    seen = IdSet()
    for file in files:
        reader = reader_of(file)
        for chunk in chunks:
            if chunk.path != str(file):
                continue
            for place, values in enumerate(reader.read(chunk, [column]), chunk.first):
                if isinstance(values, str):
                    continue  # a row that cannot be read is named by its place
                value = values.get(column)
                if not isinstance(value, str | int) or not 0 < len(str(value)) <= _ID_CHARACTERS:
                    return f"row {place} of {file.name} has none"
                if not seen.add(str(value)):
                    return f"{value} comes more than once"
    return None
