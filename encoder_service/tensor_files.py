"""The safetensors files of a checkpoint, read one wanted tensor at a time.

Nothing is ever unpickled, no file outside the checkpoint's folder is named, and a tensor that nobody asks for is never
touched: the language model's shards need not even be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shared.errors import CheckpointError
from shared.model_config import PARAMS, STEMS
from shared.weight_index import index_name, read_index

FLOATS = ("F64", "F32", "F16", "BF16")
#: bytes that are read before the files are closed and mapped anew: their pages count as this process's memory till then
MAPPED_BYTES = 64 << 20


class TensorFiles:
    """Named tensors of one checkpoint, sharded or not.

    Attributes:
        read: names of the tensors whose bytes were read, by file name.

    Args:
        checkpoint: the folder.
        stem: how the files' names begin: ``model`` as transformers writes them, ``consolidated`` as Mistral does.

    Raises:
        CheckpointError: no safetensors here, or an index that cannot be used.
    """

    def __init__(self, checkpoint: Path, stem: str = "model") -> None:
        self._folder = checkpoint
        self._open_files: dict[str, Any] = {}
        self._mapped = 0
        self.read: dict[str, list[str]] = {}
        single, index = f"{stem}.safetensors", index_name(stem)
        if (checkpoint / index).is_file():
            self._file_of = read_index(checkpoint / index)
        elif (checkpoint / single).is_file():
            self._file_of = dict.fromkeys(self._opened(single).keys(), single)
        elif stem == STEMS[PARAMS] and (parts := sorted(checkpoint.glob(f"{stem}*.safetensors"))):
            self._file_of = {name: part.name for part in parts for name in self._opened(part.name).keys()}  # noqa: SIM118
        else:
            raise CheckpointError(f"{checkpoint} holds neither {single} nor {index}; only safetensors are read")

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def names(self, prefix: str) -> set[str]:
        """Names that begin with ``prefix``, as the index or the single file lists them."""
        return {name for name in self._file_of if name.startswith(prefix)}

    def place(self, name: str) -> Path:
        """The file that holds a tensor.

        Raises:
            CheckpointError: no such tensor.
        """
        if name not in self._file_of:
            raise CheckpointError(f"{self._folder} has no tensor {name}")
        return self._folder / self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header alone.

        Raises:
            CheckpointError: no such tensor, or one that is not of floating point; names file and tensor.
        """
        dtype, shape = self.stored(name)
        if dtype not in FLOATS:
            raise CheckpointError(f"{self.place(name)}: {name} is stored as {dtype}; wanted one of {', '.join(FLOATS)}")
        return shape

    def stored(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype, by its name in the format, and shape of a tensor of any kind, from the file's header alone.

        Raises:
            CheckpointError: no such tensor, or a file that cannot be read; names both.
        """
        path = self.place(name)
        with _translated(path, name):
            lazy = self._opened(path.name).get_slice(name)
            return str(lazy.get_dtype()), tuple(lazy.get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as a view of the mapped file: copy from it, do not keep it.

        Raises:
            CheckpointError: as :meth:`shape`.
        """
        self.shape(name)
        path = self.place(name)
        with _translated(path, name):
            if self._mapped > MAPPED_BYTES:
                self._close()
            tensor: torch.Tensor = self._opened(path.name).get_tensor(name)
        self._mapped += tensor.nbytes
        self.read.setdefault(path.name, []).append(name)
        return tensor

    def _opened(self, file: str) -> Any:
        if file not in self._open_files:
            path = self._folder / file
            with _translated(path):
                handle: Any = safe_open(path, framework="pt", device="cpu")
                self._open_files[file] = handle.__enter__()
        return self._open_files[file]

    def _close(self) -> None:
        while self._open_files:
            self._open_files.popitem()[1].__exit__(None, None, None)
        self._mapped = 0


@contextmanager
def _translated(path: Path, tensor: str | None = None) -> Iterator[None]:
    """safetensors' errors as ours, with the file's and the tensor's name."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        what = f"{path}: {tensor}" if tensor else str(path)
        raise CheckpointError(
            f"{what} cannot be read as safetensors (missing, cut short or damaged): {error}"
        ) from error
