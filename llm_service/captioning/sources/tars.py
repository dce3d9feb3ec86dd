"""WebDataset tars: members that share the name up to the first dot are one sample."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_service.captioning.rows import Fragment, Row, Source, Value, printable
from llm_service.captioning.sources.files import PICTURES

#: largest member that is read: above every limit on pictures, far below what hurts
MAX_MEMBER = 256 << 20


@dataclass(frozen=True)
class TarFragment:
    """One tar.

    Attributes:
        path: of the tar.
        name: of it in ids.
    """

    path: str
    name: str

    def rows(self) -> Iterator[Row]:
        """Reads it from front to end; a tar that is cut short gives what is whole and then an error."""
        place, key = 0, ""
        sample: dict[str, bytes | None] = {}
        try:
            with tarfile.open(self.path, "r|*") as tar:
                for member in tar:
                    if not member.isfile():
                        continue
                    folder, _, file = member.name.rpartition("/")
                    base, _, suffix = file.partition(".")
                    own = f"{folder}/{base}" if folder else base
                    if sample and own != key:
                        yield self._row(key, sample)
                        place, sample = place + 1, {}
                    key = own
                    sample[suffix.lower()] = self._content(tar, member)
                if sample:
                    yield self._row(key, sample)
        except Exception as error:  # noqa: BLE001 - whatever a damaged archive makes the decompressors raise
            reason = f"{self.name} cannot be read after {place} samples: {error}"
            yield Row(f"{self.name}#{place}…", error=reason)

    @staticmethod
    def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | None:
        """A member's bytes; None if it is too large."""
        if member.size > MAX_MEMBER:
            return None
        file = tar.extractfile(member)
        data = b"" if file is None else file.read()
        if len(data) < member.size:
            raise EOFError(f"{member.name} is cut short")
        return data

    def _row(self, key: str, sample: dict[str, bytes | None]) -> Row:
        own = printable(f"{self.name}/{key}")
        fields: dict[str, Value] = {"id": own, "key": key}
        pictures = []
        for suffix, data in sample.items():
            if f".{suffix.rpartition('.')[2]}" in PICTURES:
                pictures.append(data)
            elif data is not None and suffix.rpartition(".")[2] == "json":
                fields |= _object(data)
            elif data is not None and len(data) <= 65536:
                fields[suffix.replace(".", "_")] = data.decode(errors="replace").strip()
        if not pictures or not pictures[0]:
            held = ", ".join(sorted(sample))
            return Row(own, error=f"the sample holds no picture that can be read (it has {held})", fields=fields)
        return Row(own, pictures[0], fields)


def _object(data: bytes) -> dict[str, Value]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {str(name): value for name, value in items if value is None or isinstance(value, str | int | float | bool)}


def tar_source(files: Sequence[Path], root: Path) -> Source:
    """Tars of samples. How many there are, and of what fields, is known after reading."""
    fragments: list[Fragment] = [TarFragment(str(file.absolute()), os.path.relpath(file, root)) for file in files]
    return Source(fragments, None, None, frozenset(str(file.absolute()) for file in files))
