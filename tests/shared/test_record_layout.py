"""The layout of records to the byte, in every version, and records whose writer was faulty or hostile."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from xxhash import xxh3_128_digest

from shared import records
from shared.record_values import Encoding
from shared.records import HEADER_BYTES, RecordError, check_record, decode_record, encode_record, read_header
from shared.sizing import Grid
from tests.shared.redis_kit import embedding, key, record

KEY = key("record")


def _forged(payload: bytes = b"", **changes: int) -> bytes:
    """A record whose checksums are right and whose fields are not: what a faulty writer would leave."""
    names = ("version", "dtype", "encoding", "tokens", "width", "t", "h", "w", "merge", "reserved", "size")
    fields = dict(zip(names, (records.VERSION, 0, 0, 4, 8, 1, 2, 2, 1, 0, 128), strict=True)) | changes
    payload = payload or bytes(128)
    checksum = blake3(payload).digest(16) if fields["version"] == 1 else xxh3_128_digest(payload)
    packed = records._FIELDS.pack(records.MAGIC, *fields.values(), blake3(KEY.encode()).digest(), checksum)
    return (packed + blake3(packed).digest(16)).ljust(HEADER_BYTES, b"\0") + payload


@pytest.mark.parametrize("version", [1, 2])
def test_a_forged_record_is_read_when_it_is_right(version: int) -> None:
    """C12: every version that was ever written."""
    payload = embedding("old").numpy().tobytes()
    header, values = decode_record(_forged(payload, version=version), KEY)
    assert header.tokens == 4
    assert torch.equal(values, embedding("old"))


@pytest.mark.parametrize("version", [1, 2])
def test_no_version_takes_the_other_ones_checksum(version: int) -> None:
    other = bytearray(_forged(version=3 - version))
    other[8:10] = struct.pack("<H", version)
    other[96:112] = blake3(bytes(other[:96])).digest(16)
    with pytest.raises(RecordError, match="payload"):
        decode_record(other, KEY)


@pytest.mark.parametrize("version", [1, 2])
def test_every_flipped_bit_of_a_payload_is_seen_in_every_version(version: int) -> None:
    good = _forged(version=version)
    for bit in range(8 * 128):
        hurt = bytearray(good)
        hurt[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordError, match="payload"):
            decode_record(hurt, KEY)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 3}, "version"),
        ({"version": 0}, "version"),
        ({"dtype": 3}, "header"),
        ({"dtype": 1}, "shape"),
        ({"encoding": 3}, "header"),
        ({"encoding": 1}, "shape"),
        ({"encoding": 2}, "shape"),
        ({"reserved": 1}, "header"),
        ({"t": 2}, "header"),
        ({"t": 0}, "header"),
        ({"tokens": 0}, "shape"),
        ({"tokens": 0xFFFFFFFF}, "shape"),
        ({"tokens": 5}, "shape"),
        ({"width": 0}, "shape"),
        ({"width": 16}, "shape"),
        ({"width": 0xFFFFFFFF}, "shape"),
        ({"h": 0}, "shape"),
        ({"h": 0xFFFFFFFF, "w": 0xFFFFFFFF}, "shape"),
        ({"h": 4}, "shape"),
        ({"merge": 0}, "shape"),
        ({"merge": 2}, "shape"),
        ({"merge": 0xFFFFFFFF}, "shape"),
        ({"size": 127}, "shape"),
        ({"size": 0}, "shape"),
        ({"size": 1 << 60}, "shape"),
        ({"tokens": 1 << 20, "width": 1 << 16, "h": 1 << 10, "w": 1 << 10, "size": 1 << 38}, "truncated"),
    ],
)
def test_fields_are_not_trusted_because_their_checksum_is_right(changes: dict[str, int], reason: str) -> None:
    """R10: wrong width, dtype, version, grid; nothing is allocated for what a header claims."""
    with pytest.raises(RecordError) as caught:
        decode_record(_forged(**changes), KEY)
    assert caught.value.reason == reason


@pytest.mark.parametrize("encoding", (Encoding.INT8, Encoding.FP8))
def test_bytes_that_mean_no_number_are_refused(encoding: Encoding) -> None:
    """R10: scales that are NaN, infinite, negative or too large for the dtype, and fp8's own NaN; checksums right."""
    good = np.zeros(96, np.uint8)
    assert check_record(_forged(good.tobytes(), encoding=encoding, size=96), KEY).encoding is encoding
    scales = [float("nan"), float("inf"), -1.0, 3e38]
    for scale in scales:
        bad = good.copy()
        bad[4:8] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
        with pytest.raises(RecordError, match="values"):
            decode_record(_forged(bad.tobytes(), encoding=encoding, size=96), KEY)
    for byte in (0x7F, 0xFF):
        bad = good.copy()
        bad[70] = byte
        forged = _forged(bad.tobytes(), encoding=encoding, size=96)
        if encoding is Encoding.FP8:
            with pytest.raises(RecordError, match="values"):
                decode_record(forged, KEY)
        else:
            assert torch.isfinite(decode_record(forged, KEY)[1]).all()


