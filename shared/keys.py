"""Identities: of pictures, of files, of towers; and the Redis keys made of them.

A picture's digest is BLAKE3-256 over a tag, its size and its RGB pixels, so that equal bytes of another shape differ. A
file has a digest of its own, which an alias in Redis maps to its picture. A tenant's salt keys both: without the same
salt nobody can find, guess or time an entry. The first digits of a tenant's digests are the tenant's tag, so that its
entries can be purged; the 224 bits behind it tell pictures apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from blake3 import blake3

Buffer = bytes | bytearray | memoryview

#: raise it when the meaning of a picture's digest changes
IMAGE_TAG = b"lookonce image v1\0"
FILE_TAG = b"lookonce file v1\0"
_SALT_CONTEXT = "lookonce 2026-12-01 tenant salt of image digests"
_TENANT_CONTEXT = "lookonce 2026-12-03 tag of a tenant's digests"
#: hex digits of a tenant's tag
TENANT_DIGITS = 8
_ALIAS_CONTEXT = "lookonce 2026-12-01 seal of an alias"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Namespace:
    """What makes two embeddings of one picture comparable.

    Attributes:
        model: name of the model.
        tower: fingerprint of the tower's tensors, configuration, dtype and numerics; hex, 128 bits or more.
        preprocess: fingerprint of the preprocessing; likewise.

    Raises:
        ValueError: a part is empty or holds a colon, so that two namespaces could share keys; a fingerprint is short.
    """

    model: str
    tower: str
    preprocess: str

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            part = getattr(self, name)
            if not part or ":" in part:
                raise ValueError(f"{name} must not be empty or hold a colon: {part!r}")
        for fingerprint in (self.tower, self.preprocess):
            if not re.fullmatch(r"[0-9a-f]{32,}", fingerprint):
                raise ValueError(f"a fingerprint has 32 hex digits or more, not {fingerprint!r}")

    @classmethod
    def of(cls, key: str) -> Namespace:
        """The namespace of a key that :meth:`embedding_key` made.

        Raises:
            ValueError: it made no such key.
        """
        match key.split(":"):
            case ["lookonce", "emb", model, tower, preprocess, digest] if _DIGEST.fullmatch(digest):
                return cls(model, tower, preprocess)
        raise ValueError(f"not the key of an embedding: {key!r}")

    def embedding_key(self, digest: str) -> str:
        """Redis key of a picture's embedding record.

        Raises:
            ValueError: not a digest of 64 hex digits.
        """
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"a digest has 64 hex digits, not {digest!r}")
        return f"lookonce:emb:{self.model}:{self.tower}:{self.preprocess}:{digest}"


def is_digest(text: str) -> bool:
    """Whether a text has the form of a digest."""
    return _DIGEST.fullmatch(text) is not None


def _salt_key(salt: str) -> bytes:
    return blake3(salt.encode(), derive_key_context=_SALT_CONTEXT).digest()


def tenant_tag(salt: str) -> str:
    """What a tenant's digests begin with; two tenants share one by a chance of 2⁻³², and even then no entry."""
    return blake3(salt.encode(), derive_key_context=_TENANT_CONTEXT).hexdigest(TENANT_DIGITS // 2)


class SaltedHasher:
    """Digests that a tenant's salt keys.

    Args:
        salt: of the tenant; None and empty mean no tenant.
        tag: says what is hashed.
    """

    def __init__(self, salt: str | None, tag: bytes) -> None:
        self._tag = tenant_tag(salt) if salt else ""
        self._hasher = blake3(key=_salt_key(salt)) if salt else blake3()
        self.update(tag)

    def update(self, data: Buffer) -> None:
        """Adds bytes."""
        self._hasher.update(data)

    def hexdigest(self) -> str:
        """64 hex digits."""
        return self._tag + self._hasher.hexdigest()[len(self._tag) :]


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
    hasher = SaltedHasher(salt, IMAGE_TAG)
    hasher.update(width.to_bytes(8, "little") + height.to_bytes(8, "little"))
    hasher.update(np.ascontiguousarray(pixels).data)
    return hasher.hexdigest()


def file_hash(data: bytes) -> str:
    """Public name of an image file, 64 hex digits: BLAKE3-256 over a tag and its bytes."""
    hasher = blake3(FILE_TAG)
    hasher.update(data)
    return hasher.hexdigest()


def salted(name: str, salt: str | None) -> str:
    """Digest of a file from its public name; ``salt`` as for :func:`image_digest`.

    Everybody can compute the name of a file. What stands under it in the cache only its tenant's salt finds.

    Raises:
        ValueError: not a name of 64 hex digits.
    """
    if not _DIGEST.fullmatch(name):
        raise ValueError(f"a file's name has 64 hex digits, not {name!r}")
    return SaltedHasher(salt, bytes.fromhex(name)).hexdigest() if salt else name


def bytes_digest(data: bytes, salt: str | None = None) -> str:
    """Digest of an image file, 64 hex digits; ``salt`` as for :func:`image_digest`."""
    return salted(file_hash(data), salt)


def alias_key(file_digest: str) -> str:
    """Redis key that maps a file to its picture; it carries the version of the decoding that made the picture."""
    from shared.images import DECODE_VERSION

    return f"lookonce:alias:{DECODE_VERSION}:{file_digest}"


def strikes_key(model: str, file_digest: str) -> str:
    """Redis key that counts the processes of a model's encoder pool that died over a file."""
    return f"lookonce:strikes:{model}:{file_digest}"


def seal_alias(alias: str, digest: str) -> bytes:
    """What stands in Redis under an alias: the picture's digest, and a seal that fits this alias alone."""
    seal = blake3(f"{alias} {digest}".encode(), derive_key_context=_ALIAS_CONTEXT).hexdigest(16)
    return f"{digest}:{seal}".encode()


def open_alias(alias: str, value: bytes) -> str | None:
    """The digest that :func:`seal_alias` stored; None for a value that is damaged or belongs to another alias."""
    digest = value[:64].decode(errors="replace")
    return digest if _DIGEST.fullmatch(digest) and value == seal_alias(alias, digest) else None


def lease_key(embedding_key: str) -> str:
    """Redis key that one encoder holds while it makes this embedding."""
    return f"lookonce:lease:{embedding_key.removeprefix('lookonce:emb:')}"


def wake_channel(embedding_key: str) -> str:
    """Pub/sub channel that tells waiters that the record came or the lease went."""
    return f"lookonce:wake:{embedding_key.removeprefix('lookonce:emb:')}"
