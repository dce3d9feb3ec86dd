"""One request from its body to its chunks: images, prompt, generation, one more try when an entry was lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from llm_service.api.pools import LanguagePool
from llm_service.api.schemas import ChatCompletionRequest, CompletionRequest
from llm_service.api.vision import ImageResolver, ImageSource, RequestImage, gather_or_cancel
from llm_service.messages import Chunk
from llm_service.prompts import Prompt, PromptBuilder
from llm_service.sampling import SamplingOptions
from shared import metrics
from shared.errors import ContextTooLong, EmbeddingLost, ReplicaLost, Unavailable
from shared.items import VisionItem
from shared.sizing import Grid, SizeRule

#: tries of one request whose embedding vanished; the second carries its embeddings inside, so it needs no luck
MAX_ATTEMPTS = 2
#: replicas that one request may be given to; a prompt that ends engines must not end them all
MAX_REPLICAS = 3


@dataclass(frozen=True)
class Prepared:
    """A prompt that is ready to generate.

    Attributes:
        prompt: token ids with placeholders.
        images: as the request gave them, in prompt order.
        items: their embeddings, in the same order.
        sampling: sampling settings with ``max_tokens`` filled in.
        salt: tenant salt.
    """

    prompt: Prompt
    images: list[RequestImage]
    items: list[VisionItem]
    sampling: SamplingOptions
    salt: str | None


@dataclass(frozen=True)
class Draft:
    """A prompt whose images may still have to be encoded.

    Attributes:
        prompt: token ids with placeholders.
        images: in prompt order.
        grids: embedding rows that the prompt has room for, per image.
        sampling, salt: as in :class:`Prepared`.
    """

    prompt: Prompt
    images: list[RequestImage]
    grids: list[Grid]
    sampling: SamplingOptions
    salt: str | None


class ImageService:
    """What there is of every model; of an encoder that serves no language model, this alone.

    Args:
        images: finds or makes embeddings.
        rule: rows of a picture's embedding, by its size.
    """

    def __init__(self, images: ImageResolver, rule: SizeRule) -> None:
        self.images = images
        self.rule = rule

    @property
    def language(self) -> LanguagePool | None:
        """The pool that answers, where there is one."""
        return None


class ModelService(ImageService):
    """Completions of one model, of chats and of plain text.

    Args:
        images: finds or makes embeddings.
        language: the pool that answers.
        prompts: the checkpoint's template and tokenizer.
        rule: the family's size arithmetic.
        max_model_len: context, tokens.
    """

    def __init__(
        self,
        images: ImageResolver,
        language: LanguagePool,
        prompts: PromptBuilder,
        rule: SizeRule,
        max_model_len: int,
    ) -> None:
        super().__init__(images, rule)
        self._language = language
        self._prompts = prompts
        self._max_model_len = max_model_len

    @property
    def language(self) -> LanguagePool:
        """See :attr:`ImageService.language`."""
        return self._language

    async def prepare(self, request: ChatCompletionRequest | CompletionRequest, salt: str | None) -> list[Prepared]:
        """Everything before the first token, for every prompt of the request.

        Raises:
            RequestError: any fault of the request, before an encoder or the engine sees it.
        """
        if isinstance(request, ChatCompletionRequest):
            return [await self._prepare_chat(request, salt)]
        sampling = request.sampling()
        prompts = [replace(self._prompts.plain(prompt), cache_salt=salt) for prompt in request.prompts()]
        return [Prepared(prompt, [], [], self._fit(prompt, 0, sampling), salt) for prompt in prompts]

    async def _prepare_chat(self, request: ChatCompletionRequest, salt: str | None) -> Prepared:
        """No pixel is touched here; only a cache miss makes the encoder work."""
        sampling = request.sampling()
        images = await self.images.fetch([ImageSource(part.url, part.fallback) for part in request.images()], salt)
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        draft = self.draft(messages, images, sampling, salt, tools=request.tools)
        return self.ready(draft, await self.images.resolve(images, salt))

    def draft(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[RequestImage],
        sampling: SamplingOptions,
        salt: str | None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Draft:
        """Builds the prompt of a chat, before anything is encoded.

        Args:
            messages: OpenAI's shape, with as many image parts as there are images.
            images: fetched, in prompt order.
            sampling: how to answer.
            salt: of the tenant.
            tools: functions on offer.

        Raises:
            RequestError: messages that the template refuses, or that do not fit the context.
        """
        grids = [image.merged(self.rule) for image in images]
        prompt = replace(self._prompts.build(messages, grids, tools=tools), cache_salt=salt)
        sampling = self._fit(prompt, sum(grid.patches for grid in grids), sampling)
        return Draft(prompt, list(images), grids, sampling, salt)

    @staticmethod
    def ready(draft: Draft, items: Sequence[VisionItem]) -> Prepared:
        """Puts a prompt and the embeddings of its images together.

        Raises:
            Unavailable: an embedding of another size than the prompt's; a wrong answer would follow. This is a bug or
                a foreign cache entry.
        """
        for item, grid in zip(items, draft.grids, strict=True):
            if item.tokens != grid.patches:
                raise Unavailable(f"an image gave {item.tokens} embedding rows where the prompt holds {grid.patches}")
        return Prepared(draft.prompt, draft.images, list(items), draft.sampling, draft.salt)

    def _fit(self, prompt: Prompt, image_tokens: int, sampling: SamplingOptions) -> SamplingOptions:
        """Checks prompt and answer against the context; an answer without a limit may fill what is left."""
        length, room = len(prompt.token_ids), self._max_model_len - len(prompt.token_ids)
        wanted = sampling.max_tokens
        if room < (wanted or 1):
            answer = f" and max_tokens {wanted}" if wanted else ""
            raise ContextTooLong(
                f"the prompt has {length} tokens ({image_tokens} of them for images){answer}; the model's context is "
                f"{self._max_model_len} tokens. Shorten the messages, send fewer or smaller images"
                f"{', or lower max_tokens' if wanted else ''}.",
                param="messages",
            )
        return sampling if wanted else sampling.model_copy(update={"max_tokens": room})

    async def generate(self, request_id: str, chat: Prepared) -> AsyncGenerator[Chunk, None]:
        """Streams the answer. Closing the generator aborts it in the engine.

        An embedding that vanished from the cache is encoded again and sent inside the request. An answer whose replica
        died before its first chunk begins again in another one.

        Args:
            request_id: told to the engine.
            chat: what to answer.

        Raises:
            ReplicaLost: too many replicas died, or one did in the middle of an answer.
        """
        items = chat.items
        lost = deaths = 0
        while True:
            started = False
            try:
                stream = self.language.generate(f"{request_id}-{lost + deaths + 1}", chat.prompt, items, chat.sampling)
                async with aclosing(stream) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        started = True
                        yield chunk
                return
            except EmbeddingLost as error:
                lost += 1
                items = await self._inline(chat, items, lost, error)
            except ReplicaLost:
                deaths += 1
                if started or deaths == MAX_REPLICAS:
                    raise
                metrics.RESUBMITTED.labels(self.images.model).inc()

    async def answer(self, request_id: str, chat: Prepared) -> list[Chunk]:
        """The whole answer in one message, for callers who show nothing on the way.

        Nothing of it goes out before its end, so it survives a replica's death in its middle as well.

        Raises:
            ReplicaLost: too many replicas died.
        """
        items = chat.items
        lost = deaths = 0
        while True:
            try:
                name = f"{request_id}-{lost + deaths + 1}"
                return await self.language.answer(name, chat.prompt, items, chat.sampling)
            except EmbeddingLost as error:
                lost += 1
                items = await self._inline(chat, items, lost, error)
            except ReplicaLost:
                deaths += 1
                if deaths == MAX_REPLICAS:
                    raise
                metrics.RESUBMITTED.labels(self.images.model).inc()

    async def _inline(
        self, chat: Prepared, items: Sequence[VisionItem], lost: int, error: EmbeddingLost
    ) -> list[VisionItem]:
        """The items with their embeddings carried along, after so many losses.

        Raises:
            Unavailable: too many.
        """
        metrics.EMBEDDINGS_LOST.labels(self.images.model).inc()
        if lost == MAX_ATTEMPTS:
            raise Unavailable("image embeddings kept vanishing from the cache; try again") from error
        again = [self.images.encode_inline(image, chat.salt) for image in chat.images]
        fresh = await gather_or_cancel(again)
        return [item if item.record is not None else new for item, new in zip(items, fresh, strict=True)]
