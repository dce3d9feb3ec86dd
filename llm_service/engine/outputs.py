"""From vLLM's outputs to our chunks."""

from __future__ import annotations

from collections.abc import Iterator

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from llm_service.messages import Chunk, EngineUsage, SampledLogprobs, TokenLogprob
from llm_service.sampling import SamplingOptions


class OutputReader:
    """Turns the outputs of one request into chunks; keeps what the last chunk sums up.

    Args:
        sampling: the request's settings.
    """

    def __init__(self, sampling: SamplingOptions) -> None:
        self._sampling = sampling
        self._completion_tokens = 0
        self._cached = 0
        self._unfinished = set(range(sampling.n))
        self.started = False

    def chunks(self, output: RequestOutput) -> Iterator[Chunk]:
        """One chunk per answer that has something new; the very last one carries the usage."""
        self._cached = max(self._cached, output.num_cached_tokens or 0)
        for completion in output.outputs:
            tokens = tuple(completion.token_ids)
            self._completion_tokens += len(tokens)
            self.started = self.started or bool(tokens)
            if completion.finish_reason is not None:
                self._unfinished.discard(completion.index)
            yield Chunk(
                index=completion.index,
                text=completion.text,
                token_ids=tokens,
                logprobs=self._logprobs(completion),
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                usage=None if self._unfinished else self._usage(output),
            )

    def _logprobs(self, completion: CompletionOutput) -> tuple[SampledLogprobs, ...] | None:
        if self._sampling.logprobs is None or completion.logprobs is None:
            return None
        sampled = []
        for token, by_id in zip(completion.token_ids, completion.logprobs, strict=True):
            ranked = sorted(by_id.items(), key=lambda entry: entry[1].rank or 0)
            top = tuple(_entry(i, value) for i, value in ranked if (value.rank or 0) <= self._sampling.logprobs)
            sampled.append(SampledLogprobs(_entry(token, by_id[token]), top))
        return tuple(sampled)

    def _usage(self, output: RequestOutput) -> EngineUsage:
        timings = {}
        if (times := output.metrics) is not None:
            stamps = (times.queued_ts, times.scheduled_ts, times.first_token_ts, times.last_token_ts)
            names = ("queue", "prefill", "decode")
            timings = {
                name: end - begin
                for name, begin, end in zip(names, stamps, stamps[1:], strict=False)
                if begin and end >= begin
            }
        return EngineUsage(
            prompt_tokens=len(output.prompt_token_ids or ()),
            completion_tokens=self._completion_tokens,
            prefix_cached_tokens=self._cached,
            timings=timings,
        )


def _entry(token_id: int, value: Logprob) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, token=value.decoded_token or "", logprob=value.logprob)