def test_a_record_of_nan_is_not_used() -> None:
    """R10."""
    payload = np.full(32, np.nan, np.float32).tobytes()
    with pytest.raises(RecordError, match="values"):
        decode_record(_forged(payload), KEY)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickles_are_never_evaluated(tmp_path: Path) -> None:
    """R8: as the whole value, as the payload, and as torch saves them."""
    mark = tmp_path / "executed"
    bomb = pickle.dumps(_Bomb(mark))
    saved = io.BytesIO()
    torch.save({"embedding": _Bomb(mark)}, saved)
    for data in (bomb, saved.getvalue(), records.MAGIC + bomb, record("bomb")[:HEADER_BYTES] + bomb):
        for read in (read_header, decode_record):
            if data.startswith(record("bomb")[:HEADER_BYTES]) and read is read_header:
                continue
            with pytest.raises(RecordError):
                read(data, key("bomb"))
    assert not mark.exists()
    pickle.loads(bomb)  # noqa: S301
    assert mark.exists()  # the bomb was live


def test_the_layout_is_pinned() -> None:
    """``docs/record-format.md``: another layout needs another version."""
    values = torch.arange(8, dtype=torch.float32).reshape(2, 4)
    encoded = encode_record("lookonce:emb:m:t:p:d", values, Grid(2, 4), 2)
    assert encoded[:8] == b"LOOKONCE"
    assert struct.unpack_from("<HBBIIIIIIIQ", encoded, 8) == (2, 0, 0, 2, 4, 1, 2, 4, 2, 0, 32)
    assert encoded[48:80] == blake3(b"lookonce:emb:m:t:p:d").digest()
    assert encoded[80:96] == xxh3_128_digest(values.numpy().tobytes())
    assert encoded[96:112] == blake3(encoded[:96]).digest(16)
    assert encoded[112:128] == bytes(16)
    assert encoded[128:] == values.numpy().tobytes()


def test_the_layout_of_bytes_is_pinned() -> None:
    values = torch.tensor([[127.0, -64.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    int8 = encode_record("lookonce:emb:m:t:p:d", values, Grid(1, 2), 1, Encoding.INT8)
    assert struct.unpack_from("<HBBIIIIIIIQ", int8, 8) == (2, 0, 1, 2, 4, 1, 1, 2, 1, 0, 72)
    assert int8[128:] == struct.pack("<ff", 1, 0).ljust(64, b"\0") + struct.pack("8b", 127, -64, 0, 1, 0, 0, 0, 0)
    values = torch.tensor([[448.0, -56.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    fp8 = encode_record("lookonce:emb:m:t:p:d", values, Grid(1, 2), 1, Encoding.FP8)
    assert struct.unpack_from("<HBBIIIIIIIQ", fp8, 8) == (2, 0, 2, 2, 4, 1, 1, 2, 1, 0, 72)
    assert fp8[128:] == struct.pack("<ff", 1, 0).ljust(64, b"\0") + bytes([0x7E, 0xE6, 0, 0x30, 0, 0, 0, 0])
