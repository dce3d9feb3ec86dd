"""What goes over the connection: the listener's secret once, then frames of one chunk each."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from llm_service.messages import Chunk

SECRET_BYTES = 32
#: of one chunk; the largest, of many tokens with 20 alternatives each, has some kilobytes
MAX_FRAME_BYTES = 16 << 20
#: length of the payload, number of the stream; an empty payload is the stream's end
_HEAD = struct.Struct("<IQ")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Chunk)


class WireError(Exception):
    """What came is not ours."""


@dataclass(frozen=True)
class ReplyAddress:
    """Where the chunks of one answer go.

    Attributes:
        host: of the listener.
        port: of the listener.
        secret: what a connection must begin with.
        stream: which of the listener's answers.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    stream: int


def frame(stream: int, chunk: Chunk | None) -> bytes:
    """The frame of a chunk, or of the end of a stream."""
    payload = b"" if chunk is None else _encoder.encode(chunk)
    return _HEAD.pack(len(payload), stream) + payload


class FrameReader:
    """Cuts what arrives, in pieces of any size, into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, Chunk | None]]:
        """Stream and chunk of every frame that is complete now.

        Raises:
            WireError: a frame that nobody here wrote.
        """
        self._pending += data
        begin, held = 0, memoryview(self._pending)
        try:
            while len(held) - begin >= _HEAD.size:
                length, stream = _HEAD.unpack_from(held, begin)
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"a frame of {length} bytes")
                end = begin + _HEAD.size + length
                if len(held) < end:
                    break
                yield stream, _chunk(held[begin + _HEAD.size : end])
                begin = end
        finally:
            held.release()
            del self._pending[:begin]


def _chunk(payload: memoryview) -> Chunk | None:
    if not payload:
        return None
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise WireError(f"a frame that is no chunk: {error}") from error
    finally:
        payload.release()
