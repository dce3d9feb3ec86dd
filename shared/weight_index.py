"""The index of a checkpoint whose tensors lie in several files."""

from __future__ import annotations

import json
from pathlib import Path

from shared.errors import CheckpointError

#: bytes; the index of a model with 10,000 tensors has about 1 MB
MAX_INDEX_BYTES = 64 << 20


def index_name(stem: str) -> str:
    """Name of the index beside files whose names begin with ``stem``."""
    return f"{stem}.safetensors.index.json"


def read_index(path: Path) -> dict[str, str]:
    """The index's map from tensor to file; every file is a plain name next to the index.

    Raises:
        CheckpointError: unreadable, no such map, or a file outside the folder.
    """
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_INDEX_BYTES} bytes")
        index = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path} has no weight_map from tensor names to files")
    for name, file in files.items():
        plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & set("/\\\0:")
        if not plain:
            raise CheckpointError(
                f"{path}: {name!r:.200} must be in a .safetensors file of this folder, not {file!r:.200}"
            )
    return files
