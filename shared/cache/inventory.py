"""The entries of a cache, for people: list, look at, check and delete them. Patient and blocking; not for requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from shared.cache.connections import ThreadConnections, deadline
from shared.cache.sentinels import read_sentinel_url
from shared.config import CacheSettings
from shared.errors import ConfigError, Unavailable
from shared.keys import Namespace, open_alias
from shared.records import HEADER_BYTES, RecordError, RecordHeader, check_record, read_header

#: seconds for one command; scanning is many
TIMEOUT = 10.0
#: keys that one command asks for or deletes
BATCH = 512
EMBEDDINGS, ALIASES = "lookonce:emb", "lookonce:alias"


@dataclass(frozen=True)
class Entry:
    """What Redis tells about one embedding.

    Attributes:
        key: its name.
        nbytes: length of the value.
        header: what the record says; None when it is damaged.
        fault: why it is damaged; empty when it is not.
        life: seconds until it expires; None when it does not.
        idle: seconds since it was last read or written; None when Redis does not tell (under an LFU policy).
    """

    key: str
    nbytes: int
    header: RecordHeader | None
    fault: str = ""
    life: float | None = None
    idle: float | None = None


class Inventory:
    """Entries of one Redis.

    Args:
        url: as in ``cache.url``. Behind Sentinels, the master of this moment is used to the end.

    Raises:
        ConfigError: the URL cannot be used.
        Unavailable: no Sentinel tells where the master is.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        server, place = url, None
        if (sentinel := read_sentinel_url(url)) is not None:
            server = sentinel.server
            with _answers(), deadline(TIMEOUT):
                place = ThreadConnections(CacheSettings(timeout=TIMEOUT), url).find()
        try:
            self._redis = redis.Redis.from_url(
                server, socket_timeout=TIMEOUT, socket_connect_timeout=TIMEOUT, retry=Retry(NoBackoff(), 0)
            )
        except ValueError as error:
            raise ConfigError(f"the Redis URL cannot be used: {error}") from error
        if place is not None:
            self._redis.connection_pool.connection_kwargs |= place._asdict()

    def close(self) -> None:
        """Closes the connections."""
        self._redis.close()

    def embeddings(
        self, *, model: str | None = None, digest: str | None = None, tag: str | None = None
    ) -> Iterator[str]:
        """Keys of embeddings, in no order; each at least once while nobody writes.

        Args:
            model: of this model only.
            digest: of this picture only, in any model.
            tag: of this tenant only; see :func:`~shared.keys.tenant_tag`.

        Raises:
            Unavailable: Redis does not answer, or forbids it.
        """
        picture = digest or f"{tag or ''}*"
        yield from self._scan(f"{EMBEDDINGS}:{_literal(model) if model else '*'}:*:*:{picture}")

    def aliases(self, *, file_digest: str | None = None, tag: str | None = None) -> Iterator[str]:
        """Keys of aliases, of a file or of a tenant; as :meth:`embeddings`."""
        file = file_digest or f"{tag or ''}*"
        yield from self._scan(f"{ALIASES}:*:{file}")

    def entry(self, key: str) -> Entry | None:
        """What is known about an entry without its payload; None when it is not there.

        Raises:
            Unavailable: Redis does not answer, or forbids it.
        """
        with _answers():
            pipe = self._redis.pipeline(transaction=False)
            pipe.getrange(key, 0, HEADER_BYTES - 1)
            pipe.strlen(key)
            pipe.pttl(key)
            pipe.object("idletime", key)
            head, length, life, idle = pipe.execute(raise_on_error=False)
        if isinstance(head, ResponseError):
            return Entry(key, 0, None, "type: the key holds no string")
        if not length:
            return None
        known_idle = float(idle) if isinstance(idle, int) else None
        left = life / 1000 if isinstance(life, int) and life >= 0 else None
        try:
            header = read_header(head, key)
            if length != HEADER_BYTES + header.payload_bytes:
                raise RecordError("truncated", f"{length} bytes")
        except RecordError as error:
            return Entry(key, length, None, str(error), left, known_idle)
        return Entry(key, length, header, "", left, known_idle)

    def record(self, key: str) -> bytes | None:
        """A whole record as it stands there, unchecked; None when it is not there.

        Raises:
            Unavailable: Redis does not answer, or forbids it.
        """
        with _answers():
            found = self._redis.get(key)
        assert found is None or isinstance(found, bytes)
        return found

    def fault(self, key: str) -> str:
        """Reads a whole entry: why it is damaged; empty when it is not, or when it is gone meanwhile.

        Raises:
            Unavailable: Redis does not answer, or forbids it.
        """
        try:
            if (record := self.record(key)) is not None:
                check_record(record, key)
        except RecordError as error:
            return str(error)
        except WrongType:
            return "type: the key holds no string"
        return ""

    def aliased(self, alias: str) -> str | None:
        """Digest of the picture that an alias leads to, if it is there and good.

        Raises:
            Unavailable: Redis does not answer, or forbids it.
        """
        value = self.record(alias)
        return None if value is None else open_alias(alias, value)

    def delete(self, keys: Iterable[str]) -> int:
        """Deletes entries; how many there were.

        Raises:
            Unavailable: Redis does not answer, or forbids it.
        """
        with _answers():
            return sum(int(self._redis.unlink(*some)) for some in _batches(keys))

    def information(self) -> dict[str, object]:
        """Redis's ``INFO``.

        Raises:
            Unavailable: Redis does not answer, or forbids it.
        """
        with _answers():
            return dict(self._redis.info())

    def _scan(self, pattern: str) -> Iterator[str]:
        with _answers():
            for key in self._redis.scan_iter(pattern, count=BATCH):
                yield key.decode(errors="replace")


class WrongType(Unavailable):
    """A key holds something else than a string."""


def model_of(key: str) -> str:
    """The model of an embedding's key; ``?`` for a key that the service did not make."""
    try:
        return Namespace.of(key).model
    except ValueError:
        return "?"


def _batches(keys: Iterable[str]) -> Iterator[tuple[str, ...]]:
    rest = iter(keys)
    while batch := tuple(islice(rest, BATCH)):
        yield batch


def _literal(text: str) -> str:
    """Text for a pattern of Redis that means itself."""
    return re.sub(r"([*?\[\]\\^-])", r"\\\1", text)


@contextmanager
def _answers() -> Iterator[None]:
    try:
        yield
    except ResponseError as error:
        if str(error).startswith("WRONGTYPE"):
            raise WrongType("the key holds no string") from error
        raise Unavailable(f"Redis refuses: {error}") from error
    except (RedisError, OSError) as error:
        raise Unavailable(f"Redis does not answer: {error}") from error
