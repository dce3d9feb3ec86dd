"""A checkpoint's configuration: data only, nothing that it names is ever imported or run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError

Config = Mapping[str, Any]

CONFIG = "config.json"
#: Mistral's own layout
PARAMS = "params.json"
#: stem of the safetensors files in each layout
STEMS = {CONFIG: "model", PARAMS: "consolidated"}
#: key under which :func:`read_config` adds the image processor's settings
PREPROCESSOR = "preprocessor_config"
#: context of a ``params.json`` that gives none, as vLLM assumes it
DEFAULT_CONTEXT = 128_000


def config_file(checkpoint: Path) -> str:
    """Which of the two layouts a folder is read as: ``config.json`` or ``params.json``.

    Some folders hold both. Then Hugging Face's is taken, unless its weights or its tokenizer are missing (those of
    Mistral-Small-3.2 come with ``tekken.json`` alone) and Mistral's weights are there.
    """
    if not (checkpoint / PARAMS).is_file():
        return CONFIG
    if not (checkpoint / CONFIG).is_file():
        return PARAMS
    held = {name: any(checkpoint.glob(f"{stem}*.safetensors")) for name, stem in STEMS.items()}
    complete = held[CONFIG] and (checkpoint / "tokenizer.json").is_file()
    return PARAMS if held[PARAMS] and not complete else CONFIG


def weight_stem(checkpoint: Path) -> str:
    """How the names of this checkpoint's safetensors files begin."""
    return STEMS[config_file(checkpoint)]


def read_config(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's ``config.json``, or its ``params.json`` with a ``model_type`` added.

    Settings of the image processor, where the checkpoint has any, stand under ``preprocessor_config``.

    Raises:
        CheckpointError: missing or not a JSON object.
    """
    if config_file(checkpoint) == PARAMS:
        config = _object(checkpoint / PARAMS)
        seen = isinstance(config.get("vision_encoder"), Mapping)
        named = {"model_type": "pixtral", "architectures": ["PixtralForConditionalGeneration"]}
        context = {"max_position_embeddings": config.get("max_position_embeddings") or DEFAULT_CONTEXT}
        return {**config, **(named if seen else {"model_type": "mistral", "architectures": []}), **context}
    config = _object(checkpoint / CONFIG)
    if (path := checkpoint / "preprocessor_config.json").is_file():
        config[PREPROCESSOR] = _object(path)
    elif (path := checkpoint / "processor_config.json").is_file():
        config[PREPROCESSOR] = _object(path).get("image_processor")
    return config


def section(config: Config, name: str, *, file: str = CONFIG) -> Config:
    """A nested mapping of the configuration; empty when it is missing or null. ``file`` is named in errors.

    Raises:
        CheckpointError: it is something else.
    """
    found = config.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{file}: {name} must be an object, found {type(found).__name__}")
    return found


def whole(config: Config, name: str, default: int | None = None, *, most: int = 1 << 20, file: str = CONFIG) -> int:
    """A whole number between 1 and ``most`` from the configuration; ``file`` is named in errors.

    Raises:
        CheckpointError: missing without a default, of another type, or out of range.
    """
    return whole_number(name, config.get(name, default), most=most, file=file)


def whole_number(name: str, value: Any, *, most: int = 1 << 20, file: str = CONFIG) -> int:
    """The same for a value that was found already; ``name`` is what errors call it.

    Raises:
        CheckpointError: of another type, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise CheckpointError(f"{file}: {name} must be a whole number from 1 to {most}, found {value!r:.80}")
    return value


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return found
