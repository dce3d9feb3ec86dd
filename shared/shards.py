"""Rows in numbered files of one folder, each file whole or not there: output that a crash cannot tear.

A *store* belongs to one job, known by its fingerprint: what is in the folder is only ever added to by the same job.

``job.json``       fingerprint and description of the job, written first
``part-000007.jsonl``  rows; appears by a rename, whole and synced
``manifest.jsonl``  one line per part: its name and number of rows, added after the part is there
``lock``           held while somebody writes

A part that is there and not in the manifest was finished just before a crash, and counts. One that the manifest names
and that is gone was deleted by somebody: its rows count as not done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from shared.durable import append_line, held, read_lines, replacing, storage_errors, sync_folder, write_whole
from shared.errors import ConfigError

Row = Mapping[str, Any]

JOB, MANIFEST, LOCK = "job.json", "manifest.jsonl", "lock"
#: raise it when stores of an older version cannot be gone on with
STORE_VERSION = 1


class RowFormat(Protocol):
    """How rows stand in a part."""

    suffix: str

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        """Writes a part; it appears whole or not at all."""

    def read(self, path: Path) -> Iterator[dict[str, Any]]:
        """Reads a part."""


class JsonLines:
    """One JSON object a line, UTF-8."""

    suffix = ".jsonl"

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        """See :class:`RowFormat`."""
        with replacing(path) as file:
            for row in rows:
                file.write(json_line(row))

    def read(self, path: Path) -> Iterator[dict[str, Any]]:
        """See :class:`RowFormat`.

        Raises:
            ConfigError: a line that is no JSON object; names it.
        """
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict):
                    raise ConfigError(f"line {number} of {path} is not a JSON object; mend it or remove the file")
                yield row


def json_line(row: Row) -> bytes:
    """A row as a line. File names that are no valid Unicode keep their bytes as ``\\udcXX``."""
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
    try:
        return text.encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row, separators=(",", ":")).encode() + b"\n"


def fingerprint(job: Mapping[str, Any]) -> str:
    """Identity of a job: 32 hex digits over everything that its output depends on.

    Args:
        job: JSON values; the order of keys does not matter.
    """
    return blake3(json.dumps(job, sort_keys=True, ensure_ascii=True).encode()).hexdigest(16)


@dataclass(frozen=True)
class Part:
    """One finished file of a store."""

    path: Path
    rows: int


class ShardStore:
    """Rows of one job in one folder; a context manager that holds the folder's lock.

    Args:
        folder: made if missing.
        job: what the output depends on, as JSON values.
        rows: format of the parts.

    Raises (on entering):
        InUse: another process works in the folder.
        ConfigError: the folder holds something else, or output of a job that differs; names what differs.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any], rows: RowFormat) -> None:
        self.folder = folder
        self.fingerprint = fingerprint(job)
        self._job = dict(job)
        self._format = rows
        self._stack = ExitStack()
        self._next = 0
        self._known: dict[str, int] = {}

    def __enter__(self) -> ShardStore:
        with storage_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(held(self.folder / LOCK, str(self.folder)))
        try:
            self._claim()
        except BaseException:
            self._stack.close()
            raise
        self._known = {line["part"]: line["rows"] for line in read_lines(self.folder / MANIFEST) if "part" in line}
        numbers = [_number(path.name) for path in self._files("part-*")] + [_number(name) for name in self._known]
        self._next = 1 + max(numbers, default=-1)
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _claim(self) -> None:
        path = self.folder / JOB
        mine = {"version": STORE_VERSION, "fingerprint": self.fingerprint, "job": self._job}
        if not path.exists():
            foreign = [entry.name for entry in self.folder.iterdir() if entry.name != LOCK and entry.name[0] != "."]
            if foreign:
                raise ConfigError(f"{self.folder} holds other files ({foreign[0]}, …); choose an empty or new folder")
            write_whole(path, json.dumps(mine, indent=1).encode() + b"\n")
            return
        try:
            theirs = json.loads(path.read_bytes())
            same = theirs["version"] == STORE_VERSION and theirs["fingerprint"] == self.fingerprint
            changes = differences(theirs["job"], self._job)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read; remove {self.folder} to begin anew") from error
        if not same:
            raise ConfigError(
                f"{self.folder} holds the output of another job ({'; '.join(changes) or 'of another version'}); "
                "choose another output, or overwrite this one"
            )

    def write(self, rows: Sequence[Row]) -> Part | None:
        """Makes rows last, as one part; None for no rows.

        Raises:
            StorageError: no space; the store is as it was before.
        """
        if not rows:
            return None
        path = self.folder / f"part-{self._next:06d}{self._format.suffix}"
        with storage_errors(path):
            self._format.write(path, rows)
        append_line(self.folder / MANIFEST, {"part": path.name, "rows": len(rows)})
        self._next += 1
        self._known[path.name] = len(rows)
        return Part(path, len(rows))

    def parts(self) -> list[Path]:
        """Finished files, in the order in which they were written."""
        return sorted(self._files(f"part-*{self._format.suffix}"), key=lambda path: _number(path.name))

    def rows(self) -> Iterator[dict[str, Any]]:
        """All rows of all parts."""
        for path in self.parts():
            yield from self._format.read(path)

    def lost(self) -> list[str]:
        """Parts that the manifest names and that somebody deleted."""
        return sorted(name for name in self._known if not (self.folder / name).exists())

    def rewrite(self, transform: Callable[[Iterator[dict[str, Any]]], Iterable[Row]]) -> None:
        """Replaces every part by what ``transform`` makes of its rows; a part that is left empty goes."""
        for path in self.parts():
            kept = list(transform(self._format.read(path)))
            if kept:
                self._format.write(path, kept)
                append_line(self.folder / MANIFEST, {"part": path.name, "rows": len(kept)})
            else:
                self._drop(path)

    def clear(self) -> None:
        """Removes every part, for the same job to begin anew."""
        for path in self.parts():
            self._drop(path)

    def _drop(self, path: Path) -> None:
        with storage_errors(path):
            path.unlink(missing_ok=True)
            sync_folder(self.folder)
        self._known.pop(path.name, None)

    def _files(self, pattern: str) -> list[Path]:
        return [path for path in self.folder.glob(pattern) if _number(path.name) >= 0]


def _number(name: str) -> int:
    match = re.fullmatch(r"part-(\d+)\.\w+", name)
    return int(match[1]) if match else -1


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed from one job to another, as ``name was …, is …``."""
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    return [f"{name} was {_short(old.get(name))}, is {_short(new.get(name))}" for name in names]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"
