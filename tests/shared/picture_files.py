"""Picture files for tests, made in memory, among them such as no ordinary encoder writes."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def save(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def patches(width: int = 96, height: int = 64) -> np.ndarray:
    """Large patches of clear colours, none like another when turned: fit for lossy formats."""
    rng = np.random.default_rng(7)
    small = rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
    return np.repeat(np.repeat(small, 16, 0), 16, 1)


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *more: bytes, tail: bytes = b"") -> bytes:
    """A PNG from raw filtered rows; ``more`` goes before the pixels, ``tail`` behind them."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(rows, 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(more) + body + tail + chunk(b"IEND")


def bomb_png(side: int) -> bytes:
    """A 1-bit PNG of ``side`` × ``side`` in some kilobytes."""
    packer = zlib.compressobj(9)
    row = b"\0" * (1 + (side + 7) // 8)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND")


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


#: what undoes each orientation: upright picture to stored picture
STORED = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a),
    7: lambda a: np.rot90(a[::-1]),
    8: lambda a: np.rot90(a, -1),
}


def _segments(data: bytes) -> list[tuple[int, int]]:
    """Start and end of each segment of a JPEG before its pixels."""
    found, at = [], 2
    while data[at + 1] != 0xDA:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        found.append((at, end))
        at = end
    return found


def without_adobe(data: bytes) -> bytes:
    for start, end in _segments(data):
        if data[start + 1] == 0xEE:
            return data[:start] + data[end:]
    raise AssertionError("no Adobe marker")


def cmyk_jpegs(rgb: tuple[int, int, int]) -> dict[str, bytes]:
    """One colour as a JPEG in Adobe's CMYK, the same without its marker, and in Adobe's YCCK."""
    cmyk = np.empty((32, 48, 4), np.uint8)
    cmyk[:] = [*(255 - value for value in rgb), 0]
    options = {"quality": 95, "subsampling": 0}
    adobe = save(Image.fromarray(cmyk, "CMYK"), "JPEG", **options)
    plain = without_adobe(adobe)
    stored = np.empty_like(cmyk)
    stored[..., :3] = np.asarray(Image.fromarray(cmyk[..., :3].copy()).convert("YCbCr"))
    stored[..., 3] = 255
    ycck = bytearray(save(Image.fromarray(255 - stored, "CMYK"), "JPEG", **options))
    (start,) = (start for start, _ in _segments(ycck) if ycck[start + 1] == 0xEE)
    ycck[start + 15] = 2
    return {"Adobe CMYK": adobe, "CMYK without marker": plain, "Adobe YCCK": bytes(ycck)}


def webp_claiming(side: int) -> bytes:
    """A WebP of some bytes whose header claims a large canvas."""
    size = (side - 1).to_bytes(3, "little")
    canvas = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + size + size
    return b"RIFF" + struct.pack("<I", 4 + len(canvas)) + b"WEBP" + canvas


def gif_of_frames(count: int) -> bytes:
    """A GIF of 1 × 1 frames."""
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\0"
    return b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff" + frame * count + b";"


def _segment(marker: int, data: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data


def costly_files() -> dict[str, bytes]:
    """Files of some megabytes that cost a decoder seconds to minutes where it does not look out."""
    image = Image.new("RGB", (64, 64))
    jpeg, png_file = save(image, "JPEG"), save(image, "PNG")
    resources = _segment(0xED, b"Photoshop 3.0\0" + bytes.fromhex("3842494d0000000000000000") * 5000)
    runs = b"\1\7" * 2_000_000
    bmp = struct.pack("<IHHI", 1078 + len(runs), 0, 0, 1078)
    bmp += struct.pack("<IiiHHIIiiII", 40, 2000, 1000, 1, 8, 1, len(runs), 0, 0, 256, 0)
    tags = [(256, 64), (257, 64), (258, 8), (259, 1), (262, 1), (273, 200), (277, 1), (278, 1), (279, 200)]
    entries = (struct.pack("<HHII", tag, 4, 1_000_000 if tag in (273, 279) else 1, value) for tag, value in tags)
    return {
        "JPEG of empty segments": jpeg[:2] + b"\xff\xfe\0\2" * 2_000_000 + jpeg[2:],
        "JPEG of fill bytes": jpeg[:2] + b"\xff" * 8_000_000 + jpeg[2:],
        "JPEG of Photoshop resources": jpeg[:2] + resources * 100 + jpeg[2:],
        "BMP of short runs": b"BM" + bmp + bytes(1024) + runs,
        "PNG of profiles": png_file[:33] + chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1 << 20))) * 9 + png_file[33:],
        "TIFF of strips": b"II*\0" + struct.pack("<IH", 8, 9) + b"".join(entries) + bytes(4_100_000),
    }
