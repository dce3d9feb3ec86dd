"""A look as lines for a pipe or a file: ``key=value``, one line a model and one for the cache."""

from __future__ import annotations

from typing import Any

from lookonce.commands.sight import Sight, traffic

#: figures of a pool's replicas, as ``/v1/status`` names them
FIGURES = {
    "encoder": ("in_work", "waiting_patches"),
    "language": ("running", "waiting", "kv_cache_usage"),
}


def lines(now: Sight, before: Sight | None, at: str) -> list[str]:
    """What :func:`~lookonce.commands.top.view` shows, for ``grep`` and ``awk``; what is not known is left out.

    Args:
        now, before: two looks.
        at: time of the later one, which begins every line.
    """
    models = [_line({"at": at} | _model(model, now, before)) for model in now.status["models"]]
    return [*models, _line({"at": at} | _cache(now.status["cache"]))]


def _model(model: dict[str, Any], now: Sight, before: Sight | None) -> dict[str, Any]:
    asked = traffic(model["name"], now, before)
    fields: dict[str, Any] = {
        "model": model["name"],
        "requests_per_second": asked.requests,
        "errors_per_second": asked.errors,
        "p50_seconds": asked.median,
        "p99_seconds": asked.slowest,
        "images_per_second": asked.images,
        "from_cache": asked.cached,
    }
    for kind, names in FIGURES.items():
        if (pool := model[kind]) is None:  # an encoder alone has one pool
            continue
        fields[f"{kind}.replicas"] = pool["replicas"].get("RUNNING", 0)
        for name in names:
            fields[f"{kind}.{name}"] = pool["stats"].get(name)
    return fields


def _cache(cache: dict[str, Any]) -> dict[str, Any]:
    figures = {name: cache.get(name) for name in ("keys", "used_bytes", "max_bytes", "evicted_keys")}
    return {"cache": "reachable" if cache["reachable"] else "unreachable"} | figures


def _line(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={_text(value)}" for name, value in fields.items() if value is not None)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
