"""Changed settings and a running service: which replicas they replace, and which need a restart."""

from __future__ import annotations

from typing import Any

from shared.config import ModelSettings, PoolSettings, Settings

#: what Serve changes in place: bounds, delays and limits of a pool
IN_PLACE = set(PoolSettings.model_fields) - {"num_cpus", "num_gpus"} | {
    "target_patches",
    "target_ongoing",
    "target_kv_use",
    "affinity_slack",
}
#: settings of the machinery below the application, with why they stay
FIXED = {
    "ray": "Ray would have to be started again",
    "http.host": "the listening socket stays open",
    "http.port": "the listening socket stays open",
    "cache.url": "entries, leases and quarantines of the old Redis would be left behind",
    "cache.private_maxmemory_mib": "the private Redis was started with it",
}
#: what embeddings of one model name have in common; replicas of two towers must never answer side by side
IDENTITY = ("checkpoint", "encoder.dtype", "encoder.quantization", "encoder.output")


def encoder_parts(settings: Settings, model: ModelSettings, cache_url: str) -> dict[str, Any]:
    """What an encoder replica was started with; other values need another replica."""
    return _replica_parts(settings, model, cache_url) | {
        "images": settings.images.model_dump(),
        "encoder": model.encoder.model_dump(exclude=IN_PLACE),
    }


def language_parts(settings: Settings, model: ModelSettings, cache_url: str) -> dict[str, Any]:
    """What a language replica was started with; other values need another replica."""
    parts = _replica_parts(settings, model, cache_url)
    return parts | {"language": model.language.model_dump(exclude=IN_PLACE)}


def ingress_parts(settings: Settings, cache_url: str) -> dict[str, Any]:
    """What an ingress replica was started with: it knows of every model, and reads most sections."""
    return settings.model_dump(exclude={"ray", "jobs"}) | {"cache_url": cache_url}


def _replica_parts(settings: Settings, model: ModelSettings, cache_url: str) -> dict[str, Any]:
    return {
        "cache": settings.cache.model_dump(),
        "cache_url": cache_url,
        "log": settings.log.model_dump(),
        "telemetry": settings.telemetry.model_dump(),
        "name": model.name,
        "checkpoint": model.checkpoint,
    }


def refusals(old: Settings, new: Settings) -> list[str]:
    """A sentence for every change that a running service cannot take on; none if it can take them all."""
    found = [f"{path} needs a restart: {why}" for path, why in FIXED.items() if _value(old, path) != _value(new, path)]
    before = {model.name: model for model in old.models}
    for model in new.models:
        if model.name not in before:
            continue
        found += [
            f"models[{model.name}].{path} needs a restart, or the model another name: its embeddings would not be alike"
            for path in IDENTITY
            if _value(before[model.name], path) != _value(model, path)
        ]
    return found


def replaced(old: Settings, new: Settings, cache_url: str) -> list[str]:
    """Pools whose replicas the change replaces one after another, by their names; new and gone models not counted."""
    before = {model.name: model for model in old.models}
    found = []
    for model in new.models:
        if (was := before.get(model.name)) is None:
            continue
        if encoder_parts(old, was, cache_url) != encoder_parts(new, model, cache_url):
            found.append(f"encoder:{model.name}")
        if language_parts(old, was, cache_url) != language_parts(new, model, cache_url):
            found.append(f"language:{model.name}")
    if ingress_parts(old, cache_url) != ingress_parts(new, cache_url):
        found.append("ingress")
    return found


def _value(section: Any, path: str) -> Any:
    for step in path.split("."):
        section = getattr(section, step)
    return section
