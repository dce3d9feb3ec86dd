"""Prompts with the row's own fields: ``{title}`` is replaced, ``{{`` and ``}}`` stand for braces."""

from __future__ import annotations

import difflib
import string
from collections.abc import Mapping
from dataclasses import dataclass

from llm_service.captioning.rows import Value
from shared.errors import ConfigError, RequestError


@dataclass(frozen=True)
class Template:
    """A text with names in braces. Only plain names: neither attributes nor indexes nor formats are looked at.

    Attributes:
        text: as given.
        names: the fields that it names.
    """

    text: str
    names: frozenset[str]

    @staticmethod
    def parse(text: str) -> Template:
        """Reads a template.

        Raises:
            ConfigError: braces that do not pair, or more than a name between them.
        """
        names = set()
        try:
            for _, name, spec, conversion in string.Formatter().parse(text):
                if name is None:
                    continue
                if not name.isidentifier() or spec or conversion:
                    whole = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
                    raise ConfigError(
                        f"the prompt has {{{whole}}}, which is no field's name; write {{{{ and }}}} for braces"
                    )
                names.add(name)
        except ValueError as error:
            raise ConfigError(f"the prompt's braces do not pair ({error}); write {{{{ and }}}} for braces") from error
        return Template(text, frozenset(names))

    def check(self, fields: frozenset[str] | None) -> None:
        """Compares the names with what the source has.

        Raises:
            ConfigError: a name that no row has; names those that there are.
        """
        if fields is None:
            return
        for name in sorted(self.names - fields):
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"; did you mean {{{near[0]}}}?" if near else f"; there is: {', '.join(sorted(fields)) or 'none'}"
            raise ConfigError(f"the prompt names {{{name}}}, which the source does not have{hint}")

    def fill(self, fields: Mapping[str, Value]) -> str:
        """The text for one row. What a field holds is text, whatever braces are in it.

        Raises:
            RequestError: the row lacks a field, or it is empty there.
        """
        found = []
        for literal, name, _, _ in string.Formatter().parse(self.text):
            found.append(literal)
            if name is not None:
                value = fields.get(name)
                if value is None:
                    raise RequestError(f"the row has no {name}, which the prompt names")
                found.append(str(value).encode(errors="surrogateescape").decode(errors="replace"))
        return "".join(found)
