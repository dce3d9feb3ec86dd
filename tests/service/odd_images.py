"""Odd and hostile pictures, as parts of a chat message, with the code that each is refused with (None: answered)."""

from __future__ import annotations

import base64
import io
import struct
from typing import Any

import numpy as np
from PIL import Image

from tests.shared import picture_files as files
from tests.shared.test_images_hostile import JUNK, SIGNATURES, WHOLE

BAD, LARGE, FETCH, WRONG = "bad_image", "image_too_large", "image_fetch_failed", "invalid_request"

Case = tuple[Any, str | None]


def part(data: bytes, head: str = "data:image/png;base64,") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": head + base64.b64encode(data).decode()}}


def _rgb(width: int = 96, height: int = 64) -> Image.Image:
    return Image.fromarray(files.patches(width, height))


def _flat(width: int, height: int, form: str = "PNG") -> bytes:
    return files.save(Image.new("RGB", (width, height), (200, 30, 30)), form)


def _frames(form: str, count: int = 3) -> bytes:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    images = [Image.new("RGB", (48, 48), colours[number % 3]) for number in range(count)]
    return files.save(images[0], form, save_all=True, append_images=images[1:], duration=50)


def accepted() -> dict[str, Case]:
    """Pictures of every kind that a phone, a scanner, a printer or a browser makes."""
    rgb = _rgb()
    found: dict[str, bytes] = {
        **{name: make() for name, make in WHOLE.items()},
        **files.cmyk_jpegs((220, 20, 20)),
        **{
            f"EXIF orientation {number}": files.save(
                Image.fromarray(np.ascontiguousarray(undo(files.patches()))), "JPEG", exif=files.exif(number)
            )
            for number, undo in files.STORED.items()
        },
        "orientation that does not exist": files.save(rgb, "JPEG", exif=files.exif(9)),
        "broken EXIF": files.save(rgb, "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"),
        "grey JPEG": files.save(rgb.convert("L"), "JPEG"),
        "palette PNG": files.save(rgb.quantize(16), "PNG"),
        "palette PNG with transparency": files.save(rgb.quantize(16), "PNG", transparency=0),
        "RGBA, all transparent": files.save(Image.new("RGBA", (48, 48), (255, 0, 0, 0)), "PNG"),
        "grey with alpha": files.save(rgb.convert("LA"), "PNG"),
        "one bit": files.save(rgb.convert("1"), "PNG"),
        "16-bit grey PNG": files.png(64, 32, 16, 0, (b"\0" + (np.arange(64) * 1024).astype(">u2").tobytes()) * 32),
        "16-bit RGB PNG": files.png(32, 32, 16, 2, (b"\0" + (np.arange(96) * 600).astype(">u2").tobytes()) * 32),
        "16-bit TIFF": files.save(
            Image.frombytes("I;16B", (64, 32), (np.arange(2048) * 32).astype(">u2").tobytes()), "TIFF"
        ),
        "transparent WEBP": files.save(rgb.convert("RGBA"), "WEBP"),
        "animated GIF": _frames("GIF"),
        "animated WEBP": _frames("WEBP"),
        "animated PNG": _frames("PNG"),
        "GIF of 1000 frames": files.gif_of_frames(1000),
        "bytes behind the end": files.save(rgb, "PNG") + b"trailer" * 999,
        "1x1": _flat(1, 1),
        "2x2": _flat(2, 2),
        "15x15": _flat(15, 15),
        "1x100": _flat(1, 100),
        "1x2000": _flat(1, 2000),
        "2000x1": _flat(2000, 1),
        "500x19": _flat(500, 19),
        "1093x5": _flat(1093, 5),
        "300x12000": _flat(300, 12000),
        "largest allowed": _flat(6000, 4000),
    }
    cases: dict[str, Case] = {name: (part(data), None) for name, data in found.items()}
    png, jpeg = files.save(rgb, "PNG"), files.save(rgb, "JPEG")
    text = base64.b64encode(png).decode()
    heads = {
        "wrong label": "data:image/gif;base64,",
        "no label": "data:;base64,",
        "label of text": "data:text/plain;base64,",
        "charset": "data:image/jpeg;charset=utf-8;base64,",
        "upper case": "DATA:IMAGE/JPEG;BASE64,",
        "spaces in front": "  data:image/jpeg;base64,",
    }
    cases |= {f"data URL: {name}": (part(jpeg, head), None) for name, head in heads.items()}
    lines = "\n".join(text[at : at + 76] for at in range(0, len(text), 76))
    urls = {
        "lines": f"data:image/png;base64,{lines}",
        "url-safe": f"data:image/png;base64,{base64.urlsafe_b64encode(png).decode()}",
        "no padding": f"data:image/png;base64,{text.rstrip('=')}",
        "percent-encoded": "data:image/png," + "".join(f"%{byte:02x}" for byte in _flat(8, 8)),
    }
    return cases | {
        f"data URL: {name}": ({"type": "image_url", "image_url": {"url": url}}, None) for name, url in urls.items()
    }


