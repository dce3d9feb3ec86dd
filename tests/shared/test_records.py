"""Records: what goes in comes out, and nothing else ever does."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from shared import records
from shared.record_values import Encoding
from shared.records import HEADER_BYTES, RecordError, check_record, decode_record, encode_record, read_header
from shared.sizing import Grid
from tests.shared.redis_kit import embedding, key, record

BYTES = (Encoding.INT8, Encoding.FP8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KEY = key("record")


@st.composite
def embeddings(draw: st.DrawFn) -> tuple[torch.Tensor, Grid, int]:
    """Any shape that a tower could give, any finite bits."""
    merge = draw(st.sampled_from([1, 2, 3, 4]))
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    width = draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 1 << 30))
    scale = draw(st.sampled_from([0.0, 1e-30, 1.0, 6e4]))
    values = torch.randn(rows * columns, width, generator=torch.Generator().manual_seed(seed)) * scale
    return values.clamp(-6e4, 6e4).to(dtype), Grid(rows * merge, columns * merge), merge


@given(embeddings())
def test_round_trip_to_the_bit(made: tuple[torch.Tensor, Grid, int]) -> None:
    values, grid, merge = made
    encoded = encode_record(KEY, values, grid, merge)
    header, found = decode_record(encoded, KEY)
    assert (header.tokens, header.width, header.dtype) == (*values.shape, values.dtype)
    assert (header.grid, header.merge) == (grid, merge)
    assert torch.equal(found.view(torch.uint8), values.contiguous().view(torch.uint8))
    assert read_header(encoded[:HEADER_BYTES], KEY) == header
    assert encode_record(KEY, values, grid, merge) == encoded


def test_extreme_but_finite_values_are_kept() -> None:
    """The ends of the range, and its smallest numbers."""
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        for value in (info.max, info.min, info.smallest_normal, info.smallest_normal / 2, -0.0):
            values = torch.full((4, 8), value, dtype=dtype)
            _, found = decode_record(encode_record(KEY, values, Grid(2, 2), 1), KEY)
            assert torch.equal(found, values)


@given(embeddings(), st.sampled_from(BYTES))
def test_a_byte_a_value_keeps_its_promise(made: tuple[torch.Tensor, Grid, int], encoding: Encoding) -> None:
    """Half a step of the token's scale for int8, a sixteenth of the value for fp8, and the dtype's own rounding."""
    values, grid, merge = made
    encoded = encode_record(KEY, values, grid, merge, encoding)
    header, found = decode_record(encoded, KEY)
    assert (header.dtype, header.encoding, found.dtype, found.shape) == (
        values.dtype,
        encoding,
        values.dtype,
        values.shape,
    )
    tokens, width = values.shape
    assert len(encoded) == HEADER_BYTES + -(-tokens * 4 // 64) * 64 + tokens * width
    exact, rounding = values.double(), torch.finfo(values.dtype).eps
    largest = exact.abs().amax(1, keepdim=True)
    off = (found.double() - exact).abs() - exact.abs() * rounding
    bound = largest / 254 if encoding is Encoding.INT8 else exact.abs() / 16 + largest / 448 * 2**-10
    tiny = 4 * torch.finfo(torch.float32 if values.dtype is torch.bfloat16 else values.dtype).smallest_normal
    assert bool((off <= bound * 1.01 + tiny).all())


def test_a_byte_a_value_holds_the_whole_range() -> None:
    for dtype in DTYPES:
        for encoding in BYTES:
            values = torch.tensor([[torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0, 1.0]]).to(dtype)
            _, found = decode_record(encode_record(KEY, values, Grid(1, 1), 1, encoding), KEY)
            assert torch.isfinite(found).all()
            assert torch.allclose(found.double()[0, :2], values.double()[0, :2], rtol=2**-7)
            zeros = torch.zeros(3, 8, dtype=dtype)
            assert torch.equal(decode_record(encode_record(KEY, zeros, Grid(1, 3), 1, encoding), KEY)[1], zeros)


def test_a_byte_a_value_takes_half_of_bfloat16() -> None:
    values = torch.randn(256, 1152).bfloat16()
    raw, *packed = (encode_record(KEY, values, Grid(16, 16), 1, encoding) for encoding in Encoding)
    assert all(len(one) <= 0.51 * len(raw) for one in packed)


@pytest.mark.parametrize("encoding", BYTES)
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


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_the_tensor_is_a_view(make: Any) -> None:
    buffer = make(record("view"))
    _, values = decode_record(buffer, key("view"))
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    assert values.data_ptr() == start + HEADER_BYTES
    assert not HEADER_BYTES % 64


def test_tensors_outlive_the_name_of_their_buffer() -> None:
    _, values = decode_record(record("kept"), key("kept"))
    assert torch.equal(values, embedding("kept"))


def test_strided_embeddings() -> None:
    wide = torch.rand(8, 8)
    for values in (wide.t(), wide[:, ::2], wide[::2]):
        grid = Grid(1, len(values))
        assert torch.equal(decode_record(encode_record(KEY, values, grid, 1), KEY)[1], values)


def test_embeddings_that_ask_for_gradients() -> None:
    values = torch.rand(4, 8, requires_grad=True)
    assert torch.equal(decode_record(encode_record(KEY, values, Grid(2, 2), 1), KEY)[1], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_never_stored(dtype: torch.dtype, poison: float) -> None:
    """V1: one bad value anywhere."""
    for place in (0, 17, 31):
        values = torch.ones(4, 8, dtype=dtype)
        values.view(-1)[place] = poison
        with pytest.raises(RecordError, match="values"):
            encode_record(KEY, values, Grid(2, 2), 1)


def test_opposite_infinities_do_not_hide_each_other() -> None:
    values = torch.zeros(4, 8)
    values[0, 0], values[1, 1] = float("inf"), float("-inf")
    with pytest.raises(RecordError, match="values"):
        encode_record(KEY, values, Grid(2, 2), 1)


@pytest.mark.parametrize(
    ("values", "grid", "merge"),
    [
        (torch.zeros(4, 8), Grid(2, 3), 1),
        (torch.zeros(4, 8), Grid(4, 4), 1),
        (torch.zeros(4, 8), Grid(3, 5), 2),
        (torch.zeros(0, 8), Grid(0, 0), 1),
        (torch.zeros(4, 0), Grid(2, 2), 1),
        (torch.zeros(4), Grid(2, 2), 1),
        (torch.zeros(1, 4, 8), Grid(2, 2), 1),
        (torch.zeros(4, 8, dtype=torch.float64), Grid(2, 2), 1),
        (torch.zeros(4, 8, dtype=torch.int32), Grid(2, 2), 1),
        (torch.zeros(4, 8), Grid(-2, -2), 1),
        (torch.zeros(4, 8), Grid(2, 2), 0),
        (torch.zeros(4, 8), Grid(1, 1 << 17), 1),
    ],
)
def test_shapes_that_do_not_fit_are_refused(values: torch.Tensor, grid: Grid, merge: int) -> None:
    with pytest.raises(RecordError, match="shape"):
        encode_record(KEY, values, grid, merge)


def test_a_record_is_good_for_its_key_alone() -> None:
    """C3: any other key, down to the last character."""
    encoded = record("mine")
    for other in (key("yours"), key("mine")[:-1], key("mine") + "0", key("mine").upper(), ""):
        for read in (read_header, decode_record):
            with pytest.raises(RecordError) as caught:
                read(encoded, other)
            assert caught.value.reason == "key"


def test_every_flipped_bit_is_seen() -> None:
    encoded = record("flip", tokens=1, width=4)
    for place in range(len(encoded)):
        for bit in range(8):
            hurt = bytearray(encoded)
            hurt[place] ^= 1 << bit
            with pytest.raises(RecordError):
                decode_record(hurt, key("flip"))
            if place < HEADER_BYTES:
                with pytest.raises(RecordError):
                    read_header(hurt[:HEADER_BYTES], key("flip"))


def test_every_length_but_the_right_one_is_seen() -> None:
    encoded = record("cut", tokens=1, width=4)
    for length in range(len(encoded)):
        with pytest.raises(RecordError):
            decode_record(encoded[:length], key("cut"))
    for more in (b"\0", b"\0" * 64, encoded):
        with pytest.raises(RecordError, match="truncated"):
            decode_record(encoded + more, key("cut"))


def _mutated(encoded: bytes, other: bytes, rng: np.random.Generator) -> bytes:
    """One or more hurts of the kinds that storage, networks and people cause."""
    hurt = bytearray(encoded)
    for _ in range(int(rng.integers(1, 4))):
        size = max(len(hurt), 1)
        at, length = int(rng.integers(size)), int(rng.integers(1, 64))
        kind = int(rng.integers(9))
        if kind == 0:
            hurt[at : at + 1] = bytes([int(rng.integers(256))])
        elif kind == 1:
            hurt[at : at + length] = rng.bytes(length)
        elif kind == 2:
            hurt[at : at + length] = bytes(len(hurt[at : at + length]))
        elif kind == 3:
            del hurt[at : at + length]
        elif kind == 4:
            hurt[at:at] = rng.bytes(length)
        elif kind == 5:
            del hurt[at:]
        elif kind == 6:
            hurt[at : at + length] = other[at : at + length]
        elif kind == 7:
            to = int(rng.integers(size))
            hurt[to : to + length] = hurt[at : at + length]
        else:  # a number field takes a telling value
            field = 8 + 4 * int(rng.integers(9))
            hurt[field : field + 4] = struct.pack("<I", int(rng.choice([0, 1, 2, 0x7FFFFFFF, 0xFFFFFFFF])))
    return bytes(hurt)


def _mutate(count: int) -> None:
    rng = np.random.default_rng(8)
    done = 0
    pairs = [
        (f"{name}{encoding}", record(f"{name}{encoding}", tokens, width, encoding))
        for name, tokens, width in (("a", 1, 4), ("b", 4, 8), ("c", 16, 33))
        for encoding in Encoding
    ]
    while done < count:
        name, encoded = pairs[done % len(pairs)]
        hurt = _mutated(encoded, pairs[(done + 1) % len(pairs)][1], rng)
        if hurt == encoded:
            continue
        done += 1
        with pytest.raises(RecordError):
            decode_record(hurt, key(name))
        if hurt[:HEADER_BYTES] != encoded[:HEADER_BYTES]:
            with pytest.raises(RecordError):
                read_header(hurt[:HEADER_BYTES], key(name))


def test_4000_mutations_give_no_tensor() -> None:
    _mutate(4000)


@pytest.mark.slow
def test_100000_mutations_give_no_tensor() -> None:
    _mutate(100_000)


@given(st.binary(max_size=400))
@settings(max_examples=300)
def test_any_bytes_are_an_error_and_nothing_else(data: bytes) -> None:
    for read in (read_header, decode_record):
        with pytest.raises(RecordError):
            read(data, KEY)
        with pytest.raises(RecordError):
            read(records.MAGIC + b"\1\0\0\0" + data, KEY)


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
