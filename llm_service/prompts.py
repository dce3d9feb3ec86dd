"""From chat messages to token ids with image placeholders. No engine is imported and no pixel touched here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_service.chat_template import ChatTemplate, ImageMark, Marks, TemplateText, UserText
from llm_service.image_tokens import ImageTokens
from llm_service.tokens import SplitTokenizer, named_tokens, read_tokenizer_config
from shared.errors import CheckpointError, RequestError
from shared.families import family_of, read_config
from shared.model_config import PARAMS, config_file
from shared.sizing import Grid

ROLES = frozenset({"system", "user", "assistant", "tool"})
IMAGE_TYPES = frozenset({"image_url", "image"})


@dataclass(frozen=True)
class Placeholder:
    """Consecutive tokens that one image fills.

    Attributes:
        offset: first token.
        length: number of tokens.
        image_index: which image, in message order.
        mask: True for the tokens that embedding rows replace, one entry per token; None for all of them.
    """

    offset: int
    length: int
    image_index: int
    mask: tuple[bool, ...] | None = None

    @property
    def embeddings(self) -> int:
        """How many embedding rows it takes."""
        return self.length if self.mask is None else sum(self.mask)


@dataclass(frozen=True)
class Prompt:
    """A tokenised conversation.

    Attributes:
        token_ids: the whole prompt, image tokens included.
        placeholders: where its images stand, by ascending offset.
        cache_salt: prompts of other salts share no entry of the engine's prefix cache with this one.
    """

    token_ids: list[int]
    placeholders: tuple[Placeholder, ...] = ()
    cache_salt: str | None = None


class PromptBuilder:
    """Applies a checkpoint's chat template.

    Args:
        checkpoint: folder of the checkpoint.

    Raises:
        CheckpointError: tokenizer, template or configuration is missing or cannot be used.
    """

    def __init__(self, checkpoint: Path) -> None:
        family = family_of(read_config(checkpoint))
        config = read_tokenizer_config(checkpoint)
        self._template = ChatTemplate(config["chat_template"], named_tokens(config))
        self._tokenizer = SplitTokenizer(checkpoint)
        self._images = ImageTokens.of(family, self._tokenizer.added.get, str(checkpoint))
        self._image_words = frozenset({family.image_text, family.image_token})
        self._splitter = self._tokenizer.splitter(family.image_text)
        # what the template can take, found out by trying
        self._takes_text = self._probe("x", images=0)
        self._takes_parts = self._probe([{"type": "image"}, {"type": "text", "text": "x"}], images=1)
        if not self._takes_text and not self._takes_parts:
            raise CheckpointError(f"the chat template in {checkpoint} shows no message content")

    def build(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[int | Grid],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompt:
        """Token ids of a conversation, ready for the assistant's answer.

        Args:
            messages: OpenAI's shape: role and content, the latter a string, parts of type ``text`` and ``image_url``,
                or nothing.
            images: embedding rows of each image, in message order: as their grid, or, for families that write no
                rows, their number.
            tools: functions on offer, in OpenAI's shape.

        Raises:
            RequestError: roles or parts that are unknown, images that do not match, or a template that refuses.
        """
        marks = Marks()
        prepared = [self._message(marks, message) for message in messages]
        given = sum(image_count(message.get("content")) for message in messages)
        if given != len(images):
            raise RequestError(f"the messages hold {given} images, {len(images)} were given", param="messages")
        pieces = self._template.render(marks, prepared, None if tools is None else self._tools(marks, tools))
        return self._assemble(pieces, images)

    def plain(self, text: str | Sequence[int]) -> Prompt:
        """A text without any template, or token ids as they are. Control tokens in a text are text.

        A text gets the tokens that the checkpoint's tokenizer puts around one, such as a beginning token; ids do not.

        Raises:
            RequestError: nothing in it, an id outside the vocabulary, or an image token, which only an image may fill.
        """
        words = self._tokenizer
        ids = [*words.before, *words.encode(text), *words.behind] if isinstance(text, str) else list(text)
        return self._checked_plain(ids, self._tokenizer.vocabulary)

    def _checked_plain(self, ids: list[int], vocabulary: int) -> Prompt:
        if not ids:
            raise RequestError("prompt must not be empty", param="prompt")
        if any(not 0 <= token < vocabulary for token in ids):
            raise RequestError(f"token ids are 0 to {vocabulary - 1}", param="prompt")
        if self._images.image in ids:
            raise RequestError("a plain completion takes no image token; use /v1/chat/completions", param="prompt")
        return Prompt(ids)

    def _assemble(self, pieces: Sequence[TemplateText | UserText | ImageMark], images: Sequence[int | Grid]) -> Prompt:
        ids: list[int] = []
        placeholders: list[Placeholder] = []
        run = ""  # text between special tokens; tokenised as a whole, as the ordinary tokenizer does

        def flush() -> None:
            nonlocal run
            if run:
                ids.extend(self._tokenizer.encode(run))
                run = ""

        def image() -> None:
            flush()
            index = len(placeholders)
            filled = self._images.fill(images[index] if index < len(images) else Grid(0, 0))
            placeholders.append(Placeholder(len(ids), len(filled.ids), index, filled.mask))
            ids.extend(filled.ids)

        for piece in pieces:
            if isinstance(piece, ImageMark):
                image()
            elif isinstance(piece, UserText):
                run += piece.text
            else:
                for part, is_word in self._splitter.split(piece.text):
                    if not is_word:
                        run += part
                    elif part in self._image_words:
                        image()
                    else:
                        flush()
                        ids.append(self._tokenizer.added[part])
        flush()
        if len(placeholders) != len(images):
            raise RequestError(
                f"the chat template has places for {len(placeholders)} images, the messages hold {len(images)}",
                param="messages",
            )
        return Prompt(ids, tuple(placeholders))

    def _message(self, marks: Marks, message: Mapping[str, Any]) -> dict[str, Any]:
        role = checked_role(message.get("role"))
        prepared = {
            name: marks.tree(value)
            for name, value in message.items()
            if name not in {"role", "content", "tool_calls"} and value is not None
        }
        prepared |= {"role": role, "content": self._content(marks, message.get("content"))}
        if calls := message.get("tool_calls"):
            prepared["tool_calls"] = [self._call(marks, call) for call in calls]
        return prepared

    def _content(self, marks: Marks, content: Any) -> Any:
        if content is None or isinstance(content, str):
            text = marks.text(content or "")
            return text if self._takes_text else [{"type": "text", "text": text}]
        parts = [part_text(part) for part in content]
        if not self._takes_parts or (self._takes_text and all(text is not None for text in parts)):
            return "\n".join(marks.image() if text is None else marks.text(text) for text in parts)
        return [{"type": "image"} if text is None else {"type": "text", "text": marks.text(text)} for text in parts]

    def _call(self, marks: Marks, call: Mapping[str, Any]) -> Any:
        """A tool call; templates want its arguments as a mapping where OpenAI has JSON text."""
        call = dict(call)
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(arguments := function.get("arguments"), str):
            try:
                parsed = json.loads(arguments)
            except ValueError:
                parsed = arguments
            call["function"] = {**function, "arguments": parsed}
        self._check_keys(call)
        return marks.tree(call)

    def _tools(self, marks: Marks, tools: Sequence[Mapping[str, Any]]) -> list[Any]:
        self._check_keys(list(tools))
        return [marks.tree(tool) for tool in tools]

    def _check_keys(self, value: Any) -> None:
        """Keys are handed to the template as they are, so they must be harmless."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                if any(is_word for _, is_word in self._splitter.split(str(key))) or "\ue000" in str(key):
                    raise RequestError(f"a tool has the property name {key!r}, a control token", param="tools")
                self._check_keys(item)
        elif isinstance(value, list | tuple):
            for item in value:
                self._check_keys(item)

    def _probe(self, content: Any, *, images: int) -> bool:
        """Whether the template shows such content once, with this many image places."""
        marks = Marks()
        if isinstance(content, str):
            content = marks.text(content)
        else:
            content = [{**part, "text": marks.text(part["text"])} if "text" in part else part for part in content]
        try:
            pieces = self._template.render(marks, [{"role": "user", "content": content}], None)
        except RequestError:
            return False
        words = [
            part
            for piece in pieces
            if isinstance(piece, TemplateText)
            for part, is_word in self._splitter.split(piece.text)
            if is_word and part in self._image_words
        ]
        return sum(isinstance(piece, UserText) for piece in pieces) == 1 and len(words) == images


def prompt_builder(checkpoint: Path) -> PromptBuilder:
    """The builder that a checkpoint's tokenizer needs.

    Raises:
        CheckpointError: tokenizer, template or configuration is missing or cannot be used.
    """
    if config_file(checkpoint) != PARAMS:
        return PromptBuilder(checkpoint)
    from llm_service.prompts_mistral import MistralPromptBuilder  # needs a second to import, and few need it

    return MistralPromptBuilder(checkpoint)


def checked_role(role: Any) -> str:
    """A role as templates know it: a developer's word is the system's.

    Raises:
        RequestError: none of the roles that there are.
    """
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise RequestError(f"unknown role {role!r}; known: {', '.join(sorted(ROLES))}, developer", param="messages")
    return str(role)


def part_text(part: Any) -> str | None:
    """The text of a part; None for an image."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind in IMAGE_TYPES:
        return None
    raise RequestError(f"content parts are of type text or image_url, not {kind!r}", param="messages")


def image_count(content: Any) -> int:
    """How many image parts a message's content has."""
    return 0 if content is None or isinstance(content, str) else sum(part_text(part) is None for part in content)
