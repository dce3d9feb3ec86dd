"""What ``lookonce inspect`` tells about a checkpoint: family, sizes, tokens, memory, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from encoder_service.checkpoints import check_encoder
from encoder_service.tensor_files import TensorFiles
from shared.config import Dtype
from shared.errors import CheckpointError, LookonceError
from shared.families import context_length, family_of
from shared.family import Family
from shared.model_config import config_file, read_config, weight_stem
from shared.sizing import Grid

#: pictures whose tokens are told where none are asked for
SIZES = ((256, 256), (512, 512), (1024, 768), (1920, 1080), (4000, 3000))
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: of one stored value, by its name in a safetensors header
STORED_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
GIB = 2**30


@dataclass(frozen=True)
class Part:
    """Tensors of one half of the model.

    Attributes:
        parameters: how many numbers.
        stored: bytes in the files.
    """

    parameters: int
    stored: int


@dataclass
class Inspection:
    """Everything that was found.

    Attributes:
        checkpoint: the folder.
        facts: names and values, in the order to be shown.
        tokens: width, height and embedding rows of some pictures.
        problems: sentences; empty for a checkpoint that can be served.
    """

    checkpoint: Path
    facts: dict[str, str] = field(default_factory=dict)
    tokens: list[tuple[int, int, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "checkpoint": str(self.checkpoint),
            "facts": self.facts,
            "tokens": [{"width": w, "height": h, "tokens": tokens} for w, h, tokens in self.tokens],
            "problems": self.problems,
        }


def inspect(
    checkpoint: Path, dtype: Dtype = "bfloat16", sizes: Sequence[tuple[int, int]] = SIZES, sequences: int = 16
) -> Inspection:
    """Looks at a checkpoint's configuration and at the headers of its files; no weight is read.

    Args:
        checkpoint: its folder.
        dtype: to compute memory for.
        sizes: of pictures, width and height, pixels.
        sequences: of full length, to compute the KV cache for.
    """
    found = Inspection(checkpoint)
    try:
        config = read_config(checkpoint)
        family = family_of(config, checkpoint)
    except LookonceError as error:
        found.problems.append(error.message)
        return found
    found.facts |= {
        "family": family.name,
        "layout": f"{config_file(checkpoint)} with {weight_stem(checkpoint)}*.safetensors",
        "architecture": ", ".join(config.get("architectures") or ()) or str(config.get("model_type")),
    }
    _tower(found, dtype)
    _tokens(found, family, config, sizes)
    parts = _parts(found, family)
    if family.language_architecture is None:
        found.facts["language model"] = "none: an encoder by itself, see lookonce encode"
        return found
    _language(found, family, config, parts, dtype, sequences)
    found.problems = list(dict.fromkeys(found.problems))  # both halves may stumble over one file
    return found


def _tower(found: Inspection, dtype: Dtype) -> None:
    try:
        tower = check_encoder(found.checkpoint, dtype)
    except LookonceError as error:
        found.problems.append(error.message)
        return
    parameters = sum(parameter.numel() for parameter in tower.parameters())
    weights = parameters * BYTES[dtype]
    found.facts["tower"] = f"{type(tower).__name__}, {_count(parameters)} parameters, rows of {tower.width}"
    found.facts["encoder pool"] = f"{_size(weights)} of weights for each replica in {dtype}"


def _tokens(found: Inspection, family: Family, config: Mapping[str, Any], sizes: Sequence[tuple[int, int]]) -> None:
    try:
        rule = family.size_rule(config)
        found.tokens = [(width, height, rule.tokens(width, height)) for width, height in sizes]
        found.facts["largest picture"] = f"{family.max_tokens(config)} tokens"
    except (LookonceError, ArithmeticError, TypeError, ValueError) as error:
        found.problems.append(f"the size rule cannot be made: {error}")


def _parts(found: Inspection, family: Family) -> dict[str, Part]:
    """Both halves as the headers of the files tell them."""
    sums = {"tower": [0, 0], "language": [0, 0]}
    broken: set[Path] = set()
    try:
        with TensorFiles(found.checkpoint, weight_stem(found.checkpoint)) as files:
            for name in sorted(files.names("")):
                if (place := files.place(name)) in broken:
                    continue
                try:
                    dtype, shape = files.stored(name)
                except CheckpointError as error:
                    broken.add(place)
                    found.problems.append(error.message)
                    continue
                entry = sums["tower" if name.startswith(family.tower_prefixes) else "language"]
                entry[0] += math.prod(shape)
                entry[1] += math.prod(shape) * STORED_BYTES.get(dtype, 1)
    except CheckpointError as error:
        found.problems.append(error.message)
    parts = {name: Part(*entry) for name, entry in sums.items()}
    for name, part in parts.items():
        if part.parameters:
            found.facts[f"{name} tensors"] = f"{_count(part.parameters)} numbers, {_size(part.stored)} on disk"
    return parts


def _language(
    found: Inspection,
    family: Family,
    config: Mapping[str, Any],
    parts: Mapping[str, Part],
    dtype: Dtype,
    sequences: int,
) -> None:
    found.facts["language model"] = str(family.language_architecture)
    part = parts["language"]
    if not part.parameters and not found.problems:
        found.problems.append(f"{found.checkpoint} holds no tensor of a language model")
    try:
        context = context_length(found.checkpoint)
        found.facts["context"] = f"{context} tokens"
    except LookonceError as error:
        found.problems.append(error.message)
        context = None
    token = kv_bytes(config, BYTES[dtype])
    if token is not None:
        weights = _size(part.parameters * BYTES[dtype])
        memory = f"{weights} of weights for each replica in {dtype}, {token} bytes of KV a token"
        if context is not None:
            memory += f" ({_size(token * context * sequences)} for {sequences} full contexts)"
        found.facts["language pool"] = memory
    try:
        from llm_service.prompts import prompt_builder

        builder = prompt_builder(found.checkpoint)
        builder.build(
            [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "x"}]}], [Grid(1, 1)]
        )
    except (LookonceError, TypeError) as error:
        found.problems.append(f"no prompt with an image can be made: {error}")


def kv_bytes(config: Mapping[str, Any], value_bytes: int) -> int | None:
    """Bytes of the KV cache that one token takes: keys and values of every layer; None when the sizes are not told."""
    text = config.get("text_config") or config.get("llm_config") or config

    def first(*names: str) -> int | None:
        return next((text[name] for name in names if isinstance(text.get(name), int)), None)

    layers, heads = first("num_hidden_layers", "n_layers"), first("num_attention_heads", "n_heads")
    if isinstance(pattern := text.get("hybrid_override_pattern"), str):
        layers = pattern.count("*")  # the others keep a state per sequence, or nothing
    keys = first("num_key_value_heads", "n_kv_heads") or heads
    width = first("hidden_size", "dim")
    head = first("head_dim") or (width // heads if width and heads else None)
    if layers is None or keys is None or head is None:
        return None
    return 2 * layers * keys * head * value_bytes


def _count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.2f} {name}"
    return f"{number:,}"


def _size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / 2**20:.1f} MiB"


def inspection_table(found: Inspection) -> Table:
    """Facts, then tokens by picture size."""
    table = Table(title=str(found.checkpoint), show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in found.facts.items():
        table.add_row(name, value)
    for width, height, tokens in found.tokens:
        table.add_row(f"{width} × {height} pixels", f"{tokens} tokens")
    return table
