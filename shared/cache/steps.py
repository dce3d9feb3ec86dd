"""What each cache operation says to Redis and what it makes of the answers. No I/O: a transport carries the commands.

An operation is a generator: it yields commands that go out together on one connection, and gets their replies, errors
among them as values. All commands of one operation use the same connection.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from redis.exceptions import ResponseError

from shared.cache.limit import WriteLimit
from shared.cache.local import LocalTier
from shared.cache.replies import digest_of, header_of, information_of, number, record_of, string
from shared.cache.resp import Command, Parts
from shared.cache.stats import CacheStats
from shared.config import CacheSettings
from shared.keys import lease_key, seal_alias, wake_channel
from shared.records import HEADER_BYTES, Buffer, RecordError, RecordHeader

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Steps: TypeAlias = Generator[Sequence[Command], list[Any], Result]

#: a waiter looks by itself this often, seconds, in case its wake-up was lost
WAIT_POLL = 1.0
#: and never more often than this, even if the lease is about to end
SHORTEST_PAUSE = 0.05


@dataclass(frozen=True)
class Look:
    """What a waiter sees.

    Attributes:
        header: of the record, once it is there.
        lease: seconds that the lease has left; None when nobody holds it.
    """

    header: RecordHeader | None
    lease: float | None


def next_pause(look: Look | None, left: float) -> float | None:
    """Seconds that a waiter sleeps before its next look; None ends the wait.

    Args:
        look: the last one; None when Redis did not answer.
        left: seconds until the waiter's own time is up.
    """
    if look is None or look.header is not None or look.lease is None or left <= 0:
        return None
    # apart from each other, so that many waiters don't ask all at once
    return min(left, max(look.lease, SHORTEST_PAUSE), WAIT_POLL * random.uniform(0.75, 1.25))


class Operations:
    """The operations, for any transport. Safe for several threads.

    Args:
        settings: lease and life of entries.
        stats: where outcomes are counted.
        local: the node's own tier.
    """

    def __init__(self, settings: CacheSettings, stats: CacheStats, local: LocalTier) -> None:
        self._stats = stats
        self._local = local
        self._lease = _milliseconds(settings.lease)
        self._life: Command = () if settings.ttl is None else ("PX", _milliseconds(settings.ttl))
        self._limit = WriteLimit()

    def describe(self, key: str) -> Steps[RecordHeader | None]:
        """The header of a record that is there in full length."""
        return (yield from self.describe_many([key]))[0]

    def describe_many(self, keys: Sequence[str]) -> Steps[list[RecordHeader | None]]:
        """Headers in the order of ``keys``."""
        distinct = list(dict.fromkeys(keys))
        ask = ([("GETRANGE", key, 0, HEADER_BYTES - 1), ("STRLEN", key)] for key in distinct)
        replies = iter((yield [*chain.from_iterable(ask)]))
        found: dict[str, RecordHeader | None] = {}
        for key, head, length in zip(distinct, replies, replies, strict=True):
            found[key] = yield from self._checked("describe", key, partial(header_of, head, length, key))
        for key in keys:
            self._stats.record("describe", "miss" if found[key] is None else "hit")
        return [found[key] for key in keys]

    def fetch_many(self, keys: Sequence[str]) -> Steps[list[Buffer | None]]:
        """Whole records in the order of ``keys``; of those that the node has, Redis is asked for the header alone."""
        distinct = list(dict.fromkeys(keys))
        held = self._local.copies(distinct)
        found: dict[str, Buffer | None] = dict.fromkeys(distinct)
        missing, asked = distinct, time.time()
        if held:
            replies = yield [
                ("GETRANGE", key, 0, HEADER_BYTES - 1) if key in held else ("GET", key) for key in distinct
            ]
            missing = []
            for key, reply in zip(distinct, replies, strict=True):
                if key not in held:
                    found[key] = yield from self._fetched(key, reply, asked)
                elif (yield from self._confirmed(key, held[key], reply, asked)):
                    found[key] = held[key]
                else:
                    missing.append(key)
        # what Redis has otherwise than the node, or not any more
        if missing:
            replies = yield [("GET", key) for key in missing]
            for key, reply in zip(missing, replies, strict=True):
                found[key] = yield from self._fetched(key, reply, asked)
        return [found[key] for key in keys]

    def _fetched(self, key: str, reply: Any, asked: float) -> Steps[Buffer | None]:
        record = yield from self._checked("fetch", key, partial(record_of, reply, key))
        self._stats.record("fetch", "miss" if record is None else "hit")
        if record is not None:
            self._stats.moved(read=len(record))
            self._local.offer(key, record, asked)
        return record

    def _confirmed(self, key: str, copy: memoryview, reply: Any, asked: float) -> Steps[bool]:
        """Whether Redis has the record that the node has: the same header, which holds the payload's checksum."""
        head = yield from self._checked("fetch", key, partial(string, reply))
        if head is None or head != copy[:HEADER_BYTES]:
            self._local.drop(key)
            return False
        self._local.confirmed(key, copy, asked)
        self._stats.record("fetch", "hit")
        return True

    def put(self, key: str, record: Buffer | Parts, alias: str | None, digest: str | None) -> Steps[bool]:
        """Stores a record, its alias and the wake-up in one round trip."""
        if self._limit.claim_reading():
            (information,) = yield [("INFO", "memory")]
            self._limit.learn(information_of(information))
        size = sum(map(len, record)) if isinstance(record, tuple) else len(record)
        if self._limit.refuses(size):
            self._stats.record("put", "refused")
            return False
        commands: list[Command] = [("SET", key, record, *self._life)]
        if alias and digest:
            commands.append(("SET", alias, seal_alias(alias, digest), *self._life))
        # last, so that whoever it wakes finds the record
        commands.append(("PUBLISH", wake_channel(key), "put"))
        # only the record decides: no alias and no wake-up cost time, not answers
        stored, *_ = yield commands
        if not self._accepted("put", stored):
            return False
        self._stats.moved(written=size)
        return True

    def add_alias(self, alias: str, digest: str) -> Steps[bool]:
        """Notes that a file holds a known picture."""
        (stored,) = yield [("SET", alias, seal_alias(alias, digest), *self._life)]
        return self._accepted("alias", stored)

    def resolve_alias(self, alias: str) -> Steps[str | None]:
        """Digest of the picture in a file."""
        return (yield from self.resolve_aliases([alias]))[0]

    def resolve_aliases(self, aliases: Sequence[str]) -> Steps[list[str | None]]:
        """Digests of the pictures in files, in the order of ``aliases``."""
        distinct = list(dict.fromkeys(aliases))
        replies = yield [("GET", alias) for alias in distinct]
        found: dict[str, str | None] = {}
        for alias, reply in zip(distinct, replies, strict=True):
            found[alias] = yield from self._checked("alias", alias, partial(digest_of, reply, alias))
        for alias in aliases:
            self._stats.record("alias", "miss" if found[alias] is None else "hit")
        return [found[alias] for alias in aliases]

    def delete(self, keys: Iterable[str]) -> Steps[int]:
        """Deletes entries; how many there were."""
        if not (names := list(keys)):
            return 0
        (deleted,) = yield [("UNLINK", *names)]
        return number(deleted)

    def count_up(self, key: str, life: float) -> Steps[int | None]:
        """Adds one to a counter, which lives for that many seconds from now."""
        reply, _ = yield [("INCR", key), ("PEXPIRE", key, _milliseconds(life))]
        return number(reply)

    def counted_many(self, keys: Sequence[str]) -> Steps[list[int | None]]:
        """What counters say; 0 where there is none, or where the key holds something else."""
        replies = yield [("GET", key) for key in keys]
        return [int(reply) if isinstance(reply, bytes) and reply.isdigit() else 0 for reply in replies]

    def claim(self, key: str, owner: str) -> Steps[bool]:
        """Takes the lease. A Redis that refuses writes refuses leases first: then everybody may work."""
        return (yield from self.claim_many([(key, owner)]))[0]

    def claim_many(self, claims: Sequence[tuple[str, str]]) -> Steps[list[bool]]:
        """Takes leases, each for a key and its owner, one as the other."""
        replies = yield [("SET", lease_key(key), owner, "NX", "PX", self._lease) for key, owner in claims]
        return [self._claimed(taken) for taken in replies]

    def _claimed(self, taken: Any) -> bool:
        if isinstance(taken, ResponseError):
            self._accepted("claim", taken)
            return True
        return taken is not None

    def renew(self, key: str, owner: str) -> Steps[bool]:
        """Makes the lease last anew, if it is still the owner's; whether it is."""
        name = lease_key(key)
        _, holder = yield [("WATCH", name), ("GET", name)]
        if holder != owner.encode():
            yield [("UNWATCH",)]
            return False
        # XX: what has expired since the look is not taken again
        *_, done = yield [("MULTI",), ("SET", name, owner, "XX", "PX", self._lease), ("EXEC",)]
        return bool(done == [b"OK"])

    def release(self, key: str, owner: str) -> Steps[None]:
        """Drops the lease if it is still the owner's. WATCH, not a script: scripting may be forbidden for our user."""
        name = lease_key(key)
        _, holder = yield [("WATCH", name), ("GET", name)]
        if holder == owner.encode():
            yield [("MULTI",), ("DEL", name), ("PUBLISH", wake_channel(key), "released"), ("EXEC",)]
        else:
            yield [("UNWATCH",)]

    def look(self, key: str) -> Steps[Look]:
        """What a waiter wants to know. The lease is read first: who gave it back has stored the record before."""
        lease, head, length = yield [
            ("PTTL", lease_key(key)),
            ("GETRANGE", key, 0, HEADER_BYTES - 1),
            ("STRLEN", key),
        ]
        header = yield from self._checked("describe", key, lambda: header_of(head, length, key))
        left = number(lease)
        # -2: nobody holds it; -1: held without end
        return Look(header, None if left == -2 else WAIT_POLL if left < 0 else left / 1000)

    def ping(self) -> Steps[bool]:
        """Whether Redis answers as Redis does."""
        (pong,) = yield [("PING",)]
        return bool(pong == b"PONG")

    def info(self) -> Steps[dict[str, str]]:
        """Memory figures and policy, counters, ``cluster_enabled``, and ``keys``."""
        replies = yield [("INFO", "memory"), ("INFO", "stats"), ("INFO", "keyspace"), ("INFO", "cluster")]
        found: dict[str, str] = {}
        for reply in replies:
            found |= information_of(reply)
        if found:  # "db0:keys=12,expires=0,…", a line for every database that holds something
            lines = [value for name, value in found.items() if re.fullmatch(r"db\d+", name)]
            found["keys"] = str(sum(int(line.split(",")[0].removeprefix("keys=")) for line in lines))
        return found

    def _accepted(self, operation: str, reply: Any) -> bool:
        if isinstance(reply, ResponseError):
            self._stats.record(operation, "rejected")
            logger.warning("Redis rejects %s: %s", operation, str(reply)[:100])
            return False
        self._stats.record(operation, "ok")
        return True

    def _checked(self, operation: str, key: str, check: Callable[[], Result]) -> Steps[Result | None]:
        """The result of ``check``, or None for an entry that fails it: that is counted and deleted."""
        try:
            return check()
        except RecordError as error:
            self._stats.record(operation, f"corrupt_{error.reason}")
            logger.warning("a damaged entry is deleted: %s", error)
            yield [("UNLINK", key)]
            return None


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
