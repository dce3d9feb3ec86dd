"""What Redis's replies mean: strings, headers, records, aliases, figures; each checked."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from shared.keys import open_alias
from shared.records import HEADER_BYTES, Buffer, RecordError, RecordHeader, check_record, read_header


def string(reply: Any) -> Buffer | None:
    """A string reply.

    Raises:
        RecordError: the key holds another type, or the reply makes no sense.
        ResponseError: Redis refuses to read.
    """
    if reply is None or isinstance(reply, bytes | memoryview):
        return reply
    if isinstance(reply, ResponseError) and not str(reply).startswith("WRONGTYPE"):
        raise reply
    raise RecordError("type", f"the key holds no string ({type(reply).__name__})")


def number(reply: Any) -> int:
    """An integer reply.

    Raises:
        ResponseError: it is none, or Redis refuses.
    """
    if isinstance(reply, int):
        return reply
    raise reply if isinstance(reply, ResponseError) else ResponseError(f"no number: {type(reply).__name__}")


def header_of(head: Any, length: Any, key: str) -> RecordHeader | None:
    """A record's header, from its first bytes and the length of the whole; None when there is none.

    Raises:
        RecordError: it cannot be what was asked for.
    """
    start = string(head)
    if not start or not (size := number(length)):  # the entry may go between the two commands
        return None
    header = read_header(start, key)
    if size != HEADER_BYTES + header.payload_bytes:
        raise RecordError("truncated", f"{size} bytes where the header says {HEADER_BYTES + header.payload_bytes}")
    return header


def record_of(reply: Any, key: str) -> Buffer | None:
    """A whole record, checked; None when there is none.

    Raises:
        RecordError: it cannot be used.
    """
    record = string(reply)
    if record is not None:
        check_record(record, key)
    return record


def digest_of(reply: Any, alias: str) -> str | None:
    """The digest in a sealed alias; None when there is none.

    Raises:
        RecordError: the seal is not the alias's.
    """
    sealed = string(reply)
    if sealed is None:
        return None
    if (digest := open_alias(alias, bytes(sealed))) is None:
        raise RecordError("alias", "the alias does not carry its own seal")
    return digest


def information_of(reply: Any) -> dict[str, str]:
    """The lines of INFO; empty when Redis does not let us see them."""
    if not isinstance(reply, bytes):
        return {}
    lines = reply.decode(errors="replace").splitlines()
    return {line.split(":")[0]: line.split(":", 1)[1] for line in lines if ":" in line}
