"""The images of a request share their round trips: counted by a real Redis, whose event loop reads a pipeline once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.cache.together import Together
from shared.keys import alias_key, lease_key
from shared.local_redis import LocalRedis
from tests.shared.redis_kit import DIGEST, cache_of, key, proxy, record, until

IMAGES = 8
KEYS = [key(number) for number in range(IMAGES)]


def reads(raw: Any) -> int:
    """Reads of all clients' sockets that Redis has done."""
    return int(raw.info("stats")["total_reads_processed"])


async def test_images_of_a_request_share_their_round_trips(redis_url: str, raw: Any) -> None:
    """Eight images: one round trip for all aliases, one for all headers, one for all strikes, one for all leases."""
    aliases = [alias_key(f"{number:064x}") for number in range(IMAGES)]
    async with cache_of("loop", redis_url) as cache:
        for name, alias in zip(range(4), aliases, strict=False):
            await cache.put(key(name), record(name), alias=alias, digest=DIGEST)
        raw.set("strikes:3", 2)
        asking = reads(raw)
        one = reads(raw) - asking  # of INFO itself

        async def trips(*calls: Any) -> tuple[int, list[Any]]:
            before = reads(raw)
            found = await asyncio.gather(*calls)
            return reads(raw) - before - one, found

        number, found = await trips(*map(cache.resolve_alias, aliases))
        assert (number, found) == (1, [DIGEST] * 4 + [None] * 4)
        number, found = await trips(*map(cache.describe, KEYS))
        assert number == 1
        assert [header is not None for header in found] == [True] * 4 + [False] * 4
        number, found = await trips(*(cache.counted(f"strikes:{number}") for number in range(IMAGES)))
        assert (number, found) == (1, [0, 0, 0, 2, 0, 0, 0, 0])
        await cache.claim(KEYS[2], "another")
        number, found = await trips(*(cache.claim(name, "me") for name in KEYS))
        assert (number, found) == (1, [True, True, False, True, True, True, True, True])
        assert raw.get(lease_key(KEYS[2])) == b"another"
        assert all(0 < raw.pttl(lease_key(name)) <= 10_000 for name in KEYS)
        # one after the other they cost one each, as they did for every image before
        before = reads(raw)
        for name in KEYS:
            await cache.describe(name)
        assert reads(raw) - before - one == IMAGES


async def test_two_owners_that_claim_in_one_turn(redis_url: str) -> None:
    async with cache_of("loop", redis_url) as cache:
        claims = [(name, owner) for name in KEYS for owner in ("one", "two")]
        taken = await asyncio.gather(*(cache.claim(*claim) for claim in claims))
        assert taken == [True, False] * IMAGES


async def test_a_damaged_entry_among_others(redis_url: str, raw: Any) -> None:
    """Each is checked by itself."""
    async with cache_of("loop", redis_url) as cache:
        for number, name in enumerate(KEYS):
            await cache.put(name, record(number))
        raw.setrange(KEYS[3], 20, b"damage")
        raw.delete(KEYS[5])
        raw.lpush(KEYS[5], "no string")
        found = await asyncio.gather(*map(cache.describe, [*KEYS, KEYS[0]]))
        assert [number for number, header in enumerate(found) if header is None] == [3, 5]
        assert not raw.exists(KEYS[3], KEYS[5])
        assert sum(cache.stats.snapshot()["corrupt"].values()) == 2


async def test_a_caller_that_leaves_leaves_the_others_theirs(redis_server: LocalRedis, tmp_path: Path) -> None:
    """The last one to leave ends the call and closes its connection."""
    async with proxy(redis_server.socket, False, tmp_path) as (between, url), cache_of("loop", url) as cache:
        await cache.put(KEYS[0], record(0))
        await cache.describe(KEYS[0])
        accepted = between.accepted
        between.replies = 10
        calls = [asyncio.create_task(cache.describe(KEYS[0])) for _ in range(3)]
        await until(lambda: between.held)
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        between.release()
        assert await calls[1] == await calls[2] is not None
        assert between.accepted == accepted
        between.replies = 10
        calls = [asyncio.create_task(cache.describe(KEYS[0])) for _ in range(3)]
        await until(lambda: between.held)
        for call in calls:
            call.cancel()
        assert all(
            isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*calls, return_exceptions=True)
        )
        between.release()
        assert await cache.describe(KEYS[0]) is not None
        assert between.accepted > accepted


async def test_a_redis_that_is_gone_costs_all_of_them_one_timeout(redis_server: LocalRedis) -> None:
    async with cache_of("loop", redis_server.url, timeout=0.3) as cache:
        await cache.ping()
        redis_server.stop()
        begin = asyncio.get_running_loop().time()
        assert await asyncio.gather(*map(cache.describe, KEYS)) == [None] * IMAGES
        assert await asyncio.gather(*(cache.claim(name, "me") for name in KEYS)) == [True] * IMAGES
        assert asyncio.get_running_loop().time() - begin < 1.5


async def test_what_a_call_raises_reaches_all() -> None:
    async def carry(numbers: Sequence[int]) -> list[int]:
        raise LookupError(str(len(numbers)))

    together: Together[int, int] = Together(carry)
    found = await asyncio.gather(*map(together, range(3)), return_exceptions=True)
    assert [str(error) for error in found] == ["3"] * 3
    with pytest.raises(LookupError, match="1"):
        await together(1)
