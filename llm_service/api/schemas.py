"""Request bodies, as OpenAI's reference has them plus vLLM's sampling fields. Unknown fields are tolerated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llm_service.sampling import MAX_ID, MAX_SEED, SamplingOptions, TokenId
from shared.errors import RequestError

#: of a plain completion that does not say; OpenAI's number
DEFAULT_COMPLETION_TOKENS = 16


class Body(BaseModel):
    """Base of request bodies: unknown fields pass, wrong types do not (``"5"`` is no number)."""

    model_config = ConfigDict(extra="ignore", strict=True)


class ImageUrl(Body):
    """``image_url`` of a content part.

    Attributes:
        url: ``data:``, ``http(s):``, or ``lookonce://`` with the hash that ``POST /v1/images`` gave.
        fallback: not OpenAI's: another URL of the picture, taken when a named one is no longer in the cache.
        detail: accepted; a picture is always seen at the size that the model's own rule gives it.
    """

    url: str
    fallback: str | None = None
    detail: Literal["auto", "low", "high"] = "auto"


class TextPart(Body):
    """``{"type": "text"}``."""

    type: Literal["text"]
    text: str


class ImagePart(Body):
    """``{"type": "image_url"}``."""

    type: Literal["image_url"]
    image_url: ImageUrl


ContentPart = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class StreamOptions(Body):
    """What a stream carries beside the text."""

    include_usage: bool = False


class JsonSchema(Body):
    """``json_schema`` of a response format."""

    name: str = "answer"
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Body):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationRequest(Body, ABC):
    """What chat completions and plain ones share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_ID)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    n: int = Field(1, ge=1, le=16)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool = False
    user: str | None = None
    #: not OpenAI's: return where each image came from and how long each step took, under ``lookonce``
    timings: bool = False

    @property
    def answers(self) -> int:
        """How many choices the response has."""
        return self.n

    def _limit(self) -> int | None:
        """Most tokens of an answer."""
        return self.max_tokens

    @abstractmethod
    def _logprobs(self) -> int | None:
        """How many alternatives each token's log-probability comes with; None for no log-probabilities."""

    def sampling(self) -> SamplingOptions:
        """The sampling settings in this request; what is absent keeps the engine's default.

        Raises:
            RequestError: settings that contradict each other or that no engine can follow.
        """
        given: dict[str, Any] = {
            name: value
            for name in (
                *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
                *("repetition_penalty", "seed", "stop_token_ids"),
            )
            if (value := getattr(self, name)) is not None
        }
        if self.stop is not None:
            given["stop"] = [self.stop] if isinstance(self.stop, str) else self.stop
        if self.logit_bias:
            try:
                given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
            except ValueError:
                raise RequestError("logit_bias maps token ids to numbers", param="logit_bias") from None
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            given["json_schema"] = (schema.schema_ if schema else None) or {"type": "object"}
        try:
            return SamplingOptions(
                max_tokens=self._limit(), n=self.n, logprobs=self._logprobs(), ignore_eos=self.ignore_eos, **given
            )
        except ValidationError as error:
            fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise RequestError(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".removeprefix(": ")) from None


class ChatCompletionRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None

    def images(self) -> list[ImageUrl]:
        """All image parts, in prompt order."""
        return [
            part.image_url
            for message in self.messages
            if isinstance(message.content, list)
            for part in message.content
            if isinstance(part, ImagePart)
        ]

    def _limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def _logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``: text to be gone on with, or token ids; one or several."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] = False

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids.

        Raises:
            RequestError: none at all.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt must not be empty", param="prompt")
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt]]
        return list(self.prompt)

    @property
    def answers(self) -> int:
        """One choice per prompt and answer."""
        return self.n * len(self.prompts())

    def _limit(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def _logprobs(self) -> int | None:
        return self.logprobs
