"""Pictures that nobody has seen: drawn from a seed, as large as a photo of their size when compressed."""

from __future__ import annotations

import base64
import io
from functools import lru_cache

import numpy as np
from PIL import Image


@lru_cache(maxsize=4096)
def picture_url(seed: int, side: int) -> str:
    """A square JPEG as a data URL: soft shapes under fine grain, other pixels for every seed."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
        (side, side), Image.Resampling.BICUBIC
    )
    grain = rng.normal(0, 6, (side, side, 1))
    pixels = np.clip(np.asarray(coarse, dtype=np.float32) + grain, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
