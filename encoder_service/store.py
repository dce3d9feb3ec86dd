"""The encoder's view of the cache: found items, leases, new records. Its faults cost time, never a request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from shared.cache import AsyncEmbeddingCache
from shared.items import VisionItem
from shared.keys import alias_key
from shared.record_values import Encoding
from shared.records import RecordHeader, encode_record
from shared.sizing import Grid

#: for another encoder's work on one image, at most; the wait ends sooner when that encoder's lease ends
WAIT_SECONDS = 120.0
#: a lease is renewed so many times in its length: one renewal may be lost
RENEWALS = 3


class Store:
    """One engine's use of the cache.

    Args:
        cache: shared with other engines.
        merge: of this engine's tower.
        pooled: whether that gives one row for every image.
        encoding: of new records.
    """

    def __init__(
        self, cache: AsyncEmbeddingCache, merge: int, *, pooled: bool = False, encoding: Encoding = Encoding.RAW
    ) -> None:
        self._cache = cache
        self._owner = uuid.uuid4().hex
        self._merge = merge
        self._pooled = pooled
        self._encoding = encoding

    def shape(self, grid: Grid) -> tuple[Grid, int]:
        """Grid and merge factor of an image's record."""
        return (Grid(1, 1), 1) if self._pooled else (grid, self._merge)

    def record(self, key: str, embedding: torch.Tensor, grid: Grid) -> bytes:
        """The record of a new embedding; takes a while.

        Raises:
            RecordError: it holds a value that is not finite.
        """
        return encode_record(key, embedding, *self.shape(grid), self._encoding)

    async def find(self, key: str) -> VisionItem | None:
        """The item of an embedding that the cache holds."""
        header = await self._cache.describe(key)
        return None if header is None else _item(key, header)

    async def fetch(self, key: str) -> bytes | None:
        """A whole record, checked by the cache; a copy, because it travels on to other processes."""
        record = await self._cache.fetch(key)
        return None if record is None else bytes(record)

    async def put(self, key: str, record: bytes, file_digest: str, picture_digest: str) -> bool:
        """Stores a record, and that this file holds this picture; whether the cache took it."""
        return await self._cache.put(key, record, alias=alias_key(file_digest), digest=picture_digest)

    async def add_alias(self, file_digest: str, picture_digest: str) -> None:
        """Notes that another file holds a known picture."""
        await self._cache.add_alias(alias_key(file_digest), picture_digest)

    @asynccontextmanager
    async def lease(self, key: str) -> AsyncIterator[bool]:
        """Whether this engine is the one to encode ``key``; the lease is renewed until the block ends."""
        if not await self._claim(key):
            yield False
            return
        renewal = asyncio.create_task(self._renew(key))
        try:
            yield True
        finally:
            renewal.cancel()
            await self._cache.release(key, self._owner)

    async def _claim(self, key: str) -> bool:
        """A caller that leaves meanwhile leaves no lease behind, for which others would wait until it ends."""
        claim = asyncio.ensure_future(self._cache.claim(key, self._owner))
        try:
            return await asyncio.shield(claim)
        except asyncio.CancelledError:
            if await claim:
                await self._cache.release(key, self._owner)
            raise

    async def _renew(self, key: str) -> None:
        """An encode may take longer than a lease; only a dead owner's ends."""
        while True:
            await asyncio.sleep(self._cache.lease / RENEWALS)
            await self._cache.renew(key, self._owner)

    async def wait(self, key: str) -> VisionItem | None:
        """Waits for the encoder that holds the lease; None when it did not deliver."""
        header = await self._cache.wait_for(key, WAIT_SECONDS)
        return None if header is None else _item(key, header)


def _item(key: str, header: RecordHeader) -> VisionItem:
    return VisionItem(key, Grid(*header.grid), header.merge, header.tokens, cached=True)
