"""Images over which encoder processes died: tried again one at a time, and refused when they do it again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from shared import metrics
from shared.cache import AsyncEmbeddingCache
from shared.config import ImageSettings
from shared.errors import QuarantinedImage, ReplicaLost
from shared.items import VisionItem
from shared.keys import strikes_key

logger = logging.getLogger(__name__)

#: counts kept in this process, for when Redis is gone; the oldest go first
MAX_REMEMBERED = 10_000

#: encodes; told whether an earlier process died over this image
Encode = Callable[[bool], Awaitable[VisionItem]]


class Quarantine:
    """Counts the deaths of encoder processes by image, in Redis for all ingress replicas and here for when that fails.

    Every image that was in work when a process died is a suspect. Suspects run one at a time, so that the innocent are
    cleared by their success, and only the image that ends processes by itself reaches the limit.

    Args:
        model: name of the model whose encoder pool it is.
        cache: holds the counts.
        settings: how many deaths are too many, and how long they are remembered.
    """

    def __init__(self, model: str, cache: AsyncEmbeddingCache, settings: ImageSettings) -> None:
        self._model = model
        self._cache = cache
        self._limit = settings.quarantine_after
        self._life = settings.quarantine_seconds
        self._alone = asyncio.Lock()
        self._here: OrderedDict[str, tuple[int, float]] = OrderedDict()

    async def guard(self, digest: str, encode: Encode) -> VisionItem:
        """Encodes an image, again when the process dies, until it is in quarantine.

        Args:
            digest: of the file.
            encode: the call to the pool.

        Raises:
            QuarantinedImage: too many processes died over it.
        """
        strikes = await self._strikes(digest)
        while True:
            self._check(digest, strikes)
            try:
                if not strikes:
                    return await encode(False)
                async with self._alone:
                    item = await encode(True)
            except ReplicaLost:
                strikes = await self._strike(digest, strikes)
            else:
                await self._forgive(digest)
                return item

    def _check(self, digest: str, strikes: int) -> None:
        if strikes < self._limit:
            return
        metrics.QUARANTINED.labels(self._model).inc()
        raise QuarantinedImage(
            f"this image is in quarantine: {strikes} encoder processes ended while they worked on it. Convert it to "
            f"another format or leave it out; it is tried again after {self._life:g} s."
        )

    async def _strikes(self, digest: str) -> int:
        shared = await self._cache.counted(strikes_key(self._model, digest))
        return max(shared or 0, self._remembered(digest))

    async def _strike(self, digest: str, before: int) -> int:
        metrics.ENCODER_DEATHS.labels(self._model).inc()
        shared = await self._cache.count_up(strikes_key(self._model, digest), self._life)
        strikes = max(shared or 0, before + 1)
        self._here[digest] = (strikes, time.monotonic() + self._life)
        self._here.move_to_end(digest)
        while len(self._here) > MAX_REMEMBERED:
            self._here.popitem(last=False)
        level = logging.ERROR if strikes >= self._limit else logging.WARNING
        logger.log(level, "an encoder process of %s died over image %s (%d)", self._model, digest[:16], strikes)
        return strikes

    async def _forgive(self, digest: str) -> None:
        self._here.pop(digest, None)
        await self._cache.delete([strikes_key(self._model, digest)])

    def _remembered(self, digest: str) -> int:
        strikes, until = self._here.get(digest, (0, 0.0))
        return strikes if time.monotonic() < until else 0
