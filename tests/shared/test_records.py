"""Records: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import records
from shared.record_values import Encoding
from shared.records import HEADER_BYTES, RecordError, decode_record, encode_record, read_header
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
