"""Pictures, their embeddings from our own tower, and records of those: what the encoder side would have stored."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from encoder_service.checkpoints import load_encoder
from shared.items import VisionItem
from shared.records import encode_record
from shared.sizing import Grid


class Picture(NamedTuple):
    """A random picture, named by its seed and size."""

    seed: int
    width: int
    height: int

    @property
    def pixels(self) -> torch.Tensor:
        """uint8 ``[height, width, 3]``: coarse blocks, so that resizing keeps the contrast."""
        generator = torch.Generator().manual_seed(self.seed)
        blocks = torch.randint(0, 256, (8, 8, 3), generator=generator, dtype=torch.uint8)
        rows = torch.arange(self.height) * 8 // self.height
        columns = torch.arange(self.width) * 8 // self.width
        return blocks[rows][:, columns]


class Embedded(NamedTuple):
    """A picture after the encoder."""

    key: str
    patches: torch.Tensor
    grid: Grid
    rows: torch.Tensor
    merge: int = 2

    @property
    def record(self) -> bytes:
        """As it lies in the cache."""
        return encode_record(self.key, self.rows, self.grid, self.merge)

    def item(self, *, inline: bool = False) -> VisionItem:
        """What the ingress hands to the engine."""
        return VisionItem(self.key, self.grid, self.merge, len(self.rows), record=self.record if inline else None)


@lru_cache
def embed(checkpoint: Path, picture: Picture, salt: str = "") -> Embedded:
    """The picture through the checkpoint's tower in float32."""
    encoder = _encoder(checkpoint)
    patches, grid = encoder.preprocess.patches(picture.pixels)
    with torch.inference_mode():
        rows = encoder.tower(patches, encoder.tower.plan([grid]))
    key = f"lookonce:emb:test:{checkpoint.name}:0:{salt}{picture.seed}-{picture.width}x{picture.height}"
    return Embedded(key, patches, grid, rows.clone(), encoder.tower.merge)


_encoder = lru_cache(lambda checkpoint: load_encoder(checkpoint, "float32"))
