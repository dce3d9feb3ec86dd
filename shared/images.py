"""Pictures in: the header first, then pixels as one array of bytes [height, width, 3].

What a decoded picture is, for every format:

- the first frame of an animation;
- turned upright by its EXIF orientation (once; XMP is not looked at);
- composited over white where it is transparent;
- 16-bit samples cut to their upper 8 bits, so that a ramp of 256 steps keeps 256 levels;
- CMYK and YCCK JPEGs turned to RGB as Chrome and Firefox do: taken as inverted, with Adobe's marker or without;
- colour profiles (ICC) ignored: the numbers are taken as sRGB.

`DECODE_VERSION` names these rules in cache keys. Sizes are checked on the header, before memory is spent. Messages
are ours: what a decoder says never reaches a caller. Pillow's global switches are left as they are.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
    features,
)

from shared import image_checks
from shared.config import ImageSettings
from shared.errors import BadImage, ImageTooLarge

#: raise it when the same bytes decode to other pixels than before
DECODE_VERSION = 1

_OPENERS: dict[str, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    "JPEG": JpegImagePlugin.JpegImageFile,
    "PNG": PngImagePlugin.PngImageFile,
    "WEBP": WebPImagePlugin.WebPImageFile,
    "GIF": GifImagePlugin.GifImageFile,
    "BMP": BmpImagePlugin.BmpImageFile,
    "TIFF": TiffImagePlugin.TiffImageFile,
}
if features.check("avif"):
    from PIL import AvifImagePlugin

    _OPENERS["AVIF"] = AvifImagePlugin.AvifImageFile

#: what is accepted, as messages name it
FORMATS = tuple(_OPENERS)
_ACCEPTED = f"Accepted formats: {', '.join(FORMATS)}"

#: pixels converted at a time
_BAND_PIXELS = 1 << 18

_ORIENTATION = 0x0112
_TILE_WIDTH, _TILE_LENGTH, _PHOTOMETRIC = 322, 323, 262
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class ImageHeader:
    """What is known of a picture before decoding it.

    Attributes:
        width, height: size in pixels, upright.
        format: one of `FORMATS`.
    """

    width: int
    height: int
    format: str


def probe(data: bytes, limits: ImageSettings) -> ImageHeader:
    """Reads the header alone.

    Raises:
        BadImage: not a picture of an accepted format, or damaged at its head.
        ImageTooLarge: more bytes, pixels or frames than allowed.
    """
    form = _identify(data, limits)
    with _own_words(form):
        image, orientation = _open(data, form, limits, whole=False)
        width, height = image.size
        return ImageHeader(height, width, form) if orientation >= 5 else ImageHeader(width, height, form)


def decode(data: bytes, limits: ImageSettings) -> np.ndarray:
    """Decodes a picture by the rules above.

    Returns:
        uint8 [height, width, 3], contiguous and writable.

    Raises:
        BadImage: as `probe`, and data that are cut short or damaged, or samples without a defined white.
        ImageTooLarge: as `probe`.
    """
    form = _identify(data, limits)
    with _own_words(form):
        image, orientation = _open(data, form, limits, whole=True)
        covered = image.tile[0].extents if form == "GIF" else None
        image.load()
        convert = _converter(image, form, data)
        pixels = _assemble(image, convert, orientation)
        if covered is not None:
            _whiten_outside(pixels, covered)
        return pixels


def _identify(data: bytes, limits: ImageSettings) -> str:
    if not data:
        raise BadImage(f"the image is empty. {_ACCEPTED}")
    if len(data) > limits.max_bytes:
        raise ImageTooLarge(f"the image has {len(data)} bytes; at most {limits.max_bytes} are allowed")
    form = image_checks.sniff(data)
    if form is None or form not in _OPENERS:
        raise BadImage(f"the image data are {image_checks.label(data)}. {_ACCEPTED}")
    return form


@contextmanager
def _own_words(form: str) -> Iterator[None]:
    """Turns whatever a decoder raises into our errors: hostile files reach every kind of exception in them."""
    try:
        yield
    except (BadImage, ImageTooLarge):
        raise
    except image_checks.Damaged as error:
        raise BadImage(f"the {form} image {error}. {_ACCEPTED}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge(f"the {form} image has more pixels than allowed") from error
    except MemoryError as error:
        raise ImageTooLarge(f"the {form} image takes more memory to decode than there is") from error
    except Exception as error:
        raise BadImage(f"the {form} image is damaged or cut short. {_ACCEPTED}") from error


def _open(data: bytes, form: str, limits: ImageSettings, *, whole: bool) -> tuple[ImageFile.ImageFile, int]:
    """Opens a picture within its limits; the second value is the EXIF orientation still to apply."""
    exif, frames = None, 1
    if form == "JPEG":
        image_checks.check_jpeg(data)
    elif form == "BMP":
        image_checks.check_bmp(data)
    elif form == "PNG":
        _check_size(int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big"), limits)
        exif = image_checks.check_png(data, whole=whole)
    elif form == "WEBP":
        width, height, frames = image_checks.webp_layout(data, limits.max_frames)
        _check_size(width, height, limits)
    elif form == "GIF":
        frames = image_checks.gif_frames(data, limits.max_frames)
    elif form == "TIFF":
        frames = image_checks.tiff_frames(data, limits.max_frames)
    _check_frames(frames, limits)
    image = _OPENERS[form](io.BytesIO(data))
    _check_size(*image.size, limits)
    if form in ("PNG", "AVIF"):
        _check_frames(int(getattr(image, "n_frames", 1)), limits)
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tile = image.tag_v2.get(_TILE_WIDTH, 1), image.tag_v2.get(_TILE_LENGTH, 1)
        _check_size(int(tile[0]), int(tile[1]), limits)
        return image, 1  # Pillow turns TIFFs on its own
    return image, _orientation(image.info.get("exif") or exif)


def _check_size(width: int, height: int, limits: ImageSettings) -> None:
    if width < 1 or height < 1:
        raise BadImage(f"the image is {width}×{height} pixels: it is empty")
    if width * height > limits.max_pixels:
        raise ImageTooLarge(
            f"the image is {width}×{height} pixels; at most {limits.max_pixels} pixels are allowed. Send a smaller one"
        )


def _check_frames(frames: int, limits: ImageSettings) -> None:
    if frames > limits.max_frames:
        raise ImageTooLarge(f"the image has more than {limits.max_frames} frames. Send one frame of it")


def _orientation(exif: object) -> int:
    """Orientation 1 to 8 from an EXIF block; one that cannot be read counts as upright."""
    if not isinstance(exif, bytes):
        return 1
    block = Image.Exif()
    try:
        block.load(exif)
        value = block.get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - metadata must not cost the picture
        return 1
    return value if isinstance(value, int) and value in _UPRIGHT else 1


def _assemble(image: Image.Image, convert: Callable[[Image.Image], Image.Image], orientation: int) -> np.ndarray:
    """Converts a picture in bands of rows that stay in the processor's cache, each turned on its way to its place."""
    width, height = image.size
    across = orientation >= 5
    pixels = np.empty((width, height, 3) if across else (height, width, 3), np.uint8)
    backwards = orientation in (3, 4, 6, 7)
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        band = convert(image.crop((0, top, width, bottom)))
        if orientation > 1:
            band = band.transpose(_UPRIGHT[orientation])
        place = slice(height - bottom, height - top) if backwards else slice(top, bottom)
        if across:
            pixels[:, place] = np.asarray(band)
        else:
            pixels[place] = np.asarray(band)
    return pixels


