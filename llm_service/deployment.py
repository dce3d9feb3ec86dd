"""The language pool's Ray Serve shell: one replica is one vLLM engine without a tower."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager

from llm_service.messages import Chunk
from llm_service.prompts import Prompt
from llm_service.sampling import SamplingOptions
from shared import log
from shared.config import ModelSettings, Settings
from shared.errors import ReplicaLost
from shared.items import VisionItem

logger = logging.getLogger(__name__)


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
        self._stopping = False
        self._in_work = 0

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
        self._in_work += 1
        try:
            with self._ending_when_lost():
                async with aclosing(self._engine.generate(request_id, prompt, items, sampling)) as chunks:
                    async for chunk in chunks:
                        yield chunk
        finally:
            self._in_work -= 1

    async def answer(
        self, request_id: str, prompt: Prompt, items: list[VisionItem], sampling: SamplingOptions
    ) -> list[Chunk]:
        """See :meth:`LanguageEngine.answer`."""
        log.request_id.set(request_id)
        self._in_work += 1
        try:
            with self._ending_when_lost():
                return await self._engine.answer(request_id, prompt, items, sampling)
        finally:
            self._in_work -= 1

    async def parameter_names(self) -> list[str]:
        """Names of all parameters that this replica holds."""
        return list(await self._engine.parameter_names())

    async def stats(self) -> dict[str, float]:
        """Running and waiting requests, KV use."""
        return dict(self._engine.stats())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What :mod:`lookonce.autoscaling` reckons with; called by Serve."""
        # the engine's own figures are of its last step, and stay as they were then when it has nothing to do
        kv_use = self._engine.stats()["kv_cache_usage"] if self._in_work else 0.0
        return {"requests": float(self._in_work), "kv_use": kv_use}

    async def check_health(self) -> None:
        """Makes a token now and then; raising makes Serve replace the replica."""
        if self._started:
            with self._ending_when_lost():
                await self._engine.check_health()

    @contextmanager
    def _ending_when_lost(self) -> Iterator[None]:
        """Ends the process with its engine: one that can only refuse is the quickest of all, and would draw requests.

        Callers see the death and ask another replica.
        """
        try:
            yield
        except ReplicaLost:
            if not self._stopping:
                logger.error("the engine is dead; its replica ends")
                os.kill(os.getpid(), signal.SIGKILL)
            raise

    async def __del__(self) -> None:
        self._stopping = True
        await self._engine.stop()
