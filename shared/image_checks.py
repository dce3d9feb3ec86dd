"""What the containers of pictures say about themselves, read before a decoder sees them.

Pillow counts the frames of a GIF or a TIFF by walking all of them and sets up the canvas of a WebP on opening. The
walkers here look at lengths only, stop at the limit, and never take memory in proportion to what a header claims.
"""

from __future__ import annotations

import struct
import zlib

#: chunks of one PNG or WebP; encoders write some thousands at most
MAX_CHUNKS = 65536
#: scans of one JPEG; progressive files have about ten, and each costs a pass over all pixels
MAX_SCANS = 100
#: segments of a JPEG before its pixels, and those of Photoshop among them; a colour profile has 255 at most
MAX_SEGMENTS, MAX_RESOURCES = 16384, 64
#: of a BMP
MAX_RUN_LENGTH_BYTES = 1 << 20
#: colour profiles in one PNG, each of which Pillow unpacks; one is legal
MAX_PROFILES = 4
#: strips or tiles of a TIFF, and entries of its directory
MAX_STRIPS, MAX_ENTRIES = 1 << 18, 1 << 14

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II\x2a\x00", "TIFF"),
    (b"MM\x00\x2a", "TIFF"),
    (b"II\x2b\x00", "TIFF"),
    (b"MM\x00\x2b", "TIFF"),
)
_LABELS = (
    (b"%PDF", "a PDF document"),
    (b"\x00\x00\x01\x00", "an ICO icon"),
    (b"8BPS", "a Photoshop document"),
    (b"\x00\x00\x00\x0cjP  ", "a JPEG 2000 picture"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 picture"),
    (b"\xff\x0a", "a JPEG XL picture"),
    (b"\x00\x00\x00\x0cJXL ", "a JPEG XL picture"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
)


# offsets and lengths of strips and of tiles
_STRIP_TAGS = frozenset({273, 279, 324, 325})


class Damaged(ValueError):
    """A container that contradicts itself; the text is ours and safe to show."""


def sniff(data: bytes) -> str | None:
    """Format by signature, None for anything that is not accepted."""
    for signature, name in _SIGNATURES:
        if data.startswith(signature):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp" and {b"avif", b"avis"} & _brands(data):
        return "AVIF"
    return None


def label(data: bytes) -> str:
    """In words, what data that is not accepted looks like."""
    for signature, name in _LABELS:
        if data.startswith(signature):
            return name
    if data[4:8] == b"ftyp":
        heic = {b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1", b"hevc"}
        return "a HEIC/HEIF picture" if heic & _brands(data) else "a video or another ISO media file"
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in head:
        return "an SVG drawing"
    if head.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    if head.startswith((b"<", b"{", b"[")):
        return "a text document"
    return "not a picture"


def _brands(data: bytes) -> set[bytes]:
    end = min(int.from_bytes(data[:4], "big"), len(data), 256)
    return {data[8:12], *(data[at : at + 4] for at in range(16, end - 3, 4))}


def webp_layout(data: bytes, max_frames: int) -> tuple[int, int, int]:
    """Width, height and frames (counted up to one above the limit) of a WebP."""
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise Damaged("ends inside its header")
    if kind == b"VP8X":
        size = 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    elif kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        size = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        size = int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    else:
        raise Damaged("has no header of a WebP frame")
    at, end, frames = 12, 8 + int.from_bytes(data[4:8], "little"), 0
    if end > len(data):
        raise Damaged("is cut short")
    for _ in range(MAX_CHUNKS):
        if at + 8 > end or frames > max_frames:
            return *size, max(1, frames)
        frames += data[at : at + 4] == b"ANMF"
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + length + (length & 1)
    raise Damaged("has too many chunks")


def gif_frames(data: bytes, limit: int) -> int:
    """Frames of a GIF, counted up to one above the limit; a cut tail ends the count."""
    frames, at = 0, 13 + (3 << (data[10] & 7) + 1 if len(data) > 10 and data[10] & 0x80 else 0)
    steps = len(data) // 32 + 16 * limit + 1024
    try:
        while frames <= limit:
            kind = data[at]
            if kind == 0x2C:
                frames += 1
                flags = data[at + 9]
                at += 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
            elif kind == 0x21:
                at += 2
            else:
                break
            while length := data[at]:
                at += 1 + length
                steps -= 1
                if steps < 0:
                    raise Damaged("has too many blocks")
            at += 1
    except IndexError:
        pass
    return max(1, frames)


def tiff_frames(data: bytes, limit: int) -> int:
    """Pages of a TIFF, counted up to one above the limit.

    Raises:
        Damaged: a directory, or a list of strips or tiles, of absurd length.
    """
    order = "<" if data[:2] == b"II" else ">"
    big = data[2:4] in (b"\x2b\x00", b"\x00\x2b")
    count_format, link_format, entry = (order + "Q", order + "Q", "HHQQ") if big else (order + "H", order + "I", "HHII")
    seen: set[int] = set()
    try:
        (at,) = struct.unpack_from(link_format, data, 8 if big else 4)
        while at and at not in seen and len(seen) <= limit:
            (entries,) = struct.unpack_from(count_format, data, at)
            if entries > MAX_ENTRIES:
                raise Damaged("has too many tags")
            begin = at + struct.calcsize(count_format)
            end = begin + entries * struct.calcsize(order + entry)
            if not seen:
                for tag, _, count, _ in struct.iter_unpack(order + entry, data[begin:end]):
                    if tag in _STRIP_TAGS and count > MAX_STRIPS:
                        raise Damaged("has too many strips or tiles")
            seen.add(at)
            (at,) = struct.unpack_from(link_format, data, end)
    except (struct.error, OverflowError):
        pass
    return max(1, len(seen))


def check_png(data: bytes, *, whole: bool) -> bytes | None:
    """Walks the chunks of a PNG.

    Args:
        data: the file.
        whole: also verify every checksum and the presence of the end; else lengths only.

    Returns:
        The EXIF block, which may stand behind the pixels.

    Raises:
        Damaged: too many chunks or profiles; with ``whole`` also a bad checksum or a missing end.
    """
    at, exif, view, profiles = 8, None, memoryview(data), 0
    for _ in range(MAX_CHUNKS):
        if at + 12 > len(data):
            break
        length = int.from_bytes(data[at : at + 4], "big")
        kind, end = data[at + 4 : at + 8], at + 8 + length
        if end + 4 > len(data):
            break
        if whole and zlib.crc32(view[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise Damaged("has a chunk with a wrong checksum")
        profiles += kind == b"iCCP"
        if profiles > MAX_PROFILES:
            raise Damaged("has too many colour profiles")
        if kind == b"eXIf":
            exif = data[at + 8 : end]
        elif kind == b"IEND":
            return exif
        at = end + 4
    else:
        raise Damaged("has too many chunks")
    if whole:
        raise Damaged("is cut short")
    return exif


def check_jpeg(data: bytes) -> None:
    """Refuses a JPEG that costs time out of all proportion: countless scans, segments or fill bytes.

    Inside pixel data 0xFF is escaped, so each match of a scan's marker is one.

    Raises:
        Damaged: too many of them.
    """
    if data.count(b"\xff\xda") > MAX_SCANS:
        raise Damaged("has too many scans")
    at, resources = 2, 0
    for _ in range(MAX_SEGMENTS):
        marker = data[at : at + 2]
        if len(marker) < 2 or marker[0] != 0xFF or marker[1] == 0xDA:
            return  # pixels, or nothing that a decoder goes on with
        if marker[1] in (0x00, 0xFF):
            at += 1
            continue
        resources += marker[1] == 0xED
        alone = marker[1] == 0x01 or 0xD0 <= marker[1] <= 0xD9
        at += 2 if alone else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if resources > MAX_RESOURCES:
            break
    raise Damaged("has too many segments before its pixels")


def check_bmp(data: bytes) -> None:
    """Refuses large run-length coding, for which Pillow takes a step in Python for each run.

    Raises:
        Damaged: above a mebibyte.
    """
    if len(data) > MAX_RUN_LENGTH_BYTES and data[14:18] != b"\x0c\0\0\0" and data[30:34] in (b"\1\0\0\0", b"\2\0\0\0"):
        raise Damaged("is run-length coded and too large for that")
