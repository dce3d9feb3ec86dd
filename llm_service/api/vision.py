"""From an image URL in a request to a vision item: fetch, hash, look up, and only then encode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from llm_service.api.pools import EncoderPool
from llm_service.api.quarantine import Quarantine
from shared import metrics, tracing
from shared.cache import AsyncEmbeddingCache
from shared.config import ImageSettings
from shared.errors import ImageTooLarge, RequestError, TooManyImages, UnknownImage
from shared.fetch import ImageFetcher
from shared.flights import FollowedFailure, SingleFlight
from shared.images import ImageHeader, probe
from shared.items import VisionItem
from shared.keys import Namespace, alias_key, bytes_digest, salted
from shared.sizing import Grid, SizeRule

Result = TypeVar("Result")

#: what a request writes before the hash of an image that was uploaded before
NAMED = "lookonce://"


class ImageSource(NamedTuple):
    """Where a request says that an image is.

    Attributes:
        url: of a file, or ``lookonce://`` and the hash of one that was seen before.
        fallback: URL to take when the named image is no longer known.
    """

    url: str
    fallback: str | None = None


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

    def merged(self, rule: SizeRule) -> Grid:
        """Its embedding rows as a grid."""
        return rule.merged(self.header.width, self.header.height)


@dataclass(frozen=True)
class KnownImage:
    """An image that the request names by its hash, and whose embedding is in the cache.

    Attributes:
        item: what the cache says.
        source: as the request had it.
    """

    item: VisionItem
    source: ImageSource

    def merged(self, _: SizeRule) -> Grid:
        """Its embedding rows as a grid."""
        return self.item.merged


RequestImage = FetchedImage | KnownImage


class _Hashed(NamedTuple):
    file: FetchedImage
    digest: str
    hash_seconds: float


class ImageResolver:
    """Finds or makes the embeddings of a request's images, for one model.

    The encoded bytes have their own digest; Redis maps it to the digest of the pixels, so that a repeated upload is
    found without decoding. Requests in this process that want the same new image share one call to the pool.
    """

    def __init__(
        self,
        encoder: EncoderPool,
        cache: AsyncEmbeddingCache,
        fetcher: ImageFetcher,
        limits: ImageSettings,
        model: str,
    ) -> None:
        self.encoder = encoder
        self.model = model
        self._quarantine = Quarantine(model, cache, limits)
        self._cache = cache
        self._fetcher = fetcher
        self._limits = limits
        self._namespace: Namespace | None = None
        self._flights: SingleFlight[VisionItem] = SingleFlight()

    async def fetch(self, sources: Sequence[ImageSource], salt: str | None) -> list[RequestImage]:
        """Reads all images of a request at once and checks their sizes.

        Raises:
            TooManyImages, FetchFailed, BadImage, ImageTooLarge, UnknownImage: the message names the image's place in
                the request.
        """
        if len(sources) > self._limits.max_per_request:
            raise TooManyImages(
                f"{len(sources)} images in one request; at most {self._limits.max_per_request} are allowed",
                param="messages",
            )
        images = await gather_or_cancel([self._fetch_one(*placed, salt) for placed in enumerate(sources)])
        pixels = sum(i.header.width * i.header.height for i in images if isinstance(i, FetchedImage))
        if pixels > self._limits.max_request_pixels:
            raise TooManyImages(
                f"the images of this request have {pixels} pixels together; the limit is "
                f"{self._limits.max_request_pixels}",
                param="messages",
            )
        return images

    async def _fetch_one(self, place: int, source: ImageSource, salt: str | None) -> RequestImage:
        begin = time.perf_counter()
        try:
            if source.url.startswith(NAMED):
                if (item := await self.look_up(source.url, salt)) is not None:
                    return KnownImage(item, source)
                if source.fallback is None:
                    raise unknown_image(source.url)
                return await self._read(source.fallback, begin)
            return await self._read(source.url, begin)
        except RequestError as error:
            raise _placed(error, place) from error

    def uploaded(self, data: bytes) -> FetchedImage:
        """An image whose file came in a request's body.

        Raises:
            BadImage, ImageTooLarge: as for any other.
        """
        if len(data) > self._limits.max_bytes:
            raise ImageTooLarge(f"the file has {len(data)} bytes; the limit is {self._limits.max_bytes}", param="file")
        return FetchedImage(data, probe(data, self._limits), 0.0)

    async def _read(self, url: str, begin: float) -> FetchedImage:
        with tracing.span("fetch") as work:
            data = await self._fetcher.load(url)
            work.note(bytes=len(data))
        return FetchedImage(data, probe(data, self._limits), time.perf_counter() - begin)

    async def resolve(self, images: Sequence[RequestImage], salt: str | None) -> list[VisionItem]:
        """Vision items of a request's images, in order; equal images of one request are looked up once.

        Raises:
            BadImage, QuarantinedImage: the message names the image's place in the request.
        """
        hashed = await gather_or_cancel([_hashed(image, salt) for image in images])
        # all in one turn of the loop: the cache makes one round trip of their look-ups
        return await gather_or_cancel([self._resolve_placed(place, one, salt) for place, one in enumerate(hashed)])

    async def _resolve_placed(self, place: int, image: _Hashed | KnownImage, salt: str | None) -> VisionItem:
        try:
            return await self._resolve_one(image, salt)
        except RequestError as error:
            raise _placed(error, place) from error

    async def resolve_whole(self, images: Sequence[RequestImage], salt: str | None) -> list[VisionItem]:
        """The same with every record inside the item, checked.

        Raises:
            UnknownImage: as for :meth:`encode_inline`.
        """
        items = await self.resolve(images, salt)
        return await gather_or_cancel(
            [self._whole(image, item, salt) for image, item in zip(images, items, strict=True)]
        )

    async def _whole(self, image: RequestImage, item: VisionItem, salt: str | None) -> VisionItem:
        if item.record is not None:
            return item
        if (record := await self._cache.fetch(item.key)) is not None:
            return replace(item, record=bytes(record))
        metrics.EMBEDDINGS_LOST.labels(self.model).inc()
        return replace(item, record=(await self.encode_inline(image, salt)).record)

    async def encode_inline(self, image: RequestImage, salt: str | None) -> VisionItem:
        """The item with its record inside, for a cache that lost or refused it.

        Raises:
            UnknownImage: the request named the image and brought no bytes to encode again.
        """
        if isinstance(image, KnownImage):
            if image.source.fallback is None:
                raise unknown_image(image.source.url)
            image = await self._read(image.source.fallback, time.perf_counter())
        digest = await asyncio.to_thread(bytes_digest, image.data, salt)
        return await self._encode_shared(image.data, digest, salt, inline=True)

    async def encode_named(self, data: bytes, name: str, salt: str | None) -> VisionItem:
        """Encodes a file that is not in the cache, whose hash is known already."""
        return await self._encode_shared(data, salted(name, salt), salt, inline=False)

    async def look_up(self, name: str, salt: str | None) -> VisionItem | None:
        """The item of an image that this tenant uploaded before, by its hash; None when the cache does not have it.

        Args:
            name: the hash, with or without ``lookonce://``.
            salt: of the tenant: another tenant's images are not found.

        Raises:
            UnknownImage: not a hash.
        """
        try:
            digest = salted(name.removeprefix(NAMED), salt)
        except ValueError as error:
            raise UnknownImage(f"{str(error)[:120]}; POST the file to /v1/images to get its name") from error
        return await self._look_up(digest)

    async def purge(self, name: str, salt: str | None) -> bool:
        """Deletes an image's embedding and its alias; False when the cache does not have it."""
        item = await self.look_up(name, salt)
        if item is None:
            return False
        await self._cache.delete([item.key, alias_key(salted(name.removeprefix(NAMED), salt))])
        return True

    async def _resolve_one(self, image: _Hashed | KnownImage, salt: str | None) -> VisionItem:
        if isinstance(image, KnownImage):
            return image.item
        begin = time.perf_counter()
        with tracing.span("lookup") as work:
            item = await self._look_up(image.digest)
            work.note(found=item is not None)
        timings = {
            "fetch": image.file.fetch_seconds,
            "hash": image.hash_seconds,
            "lookup": time.perf_counter() - begin,
        }
        if item is None:
            item = await self._encode_shared(image.file.data, image.digest, salt, inline=False)
        return replace(item, timings={**item.timings, **timings})

    async def _look_up(self, digest: str) -> VisionItem | None:
        pixel_digest = await self._cache.resolve_alias(alias_key(digest))
        if pixel_digest is None:
            return None
        if self._namespace is None:
            self._namespace = await self.encoder.identity()
        key = self._namespace.embedding_key(pixel_digest)
        header = await self._cache.describe(key)
        if header is None:
            return None
        return VisionItem(key, Grid(header.grid.height, header.grid.width), header.merge, header.tokens, cached=True)

    async def _encode_shared(self, data: bytes, digest: str, salt: str | None, *, inline: bool) -> VisionItem:
        """One call to the pool for all requests here that wait for the same file; the last to leave cancels it."""
        name = f"{digest}:{inline}"

        async def encode() -> VisionItem:
            return await self._quarantine.guard(
                digest, lambda again: self.encoder.encode(data, salt=salt, inline=inline, again=again)
            )

        joined = name in self._flights
        try:
            item = await self._flights.run(name, encode)
        except FollowedFailure as failure:
            if isinstance(failure.error, RequestError):
                raise failure.error from failure
            joined = False  # somebody else's bad luck is not remembered: this request tries for itself
            item = await encode()
        self._namespace = Namespace.of(item.key)  # asking for it would wake a pool that sleeps by then
        return replace(item, cached=True, timings={}) if joined else item


async def _hashed(image: RequestImage, salt: str | None) -> _Hashed | KnownImage:
    if isinstance(image, KnownImage):
        return image
    begin = time.perf_counter()
    # 1 GB/s or more, without the interpreter lock: large uploads are hashed beside the event loop
    with tracing.span("hash"):
        digest = await asyncio.to_thread(bytes_digest, image.data, salt)
    return _Hashed(image, digest, time.perf_counter() - begin)


def _placed(error: RequestError, place: int) -> RequestError:
    """The same error about one image of a request; the original may be another request's as well."""
    placed = copy(error)
    placed.args = (f"image {place}: {error.message}",)
    placed.message, placed.param = placed.args[0], error.param or f"messages.image_url[{place}]"
    return placed


def unknown_image(url: str) -> UnknownImage:
    """For an image that was purged, evicted, or never sent by this tenant; the three look alike."""
    return UnknownImage(f"{url[:100]} is not in the cache; send the picture itself, or both (image_url.fallback)")


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Runs coroutines together; the first error cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
