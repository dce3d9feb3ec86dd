"""Decoding: the rules of `shared.images`, for every format."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from shared.config import ImageSettings
from shared.errors import BadImage, ImageTooLarge
from shared.images import FORMATS, decode, probe
from tests.shared import picture_files as files

# Pillow warns of broken TIFFs and EXIF blocks
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LIMITS = ImageSettings()
RED = (254, 0, 0)
HEAP = re.compile(r"0x[0-9a-f]{6,}|object at|BytesIO|Traceback", re.IGNORECASE)


def mean(data: bytes) -> list[float]:
    return [round(float(value)) for value in decode(data, LIMITS).reshape(-1, 3).mean(0)]


def assert_near(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found.astype(int) - wanted).mean() <= tolerance


# formats


@pytest.mark.parametrize("form", FORMATS)
def test_formats(form: str) -> None:
    wanted = files.patches()
    data = files.save(Image.fromarray(wanted), form, **({"quality": 95} if form in ("JPEG", "WEBP", "AVIF") else {}))
    header, pixels = probe(data, LIMITS), decode(data, LIMITS)
    assert (header.width, header.height, header.format) == (96, 64, form)
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    assert_near(pixels, wanted, 12 if form in ("JPEG", "WEBP", "AVIF") else 0)


@pytest.mark.parametrize("size", [(1, 1), (2, 2), (1, 100), (15, 15), (1, 3000), (3000, 1), (517, 1025)])
def test_sizes_and_bands(size: tuple[int, int]) -> None:
    wanted = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    assert np.array_equal(decode(files.save(Image.fromarray(wanted), "PNG"), LIMITS), wanted)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_orientation(form: str, orientation: int) -> None:
    wanted = files.patches()
    stored = np.ascontiguousarray(files.STORED[orientation](wanted))
    options = {"quality": 95} if form in ("JPEG", "AVIF") else {"lossless": True} if form == "WEBP" else {}
    data = files.save(Image.fromarray(stored), form, exif=files.exif(orientation), **options)
    header = probe(data, LIMITS)
    assert (header.width, header.height) == (96, 64)
    assert_near(decode(data, LIMITS), wanted, 12)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_in_several_bands(orientation: int) -> None:
    wanted = np.random.default_rng(2).integers(0, 256, (1100, 700, 3), dtype=np.uint8)
    stored = np.ascontiguousarray(files.STORED[orientation](wanted))
    data = files.save(Image.fromarray(stored), "PNG", exif=files.exif(orientation), compress_level=1)
    assert np.array_equal(decode(data, LIMITS), wanted)


def test_exif_behind_the_pixels_of_a_png() -> None:
    rows = b"".join(b"\0" + bytes(range(y * 4, y * 4 + 4)) for y in range(2))
    data = files.png(4, 2, 8, 0, rows, tail=files.chunk(b"eXIf", files.exif(6)[6:]))
    assert (probe(data, LIMITS).width, probe(data, LIMITS).height) == (2, 4)
    assert decode(data, LIMITS)[..., 0].tolist() == [[4, 0], [5, 1], [6, 2], [7, 3]]


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_orientations_that_do_not_exist(value: int) -> None:
    data = files.save(Image.fromarray(files.patches()), "PNG", exif=files.exif(value))
    assert decode(data, LIMITS).shape == (64, 96, 3)


@pytest.mark.parametrize(
    "block", [b"Exif\0\0", b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", files.exif(6)[:20]]
)
def test_broken_exif_does_not_cost_the_picture(block: bytes) -> None:
    data = files.save(Image.fromarray(files.patches()), "JPEG", exif=block)
    assert decode(data, LIMITS).shape == (64, 96, 3)
    assert (probe(data, LIMITS).width, probe(data, LIMITS).height) == (96, 64)


# colours


def _rgba(alpha: int) -> Image.Image:
    return Image.new("RGBA", (32, 16), (*RED, alpha))


def _palette(form: str, transparency: bytes | int) -> bytes:
    """Red of a palette whose second colour it is."""
    image = Image.new("P", (32, 16), 1)
    image.putpalette([0, 0, 255, 255, 0, 0, 0, 255, 0])
    return files.save(image, form, transparency=transparency)


def _grey16(step: int, form: str, order: str) -> bytes:
    ramp = (np.arange(256) * step).astype(order + "u2")[None].repeat(4, 0)
    if form == "PNG":
        return files.png(256, 4, 16, 0, b"".join(b"\0" + row.astype(">u2").tobytes() for row in ramp))
    mode = "I;16B" if order == ">" else "I;16"
    return files.save(Image.frombytes(mode, (256, 4), ramp.tobytes()), form)


WHITE = [255, 255, 255]
COLOURS: dict[str, tuple[Callable[[], bytes], list[int]]] = {
    "RGBA PNG, red hidden": (lambda: files.save(_rgba(0), "PNG"), WHITE),
    "RGBA PNG, half": (lambda: files.save(_rgba(128), "PNG"), [255, 127, 127]),
    "RGBA PNG, opaque": (lambda: files.save(_rgba(255), "PNG"), [254, 0, 0]),
    "RGBA WebP, red hidden": (lambda: files.save(_rgba(0), "WEBP", lossless=True, exact=True), WHITE),
    "RGBA TIFF, red hidden": (lambda: files.save(_rgba(0), "TIFF"), WHITE),
    "RGBA AVIF, red hidden": (lambda: files.save(_rgba(0), "AVIF"), WHITE),
    "LA PNG": (lambda: files.save(Image.new("LA", (8, 8), (10, 0)), "PNG"), WHITE),
    "LA PNG, half": (lambda: files.save(Image.new("LA", (8, 8), (0, 128)), "PNG"), [127, 127, 127]),
    "palette tRNS of bytes": (lambda: _palette("PNG", bytes([255, 0, 255])), WHITE),
    "palette tRNS, half": (lambda: _palette("PNG", bytes([255, 128])), [255, 127, 127]),
    "palette tRNS of one index": (lambda: _palette("PNG", 1), WHITE),
    "palette tRNS of another index": (lambda: _palette("PNG", 0), [255, 0, 0]),
    "palette GIF, transparent": (lambda: _palette("GIF", 1), WHITE),
    "RGB tRNS": (lambda: files.save(Image.new("RGB", (8, 8), RED), "PNG", transparency=RED), WHITE),
    "RGB tRNS of another colour": (
        lambda: files.save(Image.new("RGB", (8, 8), RED), "PNG", transparency=(0, 0, 1)),
        [254, 0, 0],
    ),
    "grey tRNS": (lambda: files.save(Image.new("L", (8, 8), 9), "PNG", transparency=9), WHITE),
    "2-bit grey tRNS": (
        lambda: files.png(4, 1, 2, 0, b"\0\x55", files.chunk(b"tRNS", b"\0\x01")),
        WHITE,
    ),
    "16-bit grey tRNS": (
        lambda: files.png(2, 1, 16, 0, b"\0\x12\x34\x12\x34", files.chunk(b"tRNS", b"\x12\x34")),
        WHITE,
    ),
    "16-bit RGB tRNS": (
        lambda: files.png(1, 1, 16, 2, b"\0" + b"\x12\x34" * 3, files.chunk(b"tRNS", b"\x12\x34" * 3)),
        WHITE,
    ),
    "16-bit RGB": (lambda: files.png(1, 1, 16, 2, b"\0\xfe\x00\x00\x00\x00\xff"), [254, 0, 0]),
    "16-bit RGBA": (lambda: files.png(1, 1, 16, 6, b"\0\xfe\x00\x00\x00\x00\xff\x00\x00"), WHITE),
    "16-bit LA": (lambda: files.png(1, 1, 16, 4, b"\0\x10\x00\xff\xff"), [16, 16, 16]),
    "1-bit": (lambda: files.save(Image.new("1", (9, 9), 1), "PNG"), WHITE),
    "1-bit TIFF": (lambda: files.save(Image.new("1", (9, 9), 1), "TIFF", compression="group4"), WHITE),
    "CMYK TIFF": (lambda: files.save(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "TIFF"), [255, 0, 0]),
    "YCbCr JPEG in TIFF": (
        lambda: files.save(Image.new("RGB", (64, 64), RED), "TIFF", compression="jpeg"),
        [254, 0, 0],
    ),
    "grey JPEG": (lambda: files.save(Image.new("L", (16, 16), 200), "JPEG"), [200, 200, 200]),
    "BMP, 8 bits": (lambda: files.save(Image.new("L", (16, 16), 200), "BMP"), [200, 200, 200]),
}


@pytest.mark.parametrize("name", COLOURS)
def test_colours(name: str) -> None:
    make, wanted = COLOURS[name]
    assert np.abs(np.subtract(mean(make()), wanted)).max() <= 1


@pytest.mark.parametrize("rgb", [(255, 0, 0), (0, 160, 60), (255, 255, 255), (0, 0, 0)])
def test_cmyk(rgb: tuple[int, int, int]) -> None:
    for name, data in files.cmyk_jpegs(rgb).items():
        assert np.abs(np.subtract(mean(data), rgb)).max() <= 4, name


@pytest.mark.parametrize("step", [256, 257])
@pytest.mark.parametrize(("form", "order"), [("PNG", ">"), ("TIFF", "<"), ("TIFF", ">")])
def test_ramps_of_16_bits(form: str, order: str, step: int) -> None:
    assert decode(_grey16(step, form, order), LIMITS)[0, :, 1].tolist() == list(range(256))


def test_inverted_16_bits() -> None:
    """A TIFF in which 0 is white."""
    data = bytearray(_grey16(257, "TIFF", "<"))
    at = data.index(struct.pack("<HHI", 262, 3, 1))
    data[at + 8] = 0
    assert decode(bytes(data), LIMITS)[0, :, 1].tolist() == list(range(255, -1, -1))


@pytest.mark.parametrize("mode", ["I", "F", "LAB"])
def test_modes_without_white_are_named(mode: str) -> None:
    with pytest.raises(BadImage, match=f"mode {mode}"):
        decode(files.save(Image.new(mode, (8, 8)), "TIFF"), LIMITS)


def test_profiles_are_ignored() -> None:
    image = Image.fromarray(files.patches())
    assert np.array_equal(
        decode(files.save(image, "PNG", icc_profile=b"profile of a wide gamut"), LIMITS), np.asarray(image)
    )


# animations


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_first_frame(form: str) -> None:
    frames = [Image.new("RGB", (32, 32), colour) for colour in (RED, (0, 254, 0), (0, 0, 254))]
    data = files.save(frames[0], form, save_all=True, append_images=frames[1:])
    for _ in range(2):
        assert np.abs(np.subtract(mean(data), RED)).max() <= 3
    with pytest.raises(ImageTooLarge, match="more than 2 frames"):
        probe(data, ImageSettings(max_frames=2))
    assert probe(data, ImageSettings(max_frames=3)).width == 32


def test_canvas_outside_the_first_frame_is_white() -> None:
    data = bytearray(files.gif_of_frames(1))
    data[6:10] = struct.pack("<HH", 3, 2)
    at = data.index(b"\x2c")
    data[at + 1 : at + 5] = struct.pack("<HH", 1, 1)
    wanted = np.full((2, 3, 3), 255)
    wanted[1, 1] = 0
    assert np.array_equal(decode(bytes(data), LIMITS), wanted)


def test_multi_picture_jpeg_shows_its_first() -> None:
    """Phones append further pictures (MPO)."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), RED).save(file, "MPO", save_all=True, append_images=[Image.new("RGB", (32, 32))])
    assert np.abs(np.subtract(mean(file.getvalue()), RED)).max() <= 3
