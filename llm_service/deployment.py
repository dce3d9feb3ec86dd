"""The language pool's Ray Serve shell: one replica is one vLLM engine without a tower."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from llm_service.messages import Chunk
from llm_service.prompts import Prompt
from llm_service.sampling import SamplingOptions
from shared import log
from shared.config import ModelSettings, Settings
from shared.items import VisionItem


class LanguageReplica:
    """A language engine behind Ray's remote calls; wrapped as a deployment by the application.

    Args:
        settings: the whole tree.
        model: which model to run.
        cache_url: URL of the embedding cache.
    """

    def __init__(self, settings: Settings, model: ModelSettings, cache_url: str) -> None:
        from llm_service.engine import LanguageEngine  # the driver, which names this class, needs no vLLM

        log.configure(settings.log)
        self._engine = LanguageEngine(model, settings.cache, cache_url)
        self._started = False

    async def reconfigure(self, _: object) -> None:
        """Called by Serve once before the replica counts as ready: starts the engine."""
        if not self._started:
            await self._engine.start()
            self._started = True

    async def generate(
        self, request_id: str, prompt: Prompt, items: list[VisionItem], sampling: SamplingOptions
    ) -> AsyncIterator[Chunk]:
        """See :meth:`LanguageEngine.generate`."""
        log.request_id.set(request_id)
        async with aclosing(self._engine.generate(request_id, prompt, items, sampling)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def parameter_names(self) -> list[str]:
        """Names of all parameters that this replica holds."""
        return list(await self._engine.parameter_names())

    async def stats(self) -> dict[str, float]:
        """Running and waiting requests, KV use."""
        return dict(self._engine.stats())

    async def check_health(self) -> None:
        """Raises when the engine is dead; Serve then replaces the replica."""
        if self._started:
            await self._engine.check_health()

    async def __del__(self) -> None:
        await self._engine.stop()
