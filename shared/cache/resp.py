"""Redis's protocol (RESP2) as far as large values need it: commands as parts to send, replies as they come. No I/O.

Values are neither joined nor copied on their way out, and received where they stay on their way in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TypeAlias

from redis.exceptions import AuthenticationError, BusyLoadingError, InvalidResponse, ResponseError

from shared.cache.buffers import Lender
from shared.records import Buffer

#: one value in several pieces, which stand one after the other in Redis
Parts: TypeAlias = tuple[Buffer, ...]
Argument: TypeAlias = str | int | Buffer | Parts
Command: TypeAlias = tuple[Argument, ...]
Reply: TypeAlias = Buffer | int | ResponseError | None

#: arguments and values up to this size are copied; that costs less than to treat them apart
SMALL = 4096
#: Redis's own limit on one value
LARGEST_VALUE = 512 << 20
_LONGEST_LINE = 4096
_CONTROL_BYTES = 16 << 10
_MOST_BUFFERS = 64
_END = b"\r\n"
#: errors that say "not now" or "not you", about the connection rather than the command; the rest are answers
_REFUSALS = {
    b"LOADING": BusyLoadingError,
    b"NOAUTH": AuthenticationError,
    b"WRONGPASS": AuthenticationError,
}


class Pending(Enum):
    """The one value of it means that a reply has not come in full."""

    PENDING = 0


def pack(commands: Iterable[Command]) -> list[Buffer]:
    """The commands as buffers to send one after the other; large arguments are views of the caller's memory."""
    out: list[Buffer] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for argument in command:
            pieces = _pieces(argument)
            small += b"$%d\r\n" % sum(len(piece) for piece in pieces)
            for piece in pieces:
                if len(piece) <= SMALL:
                    small += piece
                else:
                    out += [small, piece]
                    small = bytearray()
            small += _END
    return [*out, small]


def _pieces(argument: Argument) -> Sequence[Buffer]:
    if isinstance(argument, tuple):
        return argument
    if isinstance(argument, int):
        return (b"%d" % argument,)
    return (argument.encode(),) if isinstance(argument, str) else (argument,)


class Outgoing:
    """Packed commands on their way: :attr:`next` goes to ``sendmsg``, :meth:`sent` hears how much of it went."""

    def __init__(self, commands: Iterable[Command]) -> None:
        self._buffers: list[Buffer] = pack(commands)

    @property
    def next(self) -> list[Buffer]:
        """As much as one system call may take."""
        return self._buffers[:_MOST_BUFFERS]

    def sent(self, count: int) -> bool:
        """Takes away what was sent; whether all was."""
        while self._buffers and count >= len(self._buffers[0]):
            count -= len(self._buffers.pop(0))
        if count:
            self._buffers[0] = memoryview(self._buffers[0])[count:]
        return not self._buffers


class Incoming:
    """Replies of one connection. The owner receives into :meth:`target`, tells :meth:`received`, and asks for
    :meth:`reply` until it is not pending.

    Args:
        lender: of the memory for large values.
    """

    def __init__(self, lender: Lender) -> None:
        self._lender = lender
        self._control = memoryview(bytearray(_CONTROL_BYTES))
        self._start = self._end = 0
        self._value: memoryview | None = None
        self._filled = 0

    @property
    def empty(self) -> bool:
        """Whether nothing is here beyond the replies that were asked for."""
        return self._value is None and self._start == self._end

    def target(self) -> memoryview:
        """Where the next bytes belong."""
        if self._value is not None:
            return self._value[self._filled :]
        if self._start:  # what is left is less than a line
            rest = self._end - self._start
            self._control[:rest] = bytes(self._control[self._start : self._end])
            self._start, self._end = 0, rest
        return self._control[self._end :]

    def received(self, count: int) -> None:
        """So many bytes came into :meth:`target`.

        Raises:
            ConnectionError: none; the server has closed.
        """
        if not count:
            raise ConnectionError("Redis closed the connection")
        if self._value is not None:
            self._filled += count
        else:
            self._end += count

    def reply(self) -> Reply | Pending:
        """The next reply; an error that answers a command is a value.

        Returns:
            Values of more than :data:`SMALL` bytes are read-only views of aligned memory, smaller ones are bytes.

        Raises:
            InvalidResponse: not what Redis would answer to the commands that are sent over this.
            BusyLoadingError, AuthenticationError: Redis does not serve us.
        """
        if self._value is None:
            line = self._line()
            if line is None:
                return Pending.PENDING
            kind, rest = line[:1], line[1:]
            if kind == b"+":
                return rest
            if kind == b"-":
                return _error(rest)
            if kind == b":":
                return _integer(rest)
            if kind != b"$":
                raise InvalidResponse("a reply of an unexpected kind")
            size = _integer(rest)
            if size == -1:
                return None
            if not 0 <= size <= LARGEST_VALUE:
                raise InvalidResponse(f"a value of {size} bytes")
            self._begin(size)
        return self._finished()

    def _line(self) -> bytes | None:
        seen = bytes(self._control[self._start : min(self._end, self._start + _LONGEST_LINE)])
        length = seen.find(_END)
        if length < 0:
            if len(seen) == _LONGEST_LINE:
                raise InvalidResponse("a line without an end")
            return None
        self._start += length + len(_END)
        return seen[:length]

    def _begin(self, size: int) -> None:
        """Makes room for a value and its end, and moves there what came with its header."""
        total = size + len(_END)
        self._value = memoryview(bytearray(total)) if size <= SMALL else self._lender.lend(total)
        self._filled = min(total, self._end - self._start)
        self._value[: self._filled] = self._control[self._start : self._start + self._filled]
        self._start += self._filled

    def _finished(self) -> Buffer | Pending:
        value = self._value
        assert value is not None
        if self._filled < len(value):
            return Pending.PENDING
        self._value = None
        size = len(value) - len(_END)
        if value[size:] != _END:
            raise InvalidResponse("a value that does not end where it should")
        return bytes(value[:size]) if size <= SMALL else value[:size].toreadonly()


def _integer(text: bytes) -> int:
    # int() alone takes more than Redis sends
    if len(text) <= 20 and text.removeprefix(b"-").isdigit():
        return int(text)
    raise InvalidResponse("a number that is none")


def _error(text: bytes) -> ResponseError:
    word = text.split(b" ", 1)[0]
    message = text.decode(errors="replace")
    if word in _REFUSALS:
        raise _REFUSALS[word](message)
    return ResponseError(message)
