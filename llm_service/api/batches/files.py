"""Files of tenants on disk: each whole or not there, each tenant in a folder of its own."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

from pydantic import ValidationError

from llm_service.api.access import Tenant
from llm_service.api.batches.ids import FILE, is_id, new_id
from llm_service.api.batches.records import StoredFile
from shared.config import BatchSettings
from shared.durable import replacing, storage_errors, sync_folder, write_whole
from shared.errors import PayloadTooLarge, RequestError, StorageError, UnknownFile

META, CONTENT = "meta.json", "content"
#: folder of those who need no key; no tenant's name begins so
EVERYBODY = "_everybody"
COPY_BYTES = 1 << 20
#: longest file name that is kept
MAX_NAME = 255

Item = TypeVar("Item")


def tenant_folder(root: Path, tenant: Tenant) -> Path:
    """Where a tenant's things are."""
    return root / (tenant.name or EVERYBODY)


class FileStore:
    """Files of all tenants.

    Args:
        root: folder of the whole store.
        settings: limits.
    """

    def __init__(self, root: Path, settings: BatchSettings) -> None:
        self._root = root
        self._settings = settings

    def add(self, tenant: Tenant, name: str, source: BinaryIO, seconds: int | None) -> StoredFile:
        """Stores an uploaded file.

        Args:
            tenant: its owner.
            name: as the client calls it.
            source: its bytes, read in pieces.
            seconds: its life; None for ever.

        Raises:
            PayloadTooLarge: it, or all files of the tenant together, are above the limit.
            RequestError: empty.
            StorageError: the disk is full.
        """
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        if size == 0:
            raise RequestError("the file is empty", param="file")
        self._check_size(tenant, size)
        now = int(time.time())
        file = StoredFile(
            id=new_id(FILE),
            bytes=size,
            created_at=now,
            expires_at=None if seconds is None else now + seconds,
            filename=name[:MAX_NAME],
            purpose="batch",
        )
        self._write(tenant, file, iter(lambda: source.read(COPY_BYTES), b""))
        return file

    def _check_size(self, tenant: Tenant, size: int) -> None:
        if size > self._settings.max_file_bytes:
            raise PayloadTooLarge(
                f"the file has {size} bytes; the limit is {self._settings.max_file_bytes}. Split it", param="file"
            )
        kept = sum(file.bytes for file in self.list(tenant))
        if kept + size > self._settings.max_tenant_bytes:
            raise PayloadTooLarge(
                f"your files would have {kept + size} bytes together; the limit is {self._settings.max_tenant_bytes}. "
                "Delete some",
                param="file",
            )

    def put(self, tenant: Tenant, name: str, filename: str, seconds: int | None, lines: Iterable[bytes]) -> StoredFile:
        """Stores the output of a batch under an id that was chosen before; storing it again replaces it.

        Raises:
            StorageError: the disk is full.
        """
        now = int(time.time())
        expires = None if seconds is None else now + seconds
        file = StoredFile(
            id=name, bytes=0, created_at=now, expires_at=expires, filename=filename, purpose="batch_output"
        )
        return self._write(tenant, file, lines)

    def _write(self, tenant: Tenant, file: StoredFile, pieces: Iterable[bytes]) -> StoredFile:
        folder = self._folder(tenant) / file.id
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(folder / CONTENT) as out:
                for piece in pieces:
                    out.write(piece)
                file = file.model_copy(update={"bytes": out.tell()})
            # a file is there once its description is
            write_whole(folder / META, file.model_dump_json().encode())
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with storage_errors(folder):
            sync_folder(folder.parent)
        return file

    def get(self, tenant: Tenant, name: str) -> StoredFile:
        """What is known of a file.

        Raises:
            UnknownFile: not there, another tenant's, or expired.
        """
        if is_id(FILE, name):
            with suppress(OSError, ValidationError):
                file = StoredFile.model_validate_json((self._folder(tenant) / name / META).read_bytes())
                if file.expires_at is None or file.expires_at > time.time():
                    return file
        raise UnknownFile(f"no file {name[:64]!r} here", param="file_id")

    def content(self, tenant: Tenant, name: str) -> Path:
        """Where a file's bytes are.

        Raises:
            UnknownFile: as for :meth:`get`.
        """
        return self._folder(tenant) / self.get(tenant, name).id / CONTENT

    def delete(self, tenant: Tenant, name: str) -> None:
        """Deletes a file.

        Raises:
            UnknownFile: as for :meth:`get`.
        """
        folder = self._folder(tenant) / self.get(tenant, name).id
        with storage_errors(folder):
            (folder / META).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)

    def list(self, tenant: Tenant, purpose: str | None = None) -> list[StoredFile]:
        """A tenant's files, oldest first."""
        found = []
        for name in names_in(self._folder(tenant)):
            with suppress(UnknownFile):
                found.append(self.get(tenant, name))
        return [file for file in found if purpose is None or file.purpose == purpose]

    def sweep(self, tenant: Tenant) -> None:
        """Removes what has expired, and what a crash left unfinished an hour ago."""
        for name in names_in(self._folder(tenant)):
            folder = self._folder(tenant) / name
            try:
                self.get(tenant, name)
            except UnknownFile:
                with suppress(OSError):
                    if (folder / META).exists() or time.time() - folder.stat().st_mtime > 3600:
                        shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, tenant: Tenant) -> Path:
        return tenant_folder(self._root, tenant) / "files"


def names_in(folder: Path) -> list[str]:
    """Names of a folder's entries, oldest first, since ids begin with the time; none if there is no folder."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot read the store: {error.strerror}") from error


def page(
    found: Sequence[Item], ids: Sequence[str], after: str | None, limit: int, order: Literal["asc", "desc"]
) -> tuple[list[Item], bool]:
    """One page of a list.

    Args:
        found: all, oldest first.
        ids: of each.
        after: id of the last one that the client has; one that is gone still has its place in time.
        limit: of the page.
        order: oldest or newest first.

    Returns:
        The page, and whether there is more.
    """
    pairs = list(zip(ids, found, strict=True))
    if order == "desc":
        pairs.reverse()
    if after is not None:
        pairs = [pair for pair in pairs if (pair[0] > after if order == "asc" else pair[0] < after)]
    return [item for _, item in pairs[:limit]], len(pairs) > limit
