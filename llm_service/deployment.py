"""The language pool's Ray Serve shell: one replica is one vLLM engine without a tower."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

from llm_service.messages import Chunk, EngineUsage
from llm_service.prompts import Prompt
from llm_service.replies import ReplyAddress, ReplySenders
from llm_service.sampling import SamplingOptions
from shared import log, tracing
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
        tracing.configure(settings.telemetry, f"language:{model.name}")
        self._engine = LanguageEngine(model, settings.cache, cache_url, settings.telemetry)
        self._senders = ReplySenders()
        self._model = model.name
        self._started = False
        self._stopping = False
        self._in_work = 0

    async def reconfigure(self, _: object) -> None:
        """Called by Serve once before the replica counts as ready: starts the engine."""
        if not self._started:
            await self._engine.start()
            self._started = True

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        items: list[VisionItem],
        sampling: SamplingOptions,
        *,
        reply: ReplyAddress,
        trace: str | None = None,
    ) -> None:
        """See :meth:`LanguageEngine.generate`; the chunks go to ``reply``.

        ``trace`` is the ``traceparent`` of the caller's span.
        """
        log.request_id.set(request_id)
        with self._working(request_id, prompt, trace) as work:
            replies = await self._senders.open(reply)
            stream = self._engine.generate(request_id, prompt, items, sampling, trace=work.traceparent)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    if chunk.usage is not None:
                        _trace_engine(work, chunk.usage)
                    await replies.send(chunk)
            await replies.send(None)

    async def answer(
        self,
        request_id: str,
        prompt: Prompt,
        items: list[VisionItem],
        sampling: SamplingOptions,
        trace: str | None = None,
    ) -> list[Chunk]:
        """See :meth:`LanguageEngine.answer`; ``trace`` is the ``traceparent`` of the caller's span."""
        log.request_id.set(request_id)
        with self._working(request_id, prompt, trace) as work:
            chunks = await self._engine.answer(request_id, prompt, items, sampling, trace=work.traceparent)
            for usage in (chunk.usage for chunk in chunks if chunk.usage is not None):
                _trace_engine(work, usage)
            return chunks

    @contextmanager
    def _working(self, request_id: str, prompt: Prompt, trace: str | None) -> Iterator[tracing.Work]:
        self._in_work += 1
        about = {"request_id": request_id, "model": self._model, "prompt_tokens": len(prompt.token_ids)}
        try:
            with tracing.detached("generate", parent=trace, **about) as work, self._ending_when_lost():
                yield work
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


def _trace_engine(work: tracing.Work, usage: EngineUsage) -> None:
    """Spans of the engine's stages, which it tells at the end."""
    work.note(completion_tokens=usage.completion_tokens, prefix_cached_tokens=usage.prefix_cached_tokens)
    until = time.time()
    for stage, seconds in reversed(usage.timings.items()):  # they follow each other
        work.past("decode_tokens" if stage == "decode" else stage, seconds, until)  # pictures are decoded too
        until -= seconds
