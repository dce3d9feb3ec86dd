"""Decoding of what is damaged, hostile or no picture at all: our errors, at little cost."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from shared.config import ImageSettings
from shared.errors import BadImage, ImageTooLarge, RequestError
from shared.images import FORMATS, decode, probe
from tests.shared import picture_files as files

# Pillow warns of broken TIFFs and EXIF blocks
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LIMITS = ImageSettings()
RED = (254, 0, 0)
HEAP = re.compile(r"0x[0-9a-f]{6,}|object at|BytesIO|Traceback", re.IGNORECASE)


# what is not accepted

JUNK = {
    "nothing": (b"", "empty"),
    "SVG": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    "HTML": (b"\n<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), "HEIC"),
    "MP4": (b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + bytes(64), "video"),
    "PDF": (b"%PDF-1.7\n", "PDF"),
    "JSON": (b'{"error": "not found"}', "text"),
    "JPEG 2000": (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    "JPEG XL": (b"\xff\x0a" + bytes(20), "JPEG XL"),
    "ICO": (b"\0\0\1\0\1\0" + bytes(40), "ICO"),
    "PSD": (b"8BPS" + bytes(40), "Photoshop"),
    "ZIP": (b"PK\x03\x04" + bytes(40), "ZIP"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
    "PPM": (b"P6 1 1 255 \0\0\0", "not a picture"),
    "zeros": (bytes(100), "not a picture"),
    "noise": (bytes(range(1, 200)), "not a picture"),
}


@pytest.mark.parametrize("name", JUNK)
@pytest.mark.parametrize("read", [probe, decode])
def test_junk(read: Callable[[bytes, ImageSettings], object], name: str) -> None:
    data, word = JUNK[name]
    with pytest.raises(BadImage, match=word) as caught:
        read(data, LIMITS)
    for form in FORMATS:
        assert form in caught.value.message
    assert not HEAP.search(caught.value.message)


SIGNATURES = [
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"GIF89a",
    b"BM",
    b"II*\0",
    b"MM\0*",
    b"II+\0",
    b"RIFF\xff\0\0\0WEBP",
    b"RIFF\x16\0\0\0WEBPVP8X",
    b"\0\0\0\x18ftypavif\0\0\0\0avif",
]


@pytest.mark.parametrize("signature", SIGNATURES)
@pytest.mark.parametrize("tail", [b"", b"\0" * 64, b"\xff" * 64, bytes(range(64))])
def test_signature_and_nothing_else(signature: bytes, tail: bytes) -> None:
    for read in (probe, decode):
        with pytest.raises((BadImage, ImageTooLarge)) as caught:
            read(signature + tail, LIMITS)
        assert not HEAP.search(caught.value.message)


@given(st.sampled_from(SIGNATURES), st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_our_errors(signature: bytes, tail: bytes) -> None:
    for read in (probe, decode):
        try:
            read(signature + tail, LIMITS)
        except RequestError as error:
            assert not HEAP.search(error.message)


# damage


def _photo() -> Image.Image:
    rng = np.random.default_rng(3)
    return Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(
        (160, 120), Image.Resampling.BICUBIC
    )


WHOLE = {
    "baseline JPEG": lambda: files.save(_photo(), "JPEG"),
    "progressive JPEG": lambda: files.save(_photo(), "JPEG", progressive=True),
    "PNG": lambda: files.save(_photo(), "PNG"),
    "WEBP": lambda: files.save(_photo(), "WEBP"),
    "lossless WEBP": lambda: files.save(_photo(), "WEBP", lossless=True),
    "GIF": lambda: files.save(_photo(), "GIF"),
    "BMP": lambda: files.save(_photo(), "BMP"),
    "TIFF": lambda: files.save(_photo(), "TIFF", compression="tiff_lzw"),
    "AVIF": lambda: files.save(_photo(), "AVIF"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_truncation(name: str) -> None:
    """Cut at every 1/16, and 128 bytes before the end."""
    data = WHOLE[name]()
    decode(data, LIMITS)
    for length in [*(len(data) * part // 16 for part in range(1, 16)), len(data) - 128]:
        with pytest.raises(BadImage) as caught:
            decode(data[:length], LIMITS)
        assert not HEAP.search(caught.value.message), length


@pytest.mark.parametrize("name", WHOLE)
def test_flipped_bits_never_escape(name: str) -> None:
    data = WHOLE[name]()
    rng = np.random.default_rng(4)
    for _ in range(60):
        hurt = bytearray(data)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            hurt[at] ^= 1 << int(rng.integers(8))
        try:
            assert decode(bytes(hurt), LIMITS).dtype == np.uint8
        except RequestError as error:
            assert not HEAP.search(error.message)


def test_every_flipped_bit_of_a_png_is_seen() -> None:
    """Checksums cover the pixels; Pillow does not look at those of IDAT."""
    data = files.save(_photo(), "PNG")
    rng = np.random.default_rng(5)
    for at in rng.integers(8, len(data) - 12, 200):
        hurt = bytearray(data)
        hurt[at] ^= 1 << int(rng.integers(8))
        with pytest.raises((BadImage, ImageTooLarge)):
            decode(bytes(hurt), LIMITS)


def test_bytes_behind_the_end_do_not_matter() -> None:
    for form in ("PNG", "JPEG", "GIF", "BMP", "WEBP"):
        data = files.save(Image.fromarray(files.patches()), form)
        assert np.array_equal(decode(data + b"trailer" * 99, LIMITS), decode(data, LIMITS))


# limits


def test_limit_of_bytes() -> None:
    data = files.save(_photo(), "PNG")
    probe(data, ImageSettings(max_bytes=len(data)))
    with pytest.raises(ImageTooLarge, match=str(len(data))):
        probe(data, ImageSettings(max_bytes=len(data) - 1))


@pytest.mark.parametrize("form", FORMATS)
def test_limit_of_pixels(form: str) -> None:
    data = files.save(_photo(), form)
    assert probe(data, ImageSettings(max_pixels=160 * 120)).width == 160
    for read in (probe, decode):
        with pytest.raises(ImageTooLarge, match="160×120"):
            read(data, ImageSettings(max_pixels=160 * 120 - 1))


def test_large_tiles_are_refused() -> None:
    """A small TIFF may declare tiles of any size, each taken whole in memory."""
    tags = [(256, 64), (257, 64), (258, 8), (259, 8), (262, 1), (277, 1), (322, 1 << 20), (323, 1 << 10)]
    tags += [(324, 200), (325, 9)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    data = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(200)
    with pytest.raises(ImageTooLarge, match=r"1048576×1024"):
        probe(data, LIMITS)


def test_countless_scans_are_refused() -> None:
    data = files.save(_photo(), "JPEG", progressive=True)
    at = data.rindex(b"\xff\xda")
    with pytest.raises(BadImage, match="scans"):
        probe(data[:-2] + data[at:-2] * 300 + data[-2:], LIMITS)


def test_countless_chunks_are_refused() -> None:
    data = files.save(_photo(), "PNG")
    begin = time.process_time()
    with pytest.raises(BadImage, match="chunks"):
        probe(data[:33] + files.chunk(b"prVt") * 200_000 + data[33:], LIMITS)
    assert time.process_time() - begin < 0.3


BOMBS = """
import resource, sys, time
from shared.config import ImageSettings
from shared.errors import ImageTooLarge
from shared.images import decode, probe
from tests.shared import picture_files as files
bomb = {"png": files.bomb_png, "webp": files.webp_claiming}[sys.argv[1]](int(sys.argv[2]))
small = files.save(files.Image.new("RGB", (8, 8)), sys.argv[1])
decode(small, ImageSettings())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for read in (probe, decode):
    begin = time.process_time()
    try:
        read(bomb, ImageSettings())
        sys.exit("not refused")
    except ImageTooLarge:
        spent = time.process_time() - begin
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(len(bomb), round(spent * 1e3, 2), grown)
    if spent > 0.1 or grown > 50:
        sys.exit(f"{spent:.3f} s, {grown:.0f} MB")
