"""The encoder pool's Ray Serve shell: one replica is one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared import log, tracing
from shared.config import ModelSettings, Settings
from shared.items import VisionItem
from shared.keys import Namespace

if TYPE_CHECKING:
    from encoder_service.engine import EncoderEngine


class EncoderReplica:
    """An encoder engine behind Ray's remote calls; wrapped as a deployment by the application.

    Args:
        settings: the whole tree.
        model: which model's tower to run.
        cache_url: URL of the embedding cache.
    """

    def __init__(self, settings: Settings, model: ModelSettings, cache_url: str) -> None:
        log.configure(settings.log)
        tracing.configure(settings.telemetry, f"encoder:{model.name}")
        self._settings = settings
        self._model = model
        self._cache_url = cache_url
        self._engine: EncoderEngine | None = None

    async def _started(self) -> EncoderEngine:
        if self._engine is None:
            raise RuntimeError("the encoder engine is not started")
        return self._engine

    async def reconfigure(self, _: object) -> None:
        """Called by Serve once before the replica counts as ready: loads the tower and warms it up."""
        from encoder_service.allocator import return_large_buffers
        from encoder_service.engine import EncoderEngine  # the driver, which names this class, needs no torch
        from shared.cache import AsyncEmbeddingCache

        if self._engine is None:
            return_large_buffers()
            cache = AsyncEmbeddingCache(self._settings.cache, self._cache_url)
            engine = EncoderEngine(self._model, self._settings.images, cache)
            await engine.start()
            self._engine = engine

    async def identity(self) -> Namespace:
        """Namespace of this model's cache keys."""
        return (await self._started()).identity()

    async def encode(
        self,
        data: bytes,
        request_id: str,
        salt: str | None,
        inline: bool,
        again: bool,
        batch: bool = False,
        trace: str | None = None,
    ) -> VisionItem:
        """See :meth:`EncoderEngine.encode`.

        Args:
            batch: nobody waits for it, so people's images go first.
            trace: ``traceparent`` of the caller's span.
        """
        from encoder_service.batching import Priority

        log.request_id.set(request_id)
        priority = Priority.BATCH if batch else Priority.INTERACTIVE
        request = None if batch or request_id == log.NO_REQUEST else request_id
        engine = await self._started()
        with tracing.span("encode", parent=trace, bytes=len(data), model=self._model.name, request_id=request_id):
            return await engine.encode(data, salt=salt, inline=inline, again=again, priority=priority, request=request)

    async def parameter_names(self) -> list[str]:
        """Names of all parameters that this replica holds."""
        return list((await self._started()).parameter_names())

    async def stats(self) -> dict[str, float]:
        """Plain counters of the engine."""
        return dict((await self._started()).stats())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What :mod:`lookonce.autoscaling` reckons with; called by Serve."""
        stats = (await self._started()).stats()
        return {"images": stats["in_work"], "patches": stats["patches_in_work"]}

    async def check_health(self) -> None:
        """Encodes a small picture and compares bits; raising makes Serve replace the replica."""
        if self._engine is not None:
            await self._engine.check_health()

    async def __del__(self) -> None:
        if self._engine is not None:
            await self._engine.stop()
