"""Digests and keys: what must differ does, and tenants never meet."""

from __future__ import annotations

import numpy as np
import pytest

from shared.keys import Namespace, alias_key, bytes_digest, image_digest, lease_key, wake_channel


def test_equal_bytes_of_another_shape_have_another_digest() -> None:
    pixels = np.arange(30 * 150 * 3, dtype=np.uint32).astype(np.uint8)
    assert image_digest(pixels.reshape(30, 150, 3)) != image_digest(pixels.reshape(150, 30, 3))


def test_a_picture_and_a_file_of_the_same_bytes_differ() -> None:
    pixels = np.zeros((4, 4, 3), dtype=np.uint8)
    assert image_digest(pixels) != bytes_digest(pixels.tobytes())


def test_memory_layout_does_not_matter() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    assert image_digest(np.asfortranarray(pixels)) == image_digest(pixels)
    assert image_digest(pixels[:, ::-1][:, ::-1]) == image_digest(pixels)


def test_one_bit_changes_the_digest() -> None:
    pixels = np.zeros((8, 8, 3), dtype=np.uint8)
    other = pixels.copy()
    other[7, 7, 2] = 1
    assert image_digest(pixels) != image_digest(other)


@pytest.mark.parametrize(
    "digest", [lambda s: bytes_digest(b"x", s), lambda s: image_digest(np.zeros((1, 1, 3), np.uint8), s)]
)
def test_tenants_have_digests_of_their_own(digest: object) -> None:
    values = [digest(salt) for salt in (None, "a", "b", "ab")]  # type: ignore[operator]
    assert len(set(values)) == 4
    assert digest("a") == values[1]  # type: ignore[operator]
    assert digest("") == values[0]  # type: ignore[operator]
    assert all(len(value) == 64 for value in values)


def test_keys_hold_everything_that_tells_embeddings_apart() -> None:
    digest = "d" * 64
    names = [("m", "t", "p"), ("n", "t", "p"), ("m", "u", "p"), ("m", "t", "q")]
    keys = {Namespace(*name).embedding_key(digest) for name in names}
    assert len(keys) == 4
    key = Namespace("m", "t", "p").embedding_key(digest)
    assert key == f"lookonce:emb:m:t:p:{digest}"
    assert len({key, lease_key(key), wake_channel(key), alias_key(digest)}) == 4


def test_other_arrays_than_pictures_are_refused() -> None:
    for array in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8), np.zeros((4, 4, 3), np.float32)):
        with pytest.raises(ValueError, match="uint8"):
            image_digest(array)
