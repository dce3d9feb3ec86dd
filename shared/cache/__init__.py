"""The embedding cache on Redis: :class:`AsyncEmbeddingCache` for event loops, :class:`EmbeddingCache` for threads.

The cache is an optimisation: whatever Redis does, no operation raises or blocks beyond its deadline. A fault is a miss
(or a False) that is counted.

``steps``        what each operation says to Redis and makes of the answers; no I/O
``stats``        counters of one cache object
``breaker``      when not to ask Redis at all
``connections``  pinned options of redis-py, deadlines of the threads' client
``aio``          the steps on an event loop
``threads``      the steps in threads
"""

from shared.cache.aio import AsyncEmbeddingCache
from shared.cache.stats import CacheStats
from shared.cache.threads import EmbeddingCache

__all__ = ["AsyncEmbeddingCache", "CacheStats", "EmbeddingCache"]
