"""Identities: of pictures, of files, of towers; and the Redis keys made of them.

A picture's digest is BLAKE3-256 over a tag, its size and its RGB pixels, so that equal bytes of another shape differ. A
file has a digest of its own, which an alias in Redis maps to its picture. A tenant's salt keys both: without the same
salt nobody can find, guess or time an entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

#: raise it when the meaning of a picture's digest changes
IMAGE_TAG = b"lookonce image v1\0"
FILE_TAG = b"lookonce file v1\0"
_SALT_CONTEXT = "lookonce 2026-12-01 tenant salt of image digests"


@dataclass(frozen=True)
class Namespace:
    """What makes two embeddings of one picture comparable.

    Attributes:
        model: name of the model.
        tower: fingerprint of the tower's tensors, configuration, dtype and numerics.
        preprocess: fingerprint of the preprocessing.
    """

    model: str
    tower: str
    preprocess: str

    def embedding_key(self, digest: str) -> str:
        """Redis key of a picture's embedding record."""
        return f"lookonce:emb:{self.model}:{self.tower}:{self.preprocess}:{digest}"


def _hasher(salt: str | None) -> blake3:
    if not salt:
        return blake3()
    return blake3(key=blake3(salt.encode(), derive_key_context=_SALT_CONTEXT).digest())


def image_digest(pixels: npt.NDArray[np.uint8], salt: str | None = None) -> str:
    """Digest of a decoded picture, 64 hex digits.

    Args:
        pixels: uint8 ``[height, width, 3]``.
        salt: of the tenant; None and empty mean no tenant.

    Raises:
        ValueError: another shape or dtype.
    """
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise ValueError(f"a picture is uint8 [height, width, 3], not {pixels.dtype} {list(pixels.shape)}")
    height, width = pixels.shape[:2]
    hasher = _hasher(salt)
    hasher.update(IMAGE_TAG + width.to_bytes(8, "little") + height.to_bytes(8, "little"))
    hasher.update(np.ascontiguousarray(pixels).data)
    return hasher.hexdigest()


def bytes_digest(data: bytes, salt: str | None = None) -> str:
    """Digest of an image file, 64 hex digits; ``salt`` as for :func:`image_digest`."""
    hasher = _hasher(salt)
    hasher.update(FILE_TAG)
    hasher.update(data)
    return hasher.hexdigest()


def alias_key(file_digest: str) -> str:
    """Redis key that maps a file to its picture; it carries the version of the decoding that made the picture."""
    from shared.images import DECODE_VERSION

    return f"lookonce:alias:{DECODE_VERSION}:{file_digest}"


def lease_key(embedding_key: str) -> str:
    """Redis key that one encoder holds while it makes this embedding."""
    return f"lookonce:lease:{embedding_key.removeprefix('lookonce:emb:')}"


def wake_channel(embedding_key: str) -> str:
    """Pub/sub channel that tells waiters that the record came or the lease went."""
    return f"lookonce:wake:{embedding_key.removeprefix('lookonce:emb:')}"
