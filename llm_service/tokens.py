"""A checkpoint's tokenizer, split in two: the special tokens, and a plain one that knows none of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from shared.errors import CheckpointError, RequestError

#: settings of tokenizer_config.json that templates refer to
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class SplitTokenizer:
    """Tokenises text without ever giving a special token; those are looked up by name.

    Args:
        checkpoint: folder with ``tokenizer.json``.

    Raises:
        CheckpointError: no usable ``tokenizer.json``.
    """

    def __init__(self, checkpoint: Path) -> None:
        path = checkpoint / "tokenizer.json"
        try:
            tree = json.loads(path.read_text())
            #: id of every added token, special or not
            self.added: dict[str, int] = {token["content"]: token["id"] for token in tree.get("added_tokens") or ()}
            self._special = frozenset(token["id"] for token in tree.get("added_tokens") or () if token["special"])
            tree |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
            self._plain = Tokenizer.from_str(json.dumps(tree))
            #: special tokens that the whole tokenizer puts in front of a text and behind it, such as a beginning token
            self.before, self.behind = _around(Tokenizer.from_file(str(path)))
            #: ids are below this
            self.vocabulary = max(self._plain.get_vocab_size(), *(token + 1 for token in self.added.values()))
        # the tokenizers library raises bare Exceptions
        except Exception as error:
            raise CheckpointError(f"cannot use {path}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ordinary tokenisation of a text in which nothing is special.

        Raises:
            RequestError: not valid Unicode, or a text that would give a special token after all.
        """
        try:
            ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(
                "the text holds a lone surrogate, which is not valid Unicode", param="messages"
            ) from error
        if not self._special.isdisjoint(ids):
            raise RequestError("the text contains one of the model's control tokens", param="messages")
        return ids

    def splitter(self, *more: str) -> Splitter:
        """Cuts text at the added tokens and at ``more``."""
        return Splitter((*self.added, *more))


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """What a tokenizer adds to a text on either side, found out by trying."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    start = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


class Splitter:
    """Cuts a text at given words; of two that begin at the same place the longer wins."""

    def __init__(self, words: tuple[str, ...]) -> None:
        ordered = sorted(set(words), key=len, reverse=True)
        self._words = frozenset(ordered)
        self._pattern = re.compile("(" + "|".join(map(re.escape, ordered)) + ")")

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """Parts in order; True marks the words."""
        for number, part in enumerate(self._pattern.split(text)):
            if part:
                yield part, number % 2 == 1


def read_tokenizer_config(checkpoint: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` with the chat template merged in from wherever the checkpoint keeps it.

    Raises:
        CheckpointError: unreadable, or no chat template.
    """
    path = checkpoint / "tokenizer_config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        if (separate := checkpoint / "chat_template.jinja").exists():
            config["chat_template"] = separate.read_text()
        elif (old := checkpoint / "chat_template.json").exists():
            config["chat_template"] = json.loads(old.read_text())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"cannot read {path}: {error!r}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise CheckpointError(f"{checkpoint} has no chat template")
    config["chat_template"] = template
    return config


def named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like as text; those that the checkpoint has."""
    found = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
