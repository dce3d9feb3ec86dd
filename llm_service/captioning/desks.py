"""Who answers: a desk takes a picture's file and chats about it. One goes to the pools, one to a service over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llm_service.api.chat import ModelService, Prepared
from llm_service.api.vision import gather_or_cancel
from llm_service.messages import Chunk
from llm_service.sampling import SamplingOptions
from shared.items import VisionItem

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        text: what the model said.
        finish_reason: ``stop`` or ``length``.
        prompt_tokens, completion_tokens: as the engine counted them.
        image_tokens: those of the prompt that are the picture's.
        cached: no encoder forward was needed.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    image_tokens: int
    cached: bool


@dataclass(frozen=True)
class Seen:
    """A picture that a desk has looked at.

    Attributes:
        content: names the picture's content: pictures of equal content have it in common.
        pending: the desk's own, for :meth:`Desk.answer`.
    """

    content: str
    pending: Any


class Desk(Protocol):
    """Answers chats about one picture at a time."""

    async def look(self, data: bytes, chats: Sequence[Messages], sampling: SamplingOptions) -> Seen:
        """Checks the prompts, then has the picture embedded, once for all of them.

        Raises:
            RequestError: the picture or a prompt is at fault.
            RetryableError: try again later.
        """

    async def answer(self, seen: Seen) -> list[Answer]:
        """Answers every chat.

        Raises:
            RequestError, RetryableError: as above.
        """


class PoolDesk:
    """The two pools, directly: the picture goes to the encoders, its key to the language models.

    Args:
        service: of one model.
    """

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def look(self, data: bytes, chats: Sequence[Messages], sampling: SamplingOptions) -> Seen:
        """See :class:`Desk`."""
        images = self._service.images
        image = images.uploaded(data)
        drafts = [self._service.draft(chat, [image], sampling, None) for chat in chats]
        items = await images.resolve([image], None)
        return Seen(items[0].key, [self._service.ready(draft, items) for draft in drafts])

    async def answer(self, seen: Seen) -> list[Answer]:
        """See :class:`Desk`."""
        return await gather_or_cancel([self._answer(prepared) for prepared in seen.pending])

    async def _answer(self, prepared: Prepared) -> Answer:
        chunks = await self._service.answer(f"caption-{uuid.uuid4().hex[:16]}", prepared)
        return _whole(chunks, prepared.items[0])


def _whole(chunks: Sequence[Chunk], item: VisionItem) -> Answer:
    usage = next((chunk.usage for chunk in reversed(chunks) if chunk.usage is not None), None)
    reason = next((chunk.finish_reason for chunk in reversed(chunks) if chunk.finish_reason), "length")
    return Answer(
        "".join(chunk.text for chunk in chunks),
        reason,
        usage.prompt_tokens if usage else 0,
        usage.completion_tokens if usage else sum(len(chunk.token_ids) for chunk in chunks),
        item.tokens,
        item.cached,
    )
