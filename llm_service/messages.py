"""What a language replica streams back: small, typed, without tensors, importable without the engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token.

    Attributes:
        token_id: id in the vocabulary.
        token: its text.
        logprob: natural logarithm of its probability.
    """

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True)
class SampledLogprobs:
    """A sampled token and its likeliest alternatives.

    Attributes:
        sampled: the token that was taken.
        top: the likeliest tokens, best first, as many as were asked for.
    """

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class EngineUsage:
    """Counts and times of a finished request.

    Attributes:
        prompt_tokens: tokens of the prompt, image tokens included.
        completion_tokens: tokens over all answers.
        prefix_cached_tokens: prompt tokens whose KV entries the engine still had.
        timings: seconds by stage (``queue``, ``prefill``, ``decode``, …).
    """

    prompt_tokens: int
    completion_tokens: int
    prefix_cached_tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """A piece of one answer.

    Attributes:
        index: which of the ``n`` answers.
        text: new text.
        token_ids: new tokens.
        logprobs: one entry per new token, when asked for.
        finish_reason: ``stop`` or ``length`` on the answer's last piece.
        stop_reason: the stop string or token id that ended it, if one did.
        usage: on the last piece of the whole request.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[SampledLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: EngineUsage | None = None
