"""Renders a checkpoint's chat template so that afterwards everybody's text can be told apart.

The template never sees what a user typed. Every string of the request is swapped for a mark, the template is rendered,
and the result is cut at the marks: what lies between them the template wrote itself. So a typed ``<|im_end|>`` or
``<image>`` can never be taken for a real one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import RequestError

Message = Mapping[str, Any]


@dataclass(frozen=True)
class TemplateText:
    """Written by the template: special tokens and image places in it are real."""

    text: str


@dataclass(frozen=True)
class UserText:
    """Taken from the request: text and nothing else."""

    text: str


@dataclass(frozen=True)
class ImageMark:
    """Where an image part stood."""


Piece = TemplateText | UserText | ImageMark


class Marks:
    """Stand-ins for the strings of one request. A mark has digits only inside, so that changes of case spare it."""

    def __init__(self) -> None:
        self._nonce = "".join(secrets.choice("0123456789") for _ in range(24))
        self._pieces: list[UserText | ImageMark] = []
        self._pattern = re.compile(f"\ue000{self._nonce}:([0-9]+)\ue001")

    def text(self, text: str) -> str:
        """A mark for a string. Outer white space stays, so that a template's ``trim`` still works."""
        core = text.strip()
        if not core:
            return text
        begin = text.index(core)
        return text[:begin] + self._new(UserText(core)) + text[begin + len(core) :]

    def image(self) -> str:
        """A mark for an image."""
        return self._new(ImageMark())

    def tree(self, value: Any) -> Any:
        """The same JSON value with marks for its strings; keys stay."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self.tree(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(item) for item in value]
        return value

    def dump(self, value: Any, **options: Any) -> str:
        """What the template's ``tojson`` gives: a mark for the JSON text, all of which is the user's."""
        return self._new(UserText(json.dumps(self._original(value), **options)))

    def split(self, rendered: str) -> Iterator[Piece]:
        """The rendered prompt, cut at the marks.

        Raises:
            RequestError: the template cut a mark in two.
        """
        end = 0
        for match in self._pattern.finditer(rendered):
            if match.start() > end:
                yield self._template_text(rendered[end : match.start()])
            yield self._pieces[int(match[1])]
            end = match.end()
        if end < len(rendered):
            yield self._template_text(rendered[end:])

    def _template_text(self, text: str) -> TemplateText:
        if self._nonce in text or "\ue000" in text or "\ue001" in text:
            raise RequestError("this model's chat template cannot handle such a message", param="messages")
        return TemplateText(text)

    def _new(self, piece: UserText | ImageMark) -> str:
        self._pieces.append(piece)
        return f"\ue000{self._nonce}:{len(self._pieces) - 1}\ue001"

    def _original(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._pattern.sub(lambda match: getattr(self._pieces[int(match[1])], "text", ""), value)
        if isinstance(value, Mapping):
            return {key: self._original(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._original(item) for item in value]
        return value


class ChatTemplate:
    """A compiled template in the sandbox that transformers uses.

    Args:
        source: Jinja source.
        tokens: values of ``bos_token``, ``eos_token`` and their like.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = _tojson
        self._template = environment.from_string(source)
        self._tokens = dict(tokens)

    def render(self, marks: Marks, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Piece]:
        """The prompt in pieces, ready for the assistant's answer.

        Raises:
            RequestError: the template refuses these messages.
        """
        try:
            rendered = self._template.render(
                **self._tokens,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=True,
                __marks__=marks,
            )
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the model's chat template refuses this conversation: {error}", param="messages"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # the template's own slip over a message that it was not written for
            raise RequestError(
                f"the model's chat template cannot handle this conversation ({type(error).__name__})", param="messages"
            ) from error
        return list(marks.split(rendered))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    marks: Marks = context["__marks__"]
    return marks.dump(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks the assistant's part for training; here its body alone counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Drops the tag and keeps the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
