"""From an image URL in a request to a vision item: fetch, hash, look up, and only then encode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from llm_service.api.pools import EncoderPool
from shared.cache import AsyncEmbeddingCache
from shared.config import ImageSettings
from shared.errors import RequestError, TooManyImages
from shared.fetch import ImageFetcher
from shared.flights import FollowedFailure, SingleFlight
from shared.images import ImageHeader, probe
from shared.items import VisionItem
from shared.keys import Namespace, alias_key, bytes_digest
from shared.sizing import Grid

Result = TypeVar("Result")


@dataclass(frozen=True)
class FetchedImage:
    """An image file that passed the checks that need no pixel.

    Attributes:
        data: the encoded file.
        header: size after orientation, and format.
        fetch_seconds: how long the URL took.
    """

    data: bytes
    header: ImageHeader
    fetch_seconds: float


class ImageResolver:
    """Finds or makes the embeddings of a request's images, for one model.

    The encoded bytes have their own digest; Redis maps it to the digest of the pixels, so that a repeated upload is
    found without decoding. Requests in this process that want the same new image share one call to the pool.
    """

    def __init__(
        self, encoder: EncoderPool, cache: AsyncEmbeddingCache, fetcher: ImageFetcher, limits: ImageSettings
    ) -> None:
        self._encoder = encoder
        self._cache = cache
        self._fetcher = fetcher
        self._limits = limits
        self._namespace: Namespace | None = None
        self._flights: SingleFlight[VisionItem] = SingleFlight()

    async def fetch(self, urls: Sequence[str]) -> list[FetchedImage]:
        """Reads all images of a request at once and checks their sizes.

        Raises:
            TooManyImages, FetchFailed, BadImage, ImageTooLarge: the message names the image's place in the request.
        """
        if len(urls) > self._limits.max_per_request:
            raise TooManyImages(
                f"{len(urls)} images in one request; at most {self._limits.max_per_request} are allowed",
                param="messages",
            )
        images = await gather_or_cancel([self._fetch_one(place, url) for place, url in enumerate(urls)])
        pixels = sum(image.header.width * image.header.height for image in images)
        if pixels > self._limits.max_request_pixels:
            raise TooManyImages(
                f"the images of this request have {pixels} pixels together; the limit is "
                f"{self._limits.max_request_pixels}",
                param="messages",
            )
        return images

    async def _fetch_one(self, place: int, url: str) -> FetchedImage:
        begin = time.perf_counter()
        try:
            data = await self._fetcher.load(url)
            header = probe(data, self._limits)
        except RequestError as error:
            error.args = (f"image {place}: {error.message}",)
            error.message, error.param = error.args[0], error.param or f"messages.image_url[{place}]"
            raise
        return FetchedImage(data, header, time.perf_counter() - begin)

    async def resolve(self, images: Sequence[FetchedImage], salt: str | None) -> list[VisionItem]:
        """Vision items of fetched images, in order; equal images of one request are looked up once."""
        return await gather_or_cancel([self._resolve_one(image, salt) for image in images])

    async def encode_inline(self, image: FetchedImage, salt: str | None) -> VisionItem:
        """The item with its record inside, for a cache that lost or refused it."""
        return await self._encode_shared(image.data, bytes_digest(image.data, salt), salt, inline=True)

    async def _resolve_one(self, image: FetchedImage, salt: str | None) -> VisionItem:
        timings = {"fetch": image.fetch_seconds}
        begin = time.perf_counter()
        # 1 GB/s or more, without the interpreter lock: large uploads are hashed beside the event loop
        digest = await asyncio.to_thread(bytes_digest, image.data, salt)
        hashed = time.perf_counter()
        timings["hash"] = hashed - begin
        item = await self._look_up(digest)
        timings["lookup"] = time.perf_counter() - hashed
        if item is None:
            item = await self._encode_shared(image.data, digest, salt, inline=False)
        return replace(item, timings={**item.timings, **timings})

    async def _look_up(self, digest: str) -> VisionItem | None:
        pixel_digest = await self._cache.resolve_alias(alias_key(digest))
        if pixel_digest is None:
            return None
        if self._namespace is None:
            self._namespace = await self._encoder.identity()
        key = self._namespace.embedding_key(pixel_digest)
        header = await self._cache.describe(key)
        if header is None:
            return None
        return VisionItem(key, Grid(header.grid.height, header.grid.width), header.merge, header.tokens, cached=True)

    async def _encode_shared(self, data: bytes, digest: str, salt: str | None, *, inline: bool) -> VisionItem:
        """One call to the pool for all requests here that wait for the same file; the last to leave cancels it."""
        name = f"{digest}:{inline}"

        async def encode() -> VisionItem:
            return await self._encoder.encode(data, salt=salt, inline=inline)

        joined = name in self._flights
        try:
            item = await self._flights.run(name, encode)
        except FollowedFailure as failure:
            if isinstance(failure.error, RequestError):
                raise failure.error from failure
            joined = False  # somebody else's bad luck is not remembered: this request tries for itself
            item = await self._encoder.encode(data, salt=salt, inline=inline)
        return replace(item, cached=True, timings={}) if joined else item


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Runs coroutines together; the first error cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
