"""The language engine: vLLM without a tower. Knows nothing of Ray or HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing

from vllm.exceptions import VLLMClientError
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from llm_service.engine.args import engine_args, engine_environment
from llm_service.engine.inputs import engine_input, sampling_params
from llm_service.engine.outputs import OutputReader
from llm_service.engine.stats import StatsRecorder
from llm_service.messages import Chunk
from llm_service.prompts import Prompt
from llm_service.sampling import SamplingOptions
from llm_service.vllm_plugin import register
from llm_service.vllm_plugin.loader import check_language_tensors
from shared import tracing
from shared.config import CacheSettings, ModelSettings, TelemetrySettings
from shared.errors import ContextTooLong, EmbeddingLost, ReplicaLost, RequestError, Unavailable
from shared.items import VisionItem

logger = logging.getLogger(__name__)

#: what health asks for: any token after any token
_PROBE, _ONE = Prompt([0]), SamplingOptions(max_tokens=1, temperature=0, ignore_eos=True)


class LanguageEngine:
    """One vLLM engine that answers prompts about images which are already embedded.

    Args:
        model: what to run.
        cache: settings of the embedding cache.
        cache_url: its URL.
        telemetry: where the engine's own spans go.
    """

    def __init__(
        self,
        model: ModelSettings,
        cache: CacheSettings,
        cache_url: str,
        telemetry: TelemetrySettings = TelemetrySettings(),  # noqa: B008 - frozen
    ) -> None:
        self._model = model
        self._telemetry = telemetry
        self._cache = cache
        self._cache_url = cache_url
        self._llm: AsyncLLM | None = None
        self._stats = StatsRecorder()
        self._healthy_at = 0

    async def start(self) -> None:
        """Loads the model; takes seconds to minutes.

        Raises:
            CheckpointError: the checkpoint cannot be used; names the file.
            Unavailable: vLLM did not start; its log says why.
        """
        register()
        self._llm = await asyncio.to_thread(self._build)

    def _build(self) -> AsyncLLM:
        check_language_tensors(self._model.checkpoint)
        with engine_environment(self._model, self._telemetry):
            args = engine_args(self._model, self._cache, self._cache_url, self._telemetry)
            try:
                return AsyncLLM.from_engine_args(args, stat_loggers=[self._stats.factory])
            except RuntimeError as error:  # what vLLM raises when a child process fails
                raise Unavailable(f"the language engine of {self._model.name} did not start: {error}") from error

    async def stop(self) -> None:
        """Ends the engine's processes and the answers still running; safe to call again."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        llm.output_processor.propagate_error(EngineDeadError())
        if llm.output_handler is not None:
            # it would report the end of the processes as a crash
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return int(self._running().model_config.max_model_len)

    async def generate(
        self,
        request_id: str,
        prompt: Prompt,
        items: Sequence[VisionItem],
        sampling: SamplingOptions,
        *,
        whole: bool = False,
        trace: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Streams the answers. Closing the iterator aborts them.

        Args:
            request_id: any text; vLLM makes it unique.
            prompt: token ids and placeholders.
            items: the images in the order of their placeholders' ``image_index``; an item with a record brings its
                embedding along.
            sampling: how to sample.
            whole: one chunk per answer, when all are finished.
            trace: ``traceparent`` of the span above the engine's.

        Raises:
            RequestError: the request is at fault; ContextTooLong when it does not fit.
            EmbeddingLost: embeddings are not in the cache; raised before the first chunk only. Encode again and send
                the records in the items.
            ReplicaLost: the engine is dead.
            Unavailable: an embedding went missing in the middle of an answer.
        """
        llm = self._running()
        self._check_length(prompt, items, sampling)
        inputs = engine_input(prompt, items, llm.model_config.get_inputs_embeds_size())
        reader = OutputReader(sampling)
        headers = {tracing.TRACEPARENT: trace} if trace else None
        stream = llm.generate(inputs, sampling_params(sampling, whole=whole), request_id, trace_headers=headers)
        try:
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    self._check_finish(request_id, output, items, started=reader.started)
                    for chunk in reader.chunks(output):
                        yield chunk
        except VLLMClientError as error:
            raise RequestError(str(error)) from error
        except EngineDeadError as error:
            raise ReplicaLost("the language engine has stopped; try again", retry_after=5) from error
        except EngineGenerateError as error:
            cause = error.__cause__
            if isinstance(cause, ValueError):
                raise RequestError(str(cause)) from error
            raise Unavailable("the language engine failed on this request; try again") from error

    async def answer(
        self,
        request_id: str,
        prompt: Prompt,
        items: Sequence[VisionItem],
        sampling: SamplingOptions,
        *,
        trace: str | None = None,
    ) -> list[Chunk]:
        """The finished answers, one chunk each; cancelling aborts them. Otherwise as :meth:`generate`."""
        stream = self.generate(request_id, prompt, items, sampling, whole=True, trace=trace)
        async with aclosing(stream) as chunks:
            return [chunk async for chunk in chunks]

    async def check_health(self) -> None:
        """Makes one token, unless steps since the last check show as much. The caller bounds the time.

        Raises:
            ReplicaLost: the engine is dead.
            Unavailable: it does not run.
        """
        llm, steps = self._running(), self._stats.steps
        try:
            await llm.check_health()
            if steps == self._healthy_at:
                request = f"health-{steps}"
                async with aclosing(llm.generate(engine_input(_PROBE, (), 0), sampling_params(_ONE), request)) as probe:
                    async for _ in probe:
                        pass
        except EngineDeadError as error:
            raise ReplicaLost("the language engine has stopped") from error
        self._healthy_at = self._stats.steps

    def stats(self) -> Mapping[str, float]:
        """Running and waiting requests, KV cache use, as of the engine's last step."""
        return self._stats.latest()

    async def parameter_names(self) -> list[str]:
        """Names of all parameters that the model runner holds."""
        names: list[list[str]] = await self._running().collective_rpc("lookonce_parameter_names")
        return sorted({name for part in names for name in part})

    def _running(self) -> AsyncLLM:
        if self._llm is None:
            raise Unavailable("the language engine is not running")
        return self._llm

    def _check_length(self, prompt: Prompt, items: Sequence[VisionItem], sampling: SamplingOptions) -> None:
        length, limit = len(prompt.token_ids), self.max_model_len
        if length + (sampling.max_tokens or 1) > limit:
            answer = "" if sampling.max_tokens is None else f", max_tokens is {sampling.max_tokens}"
            raise ContextTooLong(
                f"the prompt has {length} tokens, {sum(item.tokens for item in items)} of them for images{answer}; "
                f"the model's context is {limit} tokens",
                param="messages",
            )

    @staticmethod
    def _check_finish(request_id: str, output: RequestOutput, items: Sequence[VisionItem], *, started: bool) -> None:
        """vLLM ends a request with "error" when the connector or the scheduler gave it up."""
        if not any(completion.finish_reason == "error" for completion in output.outputs):
            return
        fetched = tuple(item.key for item in items if item.record is None)
        if fetched and not started:
            raise EmbeddingLost(f"request {request_id}: image embeddings are no longer in the cache", keys=fetched)
        raise Unavailable("the language engine gave up this request; try again")