def refused() -> dict[str, Case]:
    """What is no picture, a damaged one, or one that would cost far more than its bytes."""
    cases: dict[str, Case] = {name: (part(data), BAD) for name, (data, _) in JUNK.items()}
    # 64 bytes of ones are a size of 2³² where a header has its size at a fixed place
    huge = (b"\x89PNG\r\n\x1a\n", b"RIFF\x16\0\0\0WEBPVP8X")
    for signature in SIGNATURES:
        cases[f"{signature!r} and no more"] = part(signature + b"\xff" * 64), LARGE if signature in huge else BAD
    for name, make in WHOLE.items():
        whole = make()
        cases[f"half of a {name}"] = part(whole[: len(whole) // 2]), BAD
        cases[f"{name} without its last 128 bytes"] = part(whole[:-128]), BAD
    png = bytearray(WHOLE["PNG"]())
    png[len(png) // 2] ^= 4
    cases["PNG with a flipped bit"] = part(bytes(png)), BAD
    cases |= {
        "PNG of 20000x20000": (part(files.bomb_png(20_000)), LARGE),
        "PNG of 13000x13000": (part(files.bomb_png(13_000)), LARGE),
        "WEBP that claims 16383x16383": (part(files.webp_claiming(16_383)), LARGE),
        "GIF of 1001 frames": (part(files.gif_of_frames(1001)), LARGE),
        "GIF of 300000 frames": (part(files.gif_of_frames(300_000)), LARGE),
        "one pixel too many": (part(_flat(6001, 4000)), LARGE),
        "TIFF of huge tiles": (part(_tiles()), LARGE),
    }
    cases |= {name: (part(data), BAD) for name, data in files.costly_files().items()}
    urls: dict[str, tuple[Any, str]] = {
        "bare base64": (base64.b64encode(files.save(_rgb(), "PNG")).decode(), BAD),
        "empty": ("", BAD),
        "spaces": ("   ", BAD),
        "no comma": ("data:image/png;base64", BAD),
        "not base64": ("data:image/png;base64,@@@@", BAD),
        "no data": ("data:image/png;base64,", BAD),
        "a path": ("/etc/passwd", BAD),
        "a file": ("file:///etc/passwd", FETCH),
        "null": (None, WRONG),
        "a number": (7, WRONG),
        "a list": ([], WRONG),
    }
    cases |= {
        f"URL: {name}": ({"type": "image_url", "image_url": {"url": url}}, code) for name, (url, code) in urls.items()
    }
    return cases | {
        "image_url is a string": ({"type": "image_url", "image_url": "data:image/png;base64,"}, WRONG),
        "image_url is null": ({"type": "image_url", "image_url": None}, WRONG),
        "image_url without url": ({"type": "image_url", "image_url": {}}, WRONG),
        "no image_url": ({"type": "image_url"}, WRONG),
    }


def _tiles() -> bytes:
    """A small TIFF that declares tiles of 1048576×1024."""
    tags = [(256, 64), (257, 64), (258, 8), (259, 8), (262, 1), (277, 1), (322, 1 << 20), (323, 1 << 10)]
    tags += [(324, 200), (325, 9)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(200)


def variants(image: Image.Image) -> dict[str, bytes]:
    """One picture in files that say the same in other ways, after every rule of decoding."""
    pixels = np.asarray(image.convert("RGB"))
    height, width = pixels.shape[:2]
    see_through = np.dstack([pixels, np.full((height, width), 255, np.uint8)])
    white = (pixels == 255).all(-1)
    see_through[white] = (255, 0, 0, 0)  # red that nobody is to see
    wide = (pixels.astype(np.uint16) * 257).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in wide)
    cmyk = Image.fromarray(np.dstack([255 - pixels, np.zeros((height, width), np.uint8)]), "CMYK")
    adobe = files.save(cmyk, "JPEG", quality=95, subsampling=0)
    found = {
        "palette": files.save(image.quantize(256), "PNG"),
        "alpha over hidden red": files.save(Image.fromarray(see_through, "RGBA"), "PNG"),
        "16 bits": files.png(width, height, 16, 2, rows),
        "Adobe CMYK": adobe,
        "CMYK without marker": files.without_adobe(adobe),
        "progressive": files.save(image, "JPEG", quality=95, progressive=True),
        "first of three frames": _animation(image),
    }
    return found | {
        f"EXIF orientation {number}": files.save(
            Image.fromarray(np.ascontiguousarray(files.STORED[number](pixels))),
            "JPEG",
            quality=95,
            exif=files.exif(number),
        )
        for number in range(2, 9)
    }


def _animation(image: Image.Image) -> bytes:
    others = [Image.new("RGB", image.size, colour) for colour in ("red", "blue")]
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", save_all=True, append_images=others, lossless=True)
    return buffer.getvalue()
