"""Identities: what must differ does, what must be equal is, and tenants never meet."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import images
from shared.keys import (
    Namespace,
    alias_key,
    bytes_digest,
    image_digest,
    lease_key,
    open_alias,
    seal_alias,
    wake_channel,
)

TOWER, PREPROCESS, DIGEST = "a" * 64, "b" * 64, "c" * 64
SALTS = (None, "tenant a", "tenant b", "tenant a ")


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_same_bytes_in_another_shape_differ() -> None:
    """C1: 30×150 and 150×30 with identical bytes, in either order."""
    one = picture(30, 150)
    shapes = ((30, 150, 3), (150, 30, 3), (1, 4500, 3), (4500, 1, 3))
    digests = {image_digest(one.reshape(shape), None) for shape in shapes}
    assert len(digests) == 4
    assert image_digest(one, None) == image_digest(one.copy(), None)


def test_every_pixel_counts() -> None:
    one = picture(5, 7)
    before = image_digest(one, None)
    for place in itertools.product(range(5), range(7), range(3)):
        other = one.copy()
        other[place] ^= 1
        assert image_digest(other, None) != before


def test_memory_layout_does_not_count() -> None:
    one = picture(40, 60)
    wanted = image_digest(one, None)
    assert image_digest(np.asfortranarray(one), None) == wanted
    assert image_digest(np.repeat(one, 2, axis=1)[:, ::2], None) == wanted


def test_digests_are_pinned() -> None:
    """C12: entries outlive releases; who changes these must change a tag or a version."""
    one = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    assert image_digest(one, None) == "c8c9f00bcdccbaea6d21fdc5f47f784d29ee617afb75ccc2646c92ee532f6da3"
    assert image_digest(one, "tenant") == "b97c057bda6b8785e0bee775ccf27d6f01ab054d2d5d84203b93e75aca07f57f"
    assert bytes_digest(b"file", None) == "95845e480505e5b7b513c4ffd909e2b38724eedf141e1eed883e5b0b50863061"
    assert bytes_digest(b"file", "tenant") == "b97c057b98f886b1fd437845fbb0f641d84e93cd4f902dadc66a70c7a4809986"


def test_tenants_never_share_and_each_finds_its_own() -> None:
    """C18: a pair, the same tenant hits and another misses."""
    one = picture(8, 8)
    assert len({image_digest(one, salt) for salt in SALTS}) == len(SALTS)
    assert len({bytes_digest(b"file", salt) for salt in SALTS}) == len(SALTS)
    for salt in SALTS:
        assert image_digest(one, salt) == image_digest(one.copy(), salt)
        assert bytes_digest(b"file", salt) == bytes_digest(b"file", salt)
    assert image_digest(one, "") == image_digest(one, None)


def test_files_and_pictures_have_separate_digests() -> None:
    one = picture(2, 2)
    assert bytes_digest(one.tobytes(), None) != image_digest(one, None)


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_digests_of_files_are_whole_and_distinct(one: bytes, other: bytes) -> None:
    assert (bytes_digest(one, None) == bytes_digest(other, None)) == (one == other)
    assert len(bytes_digest(one, None)) == 64


@pytest.mark.parametrize(
    "wrong",
    [
        np.zeros((2, 2), np.uint8),
        np.zeros((2, 2, 4), np.uint8),
        np.zeros((1, 2, 2, 3), np.uint8),
        np.zeros((2, 2, 3), np.float32),
        np.zeros((2, 2, 3), np.int8),
    ],
)
def test_only_pictures_are_hashed(wrong: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8"):
        image_digest(wrong, None)


def test_form_of_keys() -> None:
    namespace = Namespace("org/model-1.0", TOWER, PREPROCESS)
    key = namespace.embedding_key(DIGEST)
    assert key == f"lookonce:emb:org/model-1.0:{TOWER}:{PREPROCESS}:{DIGEST}"
    names = [key, lease_key(key), wake_channel(key), alias_key(DIGEST)]
    assert len(set(names)) == 4
    assert all(name.startswith("lookonce:") and DIGEST in name for name in names)


def test_every_part_of_a_namespace_counts() -> None:
    """C12: another model, tower or preprocessing never hits."""
    parts = [("m", TOWER, PREPROCESS), ("n", TOWER, PREPROCESS), ("m", PREPROCESS, TOWER), ("m", TOWER, "d" * 64)]
    keys = [Namespace(*part).embedding_key(DIGEST) for part in parts]
    assert [Namespace.of(key) for key in keys] == [Namespace(*part) for part in parts]
    assert len({*keys, *map(lease_key, keys), *map(wake_channel, keys)}) == 12


@pytest.mark.parametrize(
    "parts",
    [
        ("a:b", TOWER, PREPROCESS),
        ("", TOWER, PREPROCESS),
        ("m", "", PREPROCESS),
        ("m", f"{TOWER}:{TOWER}", PREPROCESS),
        ("m", "a" * 31, PREPROCESS),
        ("m", TOWER, "b" * 16),
        ("m", TOWER.upper(), PREPROCESS),
        ("m", TOWER, f"{PREPROCESS}\n"),
    ],
)
def test_namespaces_that_could_collide_are_refused(parts: tuple[str, str, str]) -> None:
    """C3: no short fingerprints, and no part that reaches into the next."""
    with pytest.raises(ValueError, match=r"colon|hex digits"):
        Namespace(*parts)


@pytest.mark.parametrize("digest", ["", "c" * 63, "c" * 65, "C" * 64, "c" * 63 + ":", "c" * 63 + "*", "c" * 64 + "\n"])
def test_only_whole_digests_make_keys(digest: str) -> None:
    with pytest.raises(ValueError, match="64 hex"):
        Namespace("m", TOWER, PREPROCESS).embedding_key(digest)


def test_aliases_carry_the_rules_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: the same file under other rules of decoding is another picture."""
    before = alias_key(DIGEST)
    monkeypatch.setattr(images, "DECODE_VERSION", images.DECODE_VERSION + 1)
    assert alias_key(DIGEST) != before


def test_a_seal_fits_one_alias_and_one_digest() -> None:
    alias, value = alias_key(DIGEST), seal_alias(alias_key(DIGEST), TOWER)
    assert open_alias(alias, value) == TOWER
    assert open_alias(alias_key(PREPROCESS), value) is None
    assert open_alias(alias, value.replace(TOWER.encode(), PREPROCESS.encode())) is None
    for place in range(len(value)):
        for bit in range(8):
            wrong = bytearray(value)
            wrong[place] ^= 1 << bit
            assert open_alias(alias, bytes(wrong)) is None
    for wrong in (b"", TOWER.encode(), value[:-1], value + b"0", value.upper(), b"\xff" * 97):
        assert open_alias(alias, wrong) is None


@pytest.mark.parametrize("key", ["", "lookonce:emb:m", f"lookonce:alias:m:{TOWER}:{PREPROCESS}:{DIGEST}", f"{DIGEST}:"])
def test_other_keys_have_no_namespace(key: str) -> None:
    with pytest.raises(ValueError, match="not the key"):
        Namespace.of(key)
