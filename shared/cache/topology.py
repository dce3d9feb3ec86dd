"""Which arrangements of Redis the cache can use: one server that takes writes, under one address."""

from __future__ import annotations

from shared.cache.threads import EmbeddingCache
from shared.config import CacheSettings
from shared.errors import ConfigError

CLUSTER_REFUSED = (
    "this is a node of a Redis Cluster, which refuses most of our keys; "
    "point cache.url (redis_url of RedisECConnector) at one Redis outside of any cluster"
)


def is_cluster(told: dict[str, str]) -> bool:
    """Whether a Redis that told this of itself is a node of a Redis Cluster."""
    return told.get("cluster_enabled") == "1"


def refuse_cluster(cache: EmbeddingCache) -> None:
    """Asks the Redis of a cache what it is; one that does not answer now is nobody's fault.

    Raises:
        ConfigError: it is a node of a cluster.
    """
    if is_cluster(cache.info()):
        raise ConfigError(CLUSTER_REFUSED)


def check_topology(settings: CacheSettings, url: str) -> None:
    """Refuses a Redis Cluster, as :func:`refuse_cluster` does.

    Raises:
        ConfigError: it is a node of a cluster, or the URL cannot be used.
    """
    cache = EmbeddingCache(settings, url)
    try:
        refuse_cluster(cache)
    finally:
        cache.close()
