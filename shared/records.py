"""The record format: what stands in Redis for one embedding. Specified in ``docs/record-format.md``.

A record is a header of 128 bytes and an aligned payload. Every field is checked on every read; what fails a check is
a miss, never a wrong tensor. Nothing here evaluates bytes: no pickle, no ``torch.load``.

Version 2 is written. Version 1 is read as well; it differs in nothing but the checksum of the payload.
"""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass

import torch
from blake3 import blake3
from xxhash import xxh3_128, xxh3_128_digest

from shared.keys import Buffer as Buffer
from shared.record_values import Encoding, finite, pack, payload_bytes, unpack
from shared.sizing import Grid

MAGIC = b"LOOKONCE"
VERSION = 2
#: magic, version, dtype, encoding, tokens, width, t, h, w, merge, reserved, payload bytes, key hash, payload checksum
_FIELDS = struct.Struct("<8sHBBIIIIIIIQ32s16s")
_CHECKSUM_BYTES = 16
#: of a payload, by the record's version. It finds damage; authenticity is the Redis's own (``docs/record-format.md``)
_CHECKSUMS = {1: lambda payload: blake3(payload).digest(_CHECKSUM_BYTES), 2: xxh3_128_digest}
HEADER_BYTES = 128
DTYPES = {0: torch.float32, 1: torch.bfloat16, 2: torch.float16}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ENCODINGS = frozenset(Encoding)
_NOT_FINITE = "the embedding holds NaN or infinity"
#: bounds on what a header may claim, far above any real image
MAX_TOKENS, MAX_WIDTH, MAX_SIDE, MAX_MERGE = 1 << 20, 1 << 16, 1 << 16, 64

