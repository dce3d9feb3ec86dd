"""A safetensors file written tensor by tensor, so that it may be larger than memory."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

import torch

#: names of dtypes in the format
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
#: the header's length is padded to this, so that the data are aligned
ALIGNMENT = 8


class TensorWriter:
    """Collects tensors in a temporary file next to the target and puts the whole in place at the end.

    Args:
        path: file to write; an existing one stays until the new one is whole.
        notes: the file's metadata.
    """

    def __init__(self, path: Path, notes: dict[str, str]) -> None:
        self._path = path
        self._header: dict[str, object] = {"__metadata__": notes}
        self._size = 0

    def __enter__(self) -> TensorWriter:
        # both on the target's own disk: the last step is then a rename
        self._folder = tempfile.TemporaryDirectory(prefix=f".{self._path.name}.", dir=self._path.parent)
        self._data = (Path(self._folder.name) / "data").open("w+b")
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Appends one tensor of a dtype in :data:`DTYPES`.

        Raises:
            ValueError: a name that is taken.
        """
        if name in self._header:
            raise ValueError(f"a tensor named {name} is in the file already")
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
        end = self._size + len(data)
        self._header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._size, end],
        }
        self._data.write(data)
        self._size = end

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._folder, self._data:
            if kind is None:
                self._finish()

    def _finish(self) -> None:
        header = json.dumps(self._header, ensure_ascii=False).encode()
        header += b" " * (-len(header) % ALIGNMENT)
        whole = Path(self._folder.name) / "whole"
        with whole.open("wb") as target:
            target.write(len(header).to_bytes(8, "little") + header)
            self._data.seek(0)
            shutil.copyfileobj(self._data, target, 1 << 20)
        whole.replace(self._path)
