"""Small tokenizers of Pixtral's two kinds: Mistral's ``tekken.json`` and Hugging Face's ``tokenizer.json``."""

from __future__ import annotations

import base64
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tools.checkpoints.qwen_tokenizer import CORPUS, PRETOKENIZE

#: control tokens in the order of their ids, as in the published tokenizers
CONTROL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
IMAGE_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
MERGES = 80

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST]' }}
        {%- if message.content is string %}
            {{- message.content }}
        {%- else %}
            {%- for part in message.content %}
                {%- if part.type == 'image' or part.type == 'image_url' %}
                    {{- '[IMG]' }}
                {%- else %}
                    {{- part.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- else %}
        {{- raise_exception('roles are system, user and assistant, not ' + message.role) }}
    {%- endif %}
{%- endfor %}
"""


def control_tokens(shift: int) -> list[str]:
    """Control tokens by id; ``shift`` fillers move the image tokens up, as larger siblings of a model have them."""
    if not shift:
        return list(CONTROL)
    others = [token for token in CONTROL if token not in IMAGE_TOKENS]
    return others + [f"<SPECIAL_{len(others) + number}>" for number in range(shift)] + list(IMAGE_TOKENS)


def _merges(count: int) -> list[bytes]:
    """The most frequent pairs of the corpus, joined one after another."""
    words = [[bytes([byte]) for byte in word.encode()] for text in CORPUS for word in text.split(" ")]
    found: list[bytes] = []
    for _ in range(count):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        found.append(left + right)
        for word in words:
            place = 0
            while place < len(word) - 1:
                if (word[place], word[place + 1]) == (left, right):
                    word[place : place + 2] = [left + right]
                place += 1
    return found


def write_tekken(path: Path, *, version: str, patch: int, longest: int, merge: int, shift: int, total: int) -> None:
    """``tekken.json`` with all bytes, a few merges, and the image settings that mistral-common wants there.

    It has ``total`` tokens, as many as the model: fillers among the control tokens make up for what is missing.
    """
    control = control_tokens(shift)
    vocabulary = [bytes([byte]) for byte in range(256)] + _merges(MERGES)
    tree: dict[str, Any] = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            "num_vocab_tokens": len(vocabulary),
            "default_vocab_size": total,
            "default_num_special_tokens": total - len(vocabulary),
            "version": version,
        },
        "vocab": [
            {
                "rank": rank,
                "token_bytes": base64.b64encode(token).decode(),
                "token_str": token.decode(errors="replace") if len(token) > 1 or token[0] < 128 else None,
            }
            for rank, token in enumerate(vocabulary)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(control)
        ],
        "multimodal": {"image_patch_size": patch, "max_image_size": longest, "spatial_merge_size": merge},
    }
    (path / "tekken.json").write_text(json.dumps(tree))


def write_tokenizer(path: Path, *, shift: int = 0, vocabulary: int = 600) -> int:
    """``tokenizer.json`` and its settings; returns the id of ``[IMG]``."""
    control = control_tokens(shift)
    tokenizer = Tokenizer(BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "PixtralProcessor",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 131072,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return int(tokenizer.token_to_id("[IMG]"))
