"""What the page and operators see at a glance: pools, images and cache."""

from __future__ import annotations

import asyncio
from typing import Any

from llm_service.api.chat import ImageService
from llm_service.api.endpoint import Endpoint
from llm_service.api.pools import EncoderPool, LanguagePool, PoolStatus
from shared import metrics


async def service_status(endpoint: Endpoint) -> dict[str, Any]:
    """State of every model's pools, of the images that this ingress saw, and of the cache."""
    models = [_model(name, service) for name, service in endpoint.services.items()]
    bodies, info = await asyncio.gather(asyncio.gather(*models), endpoint.cache.info())
    return {"models": bodies, "cache": _cache(info)}


async def unready(endpoint: Endpoint) -> list[str]:
    """Names of the pools in which no replica would take a request."""
    pools = {
        f"{kind}:{name}": pool
        for name, service in endpoint.services.items()
        for kind, pool in (("encoder", service.images.encoder), ("language", service.language))
        if pool is not None
    }
    ready = await asyncio.gather(*(pool.ready() for pool in pools.values()))
    return [name for name, good in zip(pools, ready, strict=True) if not good]


async def _model(name: str, service: ImageService) -> dict[str, Any]:
    pools: list[EncoderPool | LanguagePool] = [service.images.encoder]
    if service.language is not None:
        pools.append(service.language)
    encoder, *language = map(_pool, await asyncio.gather(*(pool.status() for pool in pools)))
    return {"name": name, "encoder": encoder, "language": language[0] if language else None, "images": _images(name)}


def _pool(status: PoolStatus) -> dict[str, Any]:
    return {"replicas": status.replicas, "stats": status.stats}


def _images(model: str) -> dict[str, float]:
    """Images of this ingress's requests, by where their embedding came from."""
    counts = {"cache": 0.0, "encoder": 0.0}
    for metric in metrics.IMAGES.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total") and sample.labels["model"] == model:
                counts[sample.labels["source"]] += sample.value
    return counts


def _cache(info: dict[str, str]) -> dict[str, Any]:
    if not info:
        return {"reachable": False}
    return {
        "reachable": True,
        "used_bytes": int(info.get("used_memory", 0)),
        "max_bytes": int(info.get("maxmemory", 0)),
        "policy": info.get("maxmemory_policy", "unknown"),
        "keys": int(info.get("keys", 0)),
        "evicted_keys": int(info.get("evicted_keys", 0)),
    }