# Records are read-only by intention: nobody writes into an embedding that others share. torch warns of that once.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class RecordError(ValueError):
    """A record that must not be used.

    Args:
        reason: short label for metrics: ``truncated``, ``magic``, ``version``, ``header``, ``key``, ``shape``,
            ``payload`` or ``values``.
        detail: for the log.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True)
class RecordHeader:
    """What a record says about itself.

    Attributes:
        dtype: of the embedding.
        encoding: of its values in the payload.
        tokens, width: shape of the embedding.
        grid: patch grid of the image.
        merge: side of the square of patches that became one token.
        payload_bytes: length of the payload.
    """

    dtype: torch.dtype
    encoding: Encoding
    tokens: int
    width: int
    grid: Grid
    merge: int
    payload_bytes: int


def encode_record(
    key: str, embedding: torch.Tensor, grid: Grid, merge: int, encoding: Encoding = Encoding.RAW
) -> bytes:
    """Makes the record of an embedding; raw values are copied once.

    Args:
        key: the full cache key; the record is good for no other.
        embedding: ``[tokens, width]``, float32, bfloat16 or float16, on the host.
        grid: patch grid.
        merge, encoding: as in :class:`RecordHeader`.

    Raises:
        RecordError: a value that is not finite, or a shape that does not fit the grid.
    """
    if embedding.dtype not in _CODES or embedding.ndim != 2:
        raise RecordError("shape", f"an embedding is float [tokens, width], not {embedding.dtype} {embedding.shape}")
    tokens, width = embedding.shape
    nbytes = payload_bytes(encoding, embedding.dtype, tokens, width)
    header = RecordHeader(embedding.dtype, encoding, tokens, width, Grid(*grid), merge, nbytes)
    _check_shape(header)
    raw = pack(Encoding.RAW, embedding)
    if not finite(Encoding.RAW, memoryview(raw[0]), embedding.dtype, tokens):
        raise RecordError("values", _NOT_FINITE)
    payload = raw if encoding is Encoding.RAW else pack(encoding, embedding)
    hasher = xxh3_128()
    for piece in payload:
        hasher.update(piece)
    fields = _FIELDS.pack(
        *(MAGIC, VERSION, _CODES[header.dtype], encoding, tokens, width, 1, grid[0], grid[1], merge, 0, nbytes),
        blake3(key.encode()).digest(),
        hasher.digest(),
    )
    head = fields + blake3(fields).digest(_CHECKSUM_BYTES)
    return b"".join([head.ljust(HEADER_BYTES, b"\0"), *payload])


def read_header(buffer: Buffer, key: str) -> RecordHeader:
    """Reads and checks the first :data:`HEADER_BYTES` of a record.

    Raises:
        RecordError: not a record, not of this key, or damaged.
    """
    return _read(buffer, key)[0]


def check_record(buffer: Buffer, key: str) -> RecordHeader:
    """Checks a whole record: header, length, checksum, values; makes no tensor.

    Raises:
        RecordError: anything about it is wrong.
    """
    header, checksum, payload = _parts(buffer, key)
    if not checksum.fits(payload):
        raise RecordError("payload", "the checksum does not match")
    if not finite(header.encoding, payload, header.dtype, header.tokens):
        raise RecordError("values", _NOT_FINITE)
    return header


def decode_record(buffer: Buffer, key: str, *, verify: bool = True) -> tuple[RecordHeader, torch.Tensor]:
    """Reads a record; the tensor ``[tokens, width]`` of a raw one is a view of the buffer, not a copy.

    Args:
        buffer: the whole record; it must not change while the tensor lives.
        key: the key that it was found under.
        verify: check the payload's checksum and values; needless only for bytes that this process checked before.

    Raises:
        RecordError: anything about it is wrong.
    """
    if verify:
        check_record(buffer, key)
    header, _, payload = _parts(buffer, key)
    return header, unpack(header.encoding, payload, header.dtype, header.tokens, header.width)


@dataclass(frozen=True)
class _Checksum:
    """Of a payload, as its header states it."""

    version: int
    value: bytes

    def fits(self, payload: memoryview) -> bool:
        return bool(_CHECKSUMS[self.version](payload) == self.value)


def _parts(buffer: Buffer, key: str) -> tuple[RecordHeader, _Checksum, memoryview]:
    header, checksum = _read(buffer, key)
    payload = memoryview(buffer)[HEADER_BYTES:]
    if len(payload) != header.payload_bytes:
        raise RecordError("truncated", f"{len(payload)} payload bytes of {header.payload_bytes}")
    return header, checksum, payload


def _read(buffer: Buffer, key: str) -> tuple[RecordHeader, _Checksum]:
    head = bytes(memoryview(buffer)[:HEADER_BYTES])
    if len(head) < HEADER_BYTES:
        raise RecordError("truncated", f"{len(head)} bytes are no header")
    magic, version, dtype, encoding, tokens, width, t, h, w, merge, reserved, size, key_hash, checksum = _FIELDS.unpack(
        head[: _FIELDS.size]
    )
    if magic != MAGIC:
        raise RecordError("magic", "not a record of lookonce")
    if version not in _CHECKSUMS:
        raise RecordError("version", f"version {version} is not known here")
    seal = blake3(head[: _FIELDS.size]).digest(_CHECKSUM_BYTES)
    rest = head[_FIELDS.size :]
    if rest != seal.ljust(HEADER_BYTES - _FIELDS.size, b"\0") or reserved:
        raise RecordError("header", "the header's checksum does not match")
    if key_hash != blake3(key.encode()).digest():
        raise RecordError("key", "the record belongs to another key")
    if dtype not in DTYPES or encoding not in _ENCODINGS or t != 1:
        raise RecordError("header", f"dtype {dtype}, encoding {encoding}, {t} frames: not known here")
    header = RecordHeader(DTYPES[dtype], Encoding(encoding), tokens, width, Grid(h, w), merge, size)
    _check_shape(header)
    return header, _Checksum(version, checksum)


def _check_shape(header: RecordHeader) -> None:
    grid, merge = header.grid, header.merge
    if not (
        1 <= header.tokens <= MAX_TOKENS
        and 1 <= header.width <= MAX_WIDTH
        and all(1 <= side <= MAX_SIDE for side in grid)
        and 1 <= merge <= MAX_MERGE
        and not grid.height % merge
        and not grid.width % merge
        and header.tokens == grid.patches // merge**2
        and header.payload_bytes == payload_bytes(header.encoding, header.dtype, header.tokens, header.width)
    ):
        raise RecordError(
            "shape",
            f"[{header.tokens}, {header.width}] in {header.payload_bytes} bytes does not fit the patch grid "
            f"{grid.height}x{grid.width} with merge {merge}",
        )