def _whiten_outside(pixels: np.ndarray, box: tuple[int, int, int, int]) -> None:
    """The first frame of a GIF may leave parts of the canvas open; nothing is there."""
    left, top, right, bottom = box
    pixels[:top] = 255
    pixels[bottom:] = 255
    pixels[:, :left] = 255
    pixels[:, right:] = 255


def _converter(image: ImageFile.ImageFile, form: str, data: bytes) -> Callable[[Image.Image], Image.Image]:
    """What turns parts of a decoded picture into 8-bit RGB over white."""
    mode, key = image.mode, image.info.get("transparency")
    if mode.startswith("I;16"):
        inverted = isinstance(image, TiffImagePlugin.TiffImageFile) and image.tag_v2.get(_PHOTOMETRIC) == 0
        return lambda band: _from_16_bit(band, inverted, key)
    if mode in ("I", "F"):
        raise BadImage(
            f"the {form} image holds {'32-bit integers' if mode == 'I' else 'floating-point numbers'} "
            f"(mode {mode}), for which white is not defined. Convert it to 8 or 16 bits a sample"
        )
    if mode in ("RGBA", "LA", "RGBa", "La", "PA"):
        return _over_white
    if key is not None and mode in ("RGB", "L", "1", "P"):
        if form == "PNG" and mode != "P":
            image.info["transparency"] = _scaled_key(key, data[24])
        return lambda band: _over_white(band.convert("RGBA"))
    if mode == "RGB":
        return lambda band: band
    if mode in ("L", "1", "P", "CMYK", "YCbCr"):
        return lambda band: band.convert("RGB")
    raise BadImage(f"the {form} image has colours of mode {mode}, which is not supported. Convert it to RGB")


def _over_white(image: Image.Image) -> Image.Image:
    if image.mode not in ("RGBA", "LA"):
        image = image.convert("RGBA")
    if image.getchannel("A").getextrema() == (255, 255):
        return image.convert("RGB")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(image, (0, 0), image)
    return white


def _from_16_bit(image: Image.Image, inverted: bool, key: object) -> Image.Image:
    """Upper bytes of 16-bit grey; a transparent grey becomes white."""
    samples = np.asarray(image)
    grey = (samples >> 8).astype(np.uint8)
    if inverted:
        grey = 255 - grey
    if isinstance(key, int):
        grey[samples == key] = 255
    return Image.fromarray(grey).convert("RGB")


def _scaled_key(key: object, depth: int) -> object:
    """A PNG's transparent colour in 8 bits: the file gives it in the depth of its samples."""

    def scale(value: int) -> int:
        return value >> 8 if depth == 16 else value * (255 // ((1 << depth) - 1)) if depth < 8 else value

    return tuple(map(scale, key)) if isinstance(key, tuple) else scale(key) if isinstance(key, int) else key
