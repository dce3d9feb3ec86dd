"""``ec_connector_extra_config`` of the connector for stock vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from shared.config import CacheSettings, LocalSettings, RecordEncoding
from shared.config.section import Seconds, Section
from shared.errors import ConfigError


class ConnectorSettings(Section):
    """What an operator may set.

    Attributes:
        redis_url: URL of the cache, as in ``cache.url`` of the service.
        timeout: deadline of one operation, seconds; a request whose image is looked up waits no longer per batch.
        ttl: life of an entry, seconds; None leaves it to Redis's eviction.
        prefetch_mib: host memory for embeddings that requests need or needed, MiB.
        save_mib: host memory for embeddings on their way to Redis, MiB; what exceeds it is not saved.
        local_mib: shared memory of this node for records that its servers have loaded, MiB; see ``cache.local``.
        records: how new embeddings stand in Redis; see ``encoder.records`` of the service.
        fingerprint: name of the weights, for weights that are not in local files; it must change whenever they do.
    """

    redis_url: str
    timeout: Seconds = 0.5
    ttl: Seconds | None = None
    prefetch_mib: int = Field(1024, ge=1)
    save_mib: int = Field(256, ge=1)
    local_mib: int = Field(0, ge=0)
    records: RecordEncoding = "raw"
    fingerprint: str | None = Field(None, min_length=1)

    @property
    def cache(self) -> CacheSettings:
        """The cache's own settings."""
        return CacheSettings(timeout=self.timeout, ttl=self.ttl, local=LocalSettings(mib=self.local_mib))


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """Reads ``ec_connector_extra_config``.

    Raises:
        ConfigError: an unknown key or a wrong value; names it.
    """
    try:
        return ConnectorSettings(**extra)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError("\n".join(["ec_connector_extra_config cannot be used:", *lines])) from error
