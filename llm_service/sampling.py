"""Sampling settings as plain values, importable without the engine."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

#: what fits into the engine's 32-bit token ids, and into the seed of a generator
MAX_ID, MAX_SEED = (1 << 31) - 1, (1 << 63) - 1
TokenId = Annotated[int, Field(ge=0, le=MAX_ID)]


class SamplingOptions(BaseModel):
    """How to sample an answer; the names are OpenAI's and vLLM's.

    Attributes:
        max_tokens: length of each answer; None fills the context.
        temperature: 0 is greedy.
        top_p, top_k, min_p: truncations; ``top_k`` 0 keeps all.
        presence_penalty, frequency_penalty, repetition_penalty: penalties on tokens seen before.
        seed: makes sampling repeatable.
        stop: strings that end the answer; they are not part of it.
        stop_token_ids: tokens that do.
        n: how many answers.
        logprobs: log-probability of each token, with this many alternatives; None for none.
        logit_bias: added to the logits, by token id.
        json_schema, regex: shape that the answer is forced into; one of them at most.
        ignore_eos: go on after the end token.
        skip_special_tokens: leave special tokens out of the text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=MAX_ID)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0)
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    n: int = Field(1, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    logit_bias: dict[TokenId, float] = Field(default_factory=dict)
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_shape(self) -> SamplingOptions:
        if self.json_schema is not None and self.regex is not None:
            raise ValueError("give json_schema or regex, not both")
        if any(not text for text in self.stop):
            raise ValueError("stop strings must not be empty")
        return self
