"""What makes two encoder outputs of stock vLLM the same: the weights that made them, and every byte that went in.

vLLM's own identifier of an image may be a ``uuid`` that a client chose, so it is never part of a key. What was
processed for the encoder (pixels, grids, whatever the model takes) is hashed instead, with the request's cache salt.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from shared.errors import ConfigError
from shared.keys import Namespace, SaltedHasher

logger = logging.getLogger(__name__)

ITEM_TAG = b"lookonce vllm item v1\0"
#: files of a checkpoint that hold weights
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
#: parts of a configuration that say where it came from, not what it is
_PROVENANCE = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}
#: how a Hugging Face cache names the file that a link leads to: by its content
_CONTENT_NAME = re.compile(r"[0-9a-f]{64}")


class Unhashable(Exception):
    """An item holds something whose content is not known here."""


def item_digest(modality: str, fields: Mapping[str, Any], salt: str | None) -> str:
    """Digest of what goes into the encoder for one item, 64 hex digits.

    Args:
        modality: such as ``image``.
        fields: processed fields by name; tensors, arrays, numbers, text, and lists and mappings of these.
        salt: the request's cache salt; requests of different salts share nothing.

    Raises:
        Unhashable: a value of another kind, or a tensor that is not on the host.
    """
    hasher = SaltedHasher(salt, ITEM_TAG)
    for piece in _pieces({modality: dict(fields)}):
        hasher.update(piece)
    return hasher.hexdigest()


def _pieces(value: Any) -> Iterator[Any]:
    """A value as bytes; its kind and length go before it, so that different values never give the same bytes."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise Unhashable(f"a tensor on {value.device}")
        flat = value.detach().contiguous().reshape(-1)
        yield _head("tensor", value.dtype, tuple(value.shape))
        yield flat.view(torch.uint8).numpy().data if flat.numel() else b""
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield _head("array", value.dtype.str, value.shape)
        yield np.ascontiguousarray(value).reshape(-1).view(np.uint8).data if value.size else b""
    elif value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        yield _head(type(value).__name__, len(text))
        yield text.encode()
    elif isinstance(value, list | tuple):
        yield _head("sequence", len(value))
        for part in value:
            yield from _pieces(part)
    elif isinstance(value, Mapping):
        yield _head("mapping", len(value))
        for name in sorted(value):
            yield from _pieces(str(name))
            yield from _pieces(value[name])
    else:
        raise Unhashable(f"a {type(value).__name__}")


def _head(*parts: object) -> bytes:
    return "\0".join(map(str, parts)).encode() + b"\n"


def model_namespace(model: Any, given: str | None) -> Callable[[], Namespace]:
    """Prepares the namespace of a model's encoder outputs. The returned function reads all weights: seconds per 10 GB.

    Args:
        model: vLLM's ``ModelConfig``.
        given: a name for the weights, chosen by the operator, where they cannot be read here.

    Raises:
        ConfigError: the weights are not in local files and have no given name.
    """
    folder = None if given else _folder(model)
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _PROVENANCE}
    settings = (
        f"{model.dtype} {model.quantization} {model.multimodal_config.compute_hash()}\n"
        f"{json.dumps(config, sort_keys=True, default=str)}"
    )
    name = str(model.architectures[0]).replace(":", "_")

    def read() -> Namespace:
        weights = f"given {given}" if folder is None else weights_digest(folder)
        fingerprint = blake3(f"{weights}\n{settings}".encode()).hexdigest()
        return Namespace(name, fingerprint, _numerics())

    return read


def weights_digest(folder: Path) -> str:
    """Digest over the weight files of a checkpoint, hex; links into a Hugging Face cache are taken by their name.

    Raises:
        ConfigError: there are none.
    """
    files = sorted({file for pattern in WEIGHTS for file in folder.rglob(pattern)})
    if not files:
        raise ConfigError(f"no weights in {folder}; set ec_connector_extra_config.fingerprint to a name for them")
    hasher = blake3()
    for file in files:
        content = file.resolve().name if file.is_symlink() else ""
        if not _CONTENT_NAME.fullmatch(content):
            content = blake3(max_threads=2).update_mmap(file).hexdigest()
        hasher.update(f"{file.relative_to(folder)} {content}\n".encode())
    return hasher.hexdigest()


def _folder(model: Any) -> Path:
    """Where the weights lie on this machine; vLLM has loaded them before it makes the scheduler."""
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the weights of {model.model} are not in local files, so they cannot be told from others; "
            "set ec_connector_extra_config.fingerprint to a name that changes whenever they do"
        ) from error


def _numerics() -> str:
    """Other versions of vLLM may compute another embedding from the same weights."""
    import vllm

    return blake3(f"vllm {vllm.__version__}".encode()).hexdigest()
