"""How the values of an embedding stand in a record's payload: as they are, or in 8 bits with a scale per token.

Raw values are used in place, without a copy. In 8 bits a payload begins with the scales, float32, padded to 64
bytes, and then has one byte a value: ``value = byte · scale of its token``.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch

from shared.keys import Buffer

ALIGNMENT = 64


class Encoding(IntEnum):
    """What a record says about its payload."""

    RAW = 0
    INT8 = 1
    FP8 = 2


#: the largest value that a byte can mean, and its type
_LARGEST = {Encoding.INT8: 127.0, Encoding.FP8: 448.0}
_BYTE = {Encoding.INT8: torch.int8, Encoding.FP8: torch.float8_e4m3fn}
#: unsigned and signed integers of a float's size, and the bits of +infinity: what is not finite lies above it
_INTEGERS = {2: (np.uint16, np.int16), 4: (np.uint32, np.int32)}
_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def payload_bytes(encoding: Encoding, dtype: torch.dtype, tokens: int, width: int) -> int:
    """Length of a payload."""
    if encoding is Encoding.RAW:
        return tokens * width * dtype.itemsize
    return _scale_bytes(tokens) + tokens * width


def pack(encoding: Encoding, embedding: torch.Tensor) -> tuple[Buffer, ...]:
    """The payload of finite values ``[tokens, width]``, in pieces."""
    values = embedding.detach()
    if encoding is Encoding.RAW:
        return (_raw(values.contiguous()),)
    largest = _LARGEST[encoding]
    values = values.float()
    scales = values.abs().amax(1) / largest
    # at the very end of the range the product with the scale must not round up to infinity
    scales = torch.where(torch.isfinite(scales * largest), scales, torch.nextafter(scales, torch.zeros(())))
    units = values / torch.where(scales > 0, scales, 1)[:, None]
    units = (units.round() if encoding is Encoding.INT8 else units).clamp(-largest, largest)
    head = _raw(scales).tobytes().ljust(_scale_bytes(len(scales)), b"\0")
    return head, _raw(units.to(_BYTE[encoding]))


def unpack(encoding: Encoding, payload: memoryview, dtype: torch.dtype, tokens: int, width: int) -> torch.Tensor:
    """The values ``[tokens, width]`` in ``dtype``; raw ones are a view of the payload."""
    if encoding is Encoding.RAW:
        return torch.frombuffer(payload, dtype=dtype).view(tokens, width)
    scales = torch.frombuffer(payload, dtype=torch.float32, count=tokens)
    units = torch.frombuffer(payload, dtype=_BYTE[encoding], offset=_scale_bytes(tokens)).view(tokens, width)
    return (units.float() * scales[:, None]).to(dtype)


def finite(encoding: Encoding, payload: memoryview, dtype: torch.dtype, tokens: int) -> bool:
    """Whether all values of a payload of the right length are finite."""
    if encoding is Encoding.RAW:
        return _finite_bits(payload, dtype)
    scales = torch.frombuffer(payload, dtype=torch.float32, count=tokens)
    if not bool((scales >= 0).all() & torch.isfinite((scales * _LARGEST[encoding]).to(dtype)).all()):
        return False
    if encoding is Encoding.INT8:
        return True
    units = np.frombuffer(payload, np.uint8, offset=_scale_bytes(tokens))
    return bool(units.max() < 0xFF and units.view(np.int8).max() < 0x7F)


def _finite_bits(payload: memoryview, dtype: torch.dtype) -> bool:
    """Two passes without a copy: as signed integers positive values are ordered, as unsigned ones negative values."""
    unsigned, signed = _INTEGERS[dtype.itemsize]
    bits = np.frombuffer(payload, unsigned)
    infinity = _INFINITY[dtype]
    return bool(bits.view(signed).max() < infinity and bits.max() < infinity + (1 << (8 * dtype.itemsize - 1)))


def _scale_bytes(tokens: int) -> int:
    return -(-tokens * 4 // ALIGNMENT) * ALIGNMENT


def _raw(values: torch.Tensor) -> memoryview:
    return values.contiguous().view(torch.uint8).numpy().data.cast("B")
