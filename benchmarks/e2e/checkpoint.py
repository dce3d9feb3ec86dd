"""The checkpoint of the comparison: Isaac's layout, random weights, the 'small' size."""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.checkpoints.isaac import write_isaac


def write_small(folder: Path) -> Path:
    """A tower of 12 layers x 768 and a language model of 8 layers x 512; at most 1,024 patches, 256 tokens, a picture.

    What is there already is kept: its weights come from a seed.
    """
    if (folder / "config.json").exists():
        return folder
    building = folder.with_suffix(".part")
    shutil.rmtree(building, ignore_errors=True)
    write_isaac(
        building,
        hidden=512,
        layers=8,
        heads=8,
        kv_heads=4,
        head_dim=64,
        intermediate=1536,
        vision_hidden=768,
        vision_layers=12,
        vision_heads=12,
        vision_intermediate=3072,
        position_side=32,
        max_patches=1024,
        max_positions=8192,
    )
    building.rename(folder)
    return folder