"""


@pytest.mark.parametrize(("form", "side"), [("png", 20_000), ("png", 13_000), ("webp", 16_384)])
def test_bombs_are_refused_from_the_header(form: str, side: int) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", BOMBS, form, str(side)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_large_pictures_pass_where_limits_allow_them() -> None:
    """Pillow warns above 89 and refuses above 179 megapixels; our limit decides, without touching Pillow's."""
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        header = probe(files.bomb_png(13_500), ImageSettings(max_pixels=1 << 30))
    assert (header.width, header.height) == (13_500, 13_500)
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


def test_threads_do_not_disturb_each_other() -> None:
    data = {form: files.save(_photo(), form) for form in FORMATS}
    wanted = {form: decode(file, LIMITS) for form, file in data.items()}
    wrong: list[str] = []

    def work() -> None:
        for form, file in data.items():
            for _ in range(5):
                if not np.array_equal(decode(file, LIMITS), wanted[form]):
                    wrong.append(form)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("count", [1001, 10_000, 2_000_000])
def test_many_frames_are_cheap(count: int) -> None:
    data = files.gif_of_frames(count)
    begin = time.process_time()
    with pytest.raises(ImageTooLarge, match="more than 1000 frames"):
        probe(data, LIMITS)
    assert time.process_time() - begin < 0.2


def test_most_frames_allowed() -> None:
    assert decode(files.gif_of_frames(1000), LIMITS).shape == (1, 1, 3)


@pytest.mark.parametrize("name", files.costly_files())
def test_costly_files_are_refused_at_once(name: str) -> None:
    data = files.costly_files()[name]
    for read in (probe, decode):
        begin = time.process_time()
        with pytest.raises(BadImage, match=r"too many|too large"):
            read(data, LIMITS)
        assert time.process_time() - begin < 0.3


def test_small_run_length_coding_is_read() -> None:
    runs = b"\x08\x01\0\0" * 8 + b"\0\1"
    head = struct.pack("<IHHI", 62 + len(runs), 0, 0, 62)
    head += struct.pack("<IiiHHIIiiII", 40, 8, 8, 1, 8, 1, len(runs), 0, 0, 2, 0)
    pixels = decode(b"BM" + head + b"\0\0\0\0" + b"\x40\x20\x10\0" + runs, LIMITS)
    assert pixels[0, 0].tolist() == [16, 32, 64]
