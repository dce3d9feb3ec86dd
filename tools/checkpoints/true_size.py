"""Checkpoints whose towers have the published sizes, beside a language part that takes no disk.

The tower is random; the language model's tensors are holes in the files, as large as wanted: for measuring what an
encoder reads and holds.

    python -m tools.checkpoints.true_size radio-h /tmp/radio-h
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tools.checkpoints.isaac import write_isaac
from tools.checkpoints.pixtral import Sizes, write_pixtral
from tools.checkpoints.radio import Shape, write_radio

#: rows and columns of one tensor of the language part
HOLE = (8192, 8192)
SHARDS = 4


def so400m(path: Path) -> Path:
    """Isaac's: SigLIP2 so400m/16 with the projector to a language model of 2,048 channels."""
    write_isaac(
        path,
        nested=True,
        sharded=False,
        hidden=2048,
        heads=16,
        vision_hidden=1152,
        vision_layers=27,
        vision_heads=16,
        vision_intermediate=4304,
        min_patches=256,
        max_patches=6144,
    )
    return path


def pixtral_12b(path: Path) -> Path:
    """Pixtral-12B's in Mistral's layout: one file, no index."""
    sizes = Sizes(width=1024, heads=16, hidden=4096, layers=24, patch=16, longest=1024, text_width=5120)
    return write_pixtral(path, "native", sizes=sizes)


def radio_h(path: Path) -> Path:
    """RADIO-H inside Llama-Nemotron-Nano-VL-8B, whose language model has 4,096 channels."""
    teachers = (("clip", True), ("siglip", True), ("dino", True), ("sam", False))
    shape = Shape(
        width=1280,
        layers=32,
        heads=16,
        hidden=5120,
        patch_size=16,
        table=2048,
        tile=512,
        teachers=teachers,
        registers=4,
        projector_hidden=4096,
        text_width=4096,
    )
    return write_radio(path, "llama", shape)


#: by name: how it is written, how its files' names begin, how a tensor of its language model is named, how many files
TRUE_SIZES: dict[str, tuple[Callable[[Path], Path], str, str, int]] = {
    "so400m": (so400m, "model", "model.text_model.layers.{}.mlp.hole.weight", SHARDS),
    "pixtral-12b": (pixtral_12b, "consolidated", "layers.{}.feed_forward.hole.weight", 1),
    "radio-h": (radio_h, "model", "language_model.model.layers.{}.mlp.hole.weight", SHARDS),
}


def write_true_size(path: Path, name: str, *, times: float = 10) -> Path:
    """Writes one in bfloat16, with a language part ``times`` as large as the rest, and returns its folder."""
    write, stem, hole, count = TRUE_SIZES[name]
    write(path)
    tensors = {key: tensor.bfloat16() for key, tensor in load_file(path / f"{stem}.safetensors").items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    holes = [hole.format(number) for number in range(1 + int(times * size / (2 * HOLE[0] * HOLE[1])))]
    names = _mixed(sorted(tensors), holes)
    parts = [names[number::count] for number in range(count)]
    if count == 1:
        _write(path / f"{stem}.safetensors", names, tensors)
        return path
    (path / f"{stem}.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"{stem}-{number:05d}-of-{count:05d}.safetensors"
        _write(path / file, part, tensors)
        weight_map |= dict.fromkeys(part, file)
    (path / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def _mixed(names: Sequence[str], holes: Sequence[str]) -> list[str]:
    """Tower and language part by turns, so that no file has one of them alone."""
    step = -(-len(names) // max(len(holes), 1))
    out: list[str] = []
    for number, hole in enumerate(holes):
        out += [hole, *names[number * step : (number + 1) * step]]
    return out + list(names[len(holes) * step :])


def _write(path: Path, names: Sequence[str], tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file; names without a tensor become holes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        shape = list(tensors[name].shape) if name in tensors else list(HOLE)
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        file.truncate(begin + at)
        for name in names:
            if name in tensors:
                file.seek(begin + header[name]["data_offsets"][0])  # type: ignore[index]
                file.write(tensors[name].contiguous().view(torch.uint8).numpy().data)


if __name__ == "__main__":
    write_true_size(Path(sys.argv[2]), sys.argv[1])
