"""``data:`` URLs: lenient in spelling, strict in content."""

from __future__ import annotations

import binascii
import re
from urllib.parse import unquote_to_bytes

from shared.errors import BadImage, ImageTooLarge

_WHITESPACE = b" \t\r\n\f\v"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_BASE64_PARAMETER = re.compile(r";\s*base64\s*(?=;|$)", re.IGNORECASE)


def read_data_url(url: str, max_bytes: int) -> bytes:
    """Payload of a data URL.

    Case of ``data`` and ``base64`` does not matter, nor do the media type and other parameters. Base64 may be the
    URL-safe kind, lack its padding, be broken into lines or be percent-encoded on top.

    Raises:
        BadImage: no comma, or not base64.
        ImageTooLarge: a payload above ``max_bytes``.
    """
    header, comma, payload = url.partition(",")
    if not comma or len(header) > 1024:
        raise BadImage("the data URL has no comma; it must look like data:image/png;base64,iVBORw0…")
    if len(payload) > 4 * max_bytes + 65536:
        raise ImageTooLarge(f"the data URL holds more than {max_bytes} bytes")
    try:
        data = payload.encode("ascii")
    except UnicodeEncodeError as error:
        raise BadImage("the data URL holds characters outside ASCII") from error
    if "%" in payload:
        data = unquote_to_bytes(data)
    if _BASE64_PARAMETER.search(header):
        data = _from_base64(data)
    if len(data) > max_bytes:
        raise ImageTooLarge(f"the data URL holds {len(data)} bytes; at most {max_bytes} are allowed")
    if not data:
        raise BadImage("the data URL is empty")
    return data


def _from_base64(text: bytes) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except binascii.Error:
        pass  # of another spelling, perhaps
    text = text.translate(_URL_SAFE, _WHITESPACE)
    bare = text.rstrip(b"=")
    if len(text) - len(bare) > 2 or len(bare) % 4 == 1:
        raise BadImage("the data URL's base64 is cut short or has wrong padding")
    try:
        return binascii.a2b_base64(bare + b"=" * (-len(bare) % 4), strict_mode=True)
    except binascii.Error as error:
        raise BadImage("the data URL's payload is not base64") from error
