"""Response bodies as the OpenAPI document describes them.

The endpoint writes plain dictionaries, for speed (:mod:`llm_service.api.responses`); tests hold the two together.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What went wrong, in words, and by a stable code."""

    message: str
    type: str
    param: str | None
    code: str


class Error(BaseModel):
    """OpenAI's error shape; the same for every status above 399."""

    error: ErrorDetail


class PromptTokensDetails(BaseModel):
    """Of the prompt's tokens: from the engine's prefix cache, of images, and of images that needed no encoder."""

    cached_tokens: int
    image_tokens: int
    cached_image_tokens: int


class Usage(BaseModel):
    """Token counts; those of images are part of the prompt's."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ImageReport(BaseModel):
    """Where one image's embedding came from, and the seconds of each step."""

    key: str
    source: Literal["cache", "encoder"]
    tokens: int
    grid: list[int] = Field(min_length=2, max_length=2)
    timings: dict[str, float]


class Report(BaseModel):
    """What ``"timings": true`` adds: images, and seconds by engine stage."""

    images: list[ImageReport]
    timings: dict[str, float]


class TopLogprob(BaseModel):
    """A token and the natural logarithm of its probability; -9999 stands for minus infinity."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobs(TopLogprob):
    """A sampled token with its likeliest alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer, one entry a token."""

    content: list[TokenLogprobs]


class AnswerMessage(BaseModel):
    """An answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


FinishReason = Literal["stop", "length"]


class ChatChoice(BaseModel):
    """One of the ``n`` answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatCompletion(BaseModel):
    """A whole chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    lookonce: Report | None = None


class TextLogprobs(BaseModel):
    """Log-probabilities of a plain completion, as OpenAI's older endpoint has them."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One answer to one of the prompts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class TextCompletion(BaseModel):
    """A whole plain completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    lookonce: Report | None = None


class ModelCard(BaseModel):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]


class KnownImage(BaseModel):
    """A picture that was sent ahead; ``tokens`` is null while it is being encoded, ``error`` tells why one failed."""

    id: str
    object: Literal["image"]
    hash: str
    model: str
    state: Literal["encoding", "cached", "failed"]
    tokens: int | None
    error: str | None = None


class UploadedImage(KnownImage):
    """The same with the picture's size after orientation, pixels, and the file's, bytes."""

    width: int
    height: int
    bytes: int


class DeletedImage(BaseModel):
    """A picture whose embedding is gone."""

    id: str
    object: Literal["image"]
    deleted: Literal[True]


class Health(BaseModel):
    """The ingress lives."""

    status: Literal["ok"]


class Readiness(BaseModel):
    """Every pool takes requests."""

    status: Literal["ready"]


class PoolState(BaseModel):
    """Replicas by state, and one replica's own figures."""

    replicas: dict[str, int]
    stats: dict[str, float]


class ModelState(BaseModel):
    """Pools of one model, and images that this ingress saw, by source; an encoder alone has no language pool."""

    name: str
    encoder: PoolState
    language: PoolState | None
    images: dict[str, float]


class ServiceState(BaseModel):
    """Pools and cache, now."""

    models: list[ModelState]
    cache: dict[str, Any]
