"""Reads tables in chunks: JSONL by byte offsets, Parquet by row groups, CSV and Arrow by file."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from shared.errors import ConfigError

#: lines of JSONL in one chunk
LINES = 2048
#: rows of JSONL that are looked at for columns
LOOKED_AT = 1000
#: rows of a column store that are held at a time
BATCH = 64

#: values by column, or why the row cannot be read
Values = Mapping[str, Any] | str


@dataclass(frozen=True)
class Chunk:
    """Some rows of a file that can be read by themselves.

    Attributes:
        path: of the file.
        first: place of its first row in the file.
        count: number of rows.
        start: where to begin: a byte offset, or the number of a row group.
    """

    path: str
    first: int
    count: int
    start: int = 0


class Reader(Protocol):
    """One kind of file."""

    def columns(self, path: Path) -> list[str]:
        """Names of its columns."""

    def chunks(self, path: Path) -> list[Chunk]:
        """Its rows in chunks."""

    def read(self, chunk: Chunk, columns: Sequence[str] | None = None) -> Iterator[Values]:
        """Rows of a chunk; ``columns`` may spare reading the others."""


def reader_of(path: Path) -> Reader:
    """The reader of a file, by its name."""
    return _READERS[path.suffix.lower()]


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise ConfigError(f"cannot read {path}: {str(error).splitlines()[0][:200]}") from error


class JsonLinesReader:
    """One JSON object a line."""

    def columns(self, path: Path) -> list[str]:
        """Of the first rows together."""
        names: dict[str, None] = {}
        with _readable(path), path.open("rb") as file:
            for number, line in enumerate(file):
                if number >= LOOKED_AT:
                    break
                row = _object(line)
                if isinstance(row, Mapping):
                    names |= dict.fromkeys(row)
        if not names:
            raise ConfigError(f"{path} holds no JSON objects, one a line")
        return list(names)

    def chunks(self, path: Path) -> list[Chunk]:
        """See :class:`Reader`. Empty lines are no rows."""
        chunks: list[Chunk] = []
        start = offset = rows = first = 0
        with _readable(path), path.open("rb") as file:
            for line in file:
                if line.strip():
                    rows += 1
                offset += len(line)
                if rows == LINES:
                    chunks.append(Chunk(str(path), first, rows, start))
                    first, rows, start = first + rows, 0, offset
        return [*chunks, Chunk(str(path), first, rows, start)] if rows else chunks

    def read(self, chunk: Chunk, columns: Sequence[str] | None = None) -> Iterator[Values]:
        """See :class:`Reader`."""
        with Path(chunk.path).open("rb") as file:
            file.seek(chunk.start)
            left = chunk.count
            while left and (line := file.readline()):
                if line.strip():
                    left -= 1
                    yield _object(line)


def _object(line: bytes) -> Values:
    try:
        row = json.loads(line)
    except ValueError:
        return "the line is not JSON"
    return row if isinstance(row, dict) else "the line is not a JSON object"


class CsvReader:
    """Comma- or tab-separated values with a line of headings.

    Args:
        separator: between values.
    """

    def __init__(self, separator: str) -> None:
        self._separator = separator

    def columns(self, path: Path) -> list[str]:
        """The headings."""
        with self._rows(path) as rows:
            names = next(rows, [])
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"the first line of {path} must be headings, each another")
        return names

    def chunks(self, path: Path) -> list[Chunk]:
        """See :class:`Reader`: one, since quoted values may hold line ends."""
        with self._rows(path) as rows:
            count = sum(1 for row in rows if row) - 1
        return [Chunk(str(path), 0, count)] if count > 0 else []

    def read(self, chunk: Chunk, columns: Sequence[str] | None = None) -> Iterator[Values]:
        """See :class:`Reader`."""
        with self._rows(Path(chunk.path)) as rows:
            names = next(rows, [])
            for row in rows:
                if not row:
                    continue
                if len(row) != len(names):
                    yield f"the row has {len(row)} values for {len(names)} columns"
                    continue
                yield {name: value or None for name, value in zip(names, row, strict=True)}

    @contextmanager
    def _rows(self, path: Path) -> Iterator[Iterator[list[str]]]:
        csv.field_size_limit(sys.maxsize)  # pictures as base64 are longer than the default permits
        with _readable(path), path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            yield csv.reader(file, delimiter=self._separator)


class ParquetReader:
    """Parquet, by row groups."""

    def columns(self, path: Path) -> list[str]:
        """See :class:`Reader`."""
        with _readable(path):
            return list(pq.read_schema(path).names)

    def chunks(self, path: Path) -> list[Chunk]:
        """See :class:`Reader`."""
        found, first = [], 0
        with _readable(path), pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                found.append(Chunk(str(path), first, rows, group))
                first += rows
        return found

    def read(self, chunk: Chunk, columns: Sequence[str] | None = None) -> Iterator[Values]:
        """See :class:`Reader`."""
        with pq.ParquetFile(chunk.path) as file:
            for batch in file.iter_batches(BATCH, row_groups=[chunk.start], columns=columns):
                yield from batch.to_pylist()


class ArrowReader:
    """Arrow streams, as ``datasets.save_to_disk`` writes them."""

    def columns(self, path: Path) -> list[str]:
        """See :class:`Reader`."""
        with _readable(path), self._open(path) as stream:
            return list(stream.schema.names)

    def chunks(self, path: Path) -> list[Chunk]:
        """See :class:`Reader`."""
        with _readable(path), self._open(path) as stream:
            return [Chunk(str(path), 0, sum(batch.num_rows for batch in stream))]

    def read(self, chunk: Chunk, columns: Sequence[str] | None = None) -> Iterator[Values]:
        """See :class:`Reader`."""
        with self._open(Path(chunk.path)) as stream:
            for batch in stream:
                part = batch if columns is None else batch.select(list(columns))
                for start in range(0, part.num_rows, BATCH):
                    yield from part.slice(start, BATCH).to_pylist()

    @contextmanager
    def _open(self, path: Path) -> Iterator[Any]:
        with pa.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
            yield stream


_READERS: dict[str, Reader] = {
    ".jsonl": JsonLinesReader(),
    ".ndjson": JsonLinesReader(),
    ".csv": CsvReader(","),
    ".tsv": CsvReader("\t"),
    ".parquet": ParquetReader(),
    ".arrow": ArrowReader(),
}
