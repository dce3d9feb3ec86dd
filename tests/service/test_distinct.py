"""A13: five thousand pictures that nobody has seen before, and nothing that is kept of them grows past its bound."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
import redis

from benchmarks.soak.memory import MIB, SHARED_MEMORY, processes, shared_memory
from lookonce.service import service
from tests.service.processes import replicas
from tests.service.scaling.kit import body, pools

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PICTURES = int(os.environ.get("LOOKONCE_DISTINCT_PICTURES", "3000"))
#: after so many, caches are at their bounds; from here on memory is measured
WARM = PICTURES // 2
CLIENTS = 8
REDIS_MIB, TIER_MIB, PREFETCH_MIB, OBJECTS_MIB = 32, 16, 16, 80
#: growth of one process's own memory over half of the pictures that passes as an allocator's mood, MiB
SLACK_MIB = 24


def test_memory_is_bounded_over_thousands_of_pictures() -> None:
    settings = pools({"min_replicas": 2, "max_replicas": 2}, {"prefetch_mib": PREFETCH_MIB})
    local = settings.cache.local.model_copy(update={"mib": TIER_MIB})
    cache = settings.cache.model_copy(update={"private_maxmemory_mib": REDIS_MIB, "local": local})
    ray = settings.ray.model_copy(update={"object_store_mib": OBJECTS_MIB})
    settings = settings.model_copy(update={"cache": cache, "ray": ray})
    others = set(SHARED_MEMORY.glob("lookonce-*"))
    with service(settings) as own, redis.Redis.from_url(own.cache_url) as store:
        mine = psutil.Process().pid

        def ask(seed: int) -> int:
            return httpx.post(f"{own.url}/v1/chat/completions", json=body(seed, max_tokens=1), timeout=130).status_code

        def memory() -> dict[str, int]:
            kept = {str(process.pid) for process in replicas().values()}
            return {name: used.own for name, used in processes(mine).items() if name.rpartition(" ")[2] in kept}

        def look() -> None:
            """What has a bound stays within it, at any moment."""
            assert int(store.info("memory")["used_memory"]) <= (REDIS_MIB + 4) * MIB
            tier = [path for path in SHARED_MEMORY.glob("lookonce-*") if path not in others]
            assert sum(file.stat().st_blocks * 512 for path in tier for file in path.iterdir()) <= (TIER_MIB + 2) * MIB
            assert shared_memory(mine) <= (OBJECTS_MIB + TIER_MIB + 32) * MIB

        with ThreadPoolExecutor(CLIENTS) as threads:
            statuses: set[int] = set()
            before: dict[str, int] = {}
            for first in range(0, PICTURES, 250):
                statuses |= set(threads.map(ask, range(2_000_000 + first, 2_000_000 + min(first + 250, PICTURES))))
                look()
                if first + 250 == WARM:
                    before = memory()
        after = memory()
        evicted = int(store.info("stats")["evicted_keys"])
    assert statuses == {httpx.codes.OK}
    assert evicted > PICTURES // 4, "Redis was at its bound all the while"
    assert before.keys() == after.keys(), "nobody was replaced"
    grown = {name: (after[name] - before[name]) / MIB for name in before}
    print({name: f"{after[name] / MIB:.0f} MiB, {growth:+.1f}" for name, growth in grown.items()}, f"{evicted} evicted")
    assert len(grown) >= 4, "encoders, language, engine, ingress"
    assert {name: growth for name, growth in grown.items() if growth > SLACK_MIB} == {}
