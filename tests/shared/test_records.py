"""The record format: exact round trips, and nothing but exact ones."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.records import DTYPES, HEADER_BYTES, RecordError, decode_record, encode_record, read_header
from shared.sizing import Grid

KEY = "lookonce:emb:m:t:p:" + "a" * 64


def embedding(rows: int, columns: int, merge: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows * columns // merge**2, width, generator=generator).to(dtype)


def a_record(dtype: torch.dtype = torch.float32) -> tuple[bytes, torch.Tensor]:
    tensor = embedding(4, 6, 2, 16, dtype)
    return encode_record(KEY, tensor, Grid(4, 6), 2), tensor


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    merge=st.integers(1, 4),
    width=st.integers(1, 70),
    dtype=st.sampled_from(list(DTYPES.values())),
    seed=st.integers(0, 1000),
)
def test_round_trip(rows: int, columns: int, merge: int, width: int, dtype: torch.dtype, seed: int) -> None:
    grid = Grid(rows * merge, columns * merge)
    tensor = embedding(*grid, merge, width, dtype, seed)
    record = encode_record(KEY, tensor, grid, merge)
    header, decoded = decode_record(record, KEY)
    assert torch.equal(decoded, tensor)
    assert decoded.dtype == dtype
    assert (header.grid, header.merge, header.tokens, header.width) == (grid, merge, rows * columns, width)
    assert read_header(record[:HEADER_BYTES], KEY) == header


def test_decoding_copies_nothing_and_the_payload_is_aligned() -> None:
    record, _ = a_record()
    _, tensor = decode_record(record, KEY)
    begin = np.frombuffer(record, dtype=np.uint8).ctypes.data
    assert tensor.data_ptr() == begin + HEADER_BYTES
    assert HEADER_BYTES % 64 == 0


def test_a_strided_embedding_is_stored_by_value() -> None:
    tensor = torch.randn(16, 6).T
    record = encode_record(KEY, tensor, Grid(2, 3), 1)
    assert torch.equal(decode_record(record, KEY)[1], tensor)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    tensor = torch.zeros(6, 16)
    tensor[3, 5] = value
    with pytest.raises(RecordError, match="values"):
        encode_record(KEY, tensor, Grid(4, 6), 2)


@pytest.mark.parametrize(
    ("grid", "merge"), [((4, 4), 2), ((3, 8), 2), ((0, 6), 1), ((-4, -6), 2), ((1 << 20, 6), 2), ((4, 6), 0)]
)
def test_a_shape_that_does_not_fit_the_grid_is_refused(grid: tuple[int, int], merge: int) -> None:
    with pytest.raises((RecordError, ZeroDivisionError, Exception)):
        encode_record(KEY, torch.zeros(6, 16), Grid(*grid), merge)


def test_another_keys_record_is_refused() -> None:
    record, _ = a_record()
    with pytest.raises(RecordError, match="key"):
        decode_record(record, KEY[:-1] + "b")


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, -1])
def test_a_record_of_another_length_is_refused(length: int) -> None:
    record, _ = a_record()
    cut = record[:length] if length >= 0 else record + b"\0"
    with pytest.raises(RecordError):
        decode_record(cut, KEY)


def test_a_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {tmp_path}/owned",)

    with pytest.raises(RecordError):
        decode_record(pickle.dumps(Attack()).ljust(500, b"\0"), KEY)
    assert not (tmp_path / "owned").exists()


def mutations(number: int) -> int:
    """Mutates records in many ways; returns how many were accepted although their bytes had changed."""
    rng = np.random.default_rng(number)
    records = [a_record(dtype) for dtype in DTYPES.values()]
    accepted = 0
    for _ in range(number):
        record, tensor = records[rng.integers(len(records))]
        changed = bytearray(record)
        kind = rng.integers(4)
        if kind == 0:
            place = rng.integers(len(changed))
            changed[place] ^= 1 << rng.integers(8)
        elif kind == 1:
            del changed[rng.integers(len(changed)) :]
        elif kind == 2:
            begin = rng.integers(len(changed))
            size = int(rng.integers(1, 40))
            changed[begin : begin + size] = rng.integers(0, 256, size, dtype=np.uint8).tobytes()
        else:
            other = records[rng.integers(len(records))][0]
            place = rng.integers(min(len(record), len(other)))
            changed = bytearray(record[:place] + other[place:])
        try:
            _, decoded = decode_record(bytes(changed), KEY)
        except RecordError:
            continue
        if bytes(changed) != record and bytes(changed) not in {r for r, _ in records}:
            accepted += 1
        elif bytes(changed) == record:
            assert torch.equal(decoded, tensor)
    return accepted


def test_mutated_records_are_never_accepted() -> None:
    assert mutations(5_000) == 0


@pytest.mark.slow
def test_a_hundred_thousand_mutated_records_are_never_accepted() -> None:
    assert mutations(100_000) == 0
