"""Prompts of Mistral's own checkpoints: tokenised by mistral-common, with pictures that it never sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mistral_common.exceptions import MistralCommonException
from mistral_common.protocol.instruct.chunk import ImageChunk, ImageURLChunk
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.image import ImageEncoding
from mistral_common.tokens.tokenizers.instruct import InstructTokenizerV3
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from llm_service.image_tokens import ImageTokens
from llm_service.prompts import Placeholder, Prompt, PromptBuilder, checked_role, image_count, part_text
from shared.errors import CheckpointError, RequestError
from shared.families import family_of, read_config
from shared.sizing import Grid

TEKKEN = "tekken.json"
#: how a part that we wrote tells the encoder below its grid
SCHEME = "data:lookonce,"
_NO_PIXELS = np.zeros((0, 0, 0), dtype=np.float32)


class _GridEncoder:
    """Stands where mistral-common's image encoder does: gives tokens for a grid, and no pixels. Keeps no state."""

    def __init__(self, tokens: ImageTokens) -> None:
        self._tokens = tokens

    def __call__(self, content: ImageChunk | ImageURLChunk) -> ImageEncoding:
        assert isinstance(content, ImageURLChunk)
        rows, columns = map(int, content.get_url().removeprefix(SCHEME).split("x"))
        return ImageEncoding(tokens=self._tokens.fill(Grid(rows, columns)).ids, image=_NO_PIXELS)


class MistralPromptBuilder(PromptBuilder):
    """The same contract over ``tekken.json``: control tokens have no text form, so typed ones stay text.

    Args:
        checkpoint: folder of the checkpoint.

    Raises:
        CheckpointError: no usable ``tekken.json``.
    """

    def __init__(self, checkpoint: Path) -> None:
        path = checkpoint / TEKKEN
        try:
            self._mistral = MistralTokenizer.from_file(path)
        # whatever its parser stumbles over
        except (MistralCommonException, OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise CheckpointError(f"cannot use {path}: {error!r}") from error
        instruct = self._mistral.instruct_tokenizer
        tekken = instruct.tokenizer
        if not isinstance(tekken, Tekkenizer) or not isinstance(instruct, InstructTokenizerV3):
            raise CheckpointError(f"{path} is of version {tekken.version.value}, which knows no images")
        self._tekken = tekken
        self._images = ImageTokens.of(family_of(read_config(checkpoint)), self._find, str(checkpoint))
        instruct.image_encoder = _GridEncoder(self._images)  # type: ignore[assignment]

    def build(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[int | Grid],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompt:
        """See :meth:`PromptBuilder.build`. mistral-common may put a message's only picture before its text.

        Raises:
            RequestError: as there; also what mistral-common does not accept.
        """
        if (given := sum(image_count(message.get("content")) for message in messages)) != len(images):
            raise RequestError(f"the messages hold {given} images, {len(images)} were given", param="messages")
        grids = iter(images)
        prepared: list[Any] = [_message(message, grids) for message in messages]
        try:
            request: Any = ChatCompletionRequest.from_openai(prepared, None if tools is None else [*map(dict, tools)])
            ids: list[int] = self._mistral.encode_chat_completion(request).tokens
        except (MistralCommonException, ValueError, TypeError, KeyError, AssertionError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RequestError(f"this model cannot take this conversation: {reason}", param="messages") from error
        return Prompt(ids, self._placeholders(ids, images))

    def plain(self, text: str | Sequence[int]) -> Prompt:
        """See :meth:`PromptBuilder.plain`."""
        try:
            ids = self._tekken.encode(text, bos=True, eos=False) if isinstance(text, str) else list(text)
        except ValueError as error:
            raise RequestError("the text is not valid Unicode", param="prompt") from error
        return self._checked_plain(ids, self._tekken.n_words)

    def _placeholders(self, ids: list[int], images: Sequence[int | Grid]) -> tuple[Placeholder, ...]:
        """Where the images stand; they come in message order, and no text gives their tokens."""
        found: list[Placeholder] = []
        start = 0
        for index, size in enumerate(images):
            filled = self._images.fill(size)
            try:
                start = ids.index(self._images.image, start)
            except ValueError:
                start = len(ids)
            if ids[start : start + len(filled.ids)] != filled.ids:
                raise RequestError(f"this model's template has no place for image {index}", param="messages")
            found.append(Placeholder(start, len(filled.ids), index, filled.mask))
            start += len(filled.ids)
        return tuple(found)

    def _find(self, token: str) -> int | None:
        return self._tekken.get_special_token(token) if self._tekken.is_special(token) else None


def _message(message: Mapping[str, Any], grids: Any) -> dict[str, Any]:
    """An OpenAI message in which every picture has become its grid."""
    role = checked_role(message.get("role"))
    prepared = {name: value for name, value in message.items() if value is not None} | {"role": role}
    content = message.get("content")
    if content is None or isinstance(content, str):
        return prepared | {"content": content or ""}
    parts: list[dict[str, Any]] = []
    for part in content:
        if (text := part_text(part)) is not None:
            parts.append({"type": "text", "text": text})
            continue
        grid = next(grids)
        if isinstance(grid, int):
            raise RequestError("this model writes images row by row and needs their grids")
        parts.append({"type": "image_url", "image_url": {"url": f"{SCHEME}{grid.height}x{grid.width}"}})
    return prepared | {"content": parts}
