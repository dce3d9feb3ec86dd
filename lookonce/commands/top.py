"""``lookonce top``: a running service at a glance, again every few seconds."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from lookonce.client import KEY_VARIABLE
from shared.errors import LookonceError, Unavailable

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Sight:
    """One look at a service.

    Attributes:
        at: seconds, on the monotonic clock.
        status: body of ``/v1/status``.
        samples: of ``/metrics``, by name, then labels.
    """

    at: float
    status: dict[str, Any]
    samples: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples that carry these labels."""
        wanted = set(labels.items())
        return sum(value for found, value in self.samples.get(name, {}).items() if wanted <= found)

    def quantile(self, before: Sight | None, name: str, share: float, **labels: str) -> float | None:
        """Upper bound, seconds, of the bucket in which a share of what came since ``before`` ends; None for nothing."""
        wanted, counts = set(labels.items()), dict[float, float]()
        earlier = {} if before is None else before.samples.get(f"{name}_bucket", {})
        for found, value in self.samples.get(f"{name}_bucket", {}).items():
            if wanted <= found:
                bound = float(dict(found)["le"])
                counts[bound] = counts.get(bound, 0.0) + value - earlier.get(found, 0.0)
        total = max(counts.values(), default=0.0)
        return next((bound for bound in sorted(counts) if counts[bound] >= share * total), None) if total else None


def look(client: httpx.Client) -> Sight:
    """Asks a service.

    Raises:
        Unavailable: it does not answer, or wants an administrator's key.
    """
    try:
        status, metrics = client.get("/v1/status"), client.get("/metrics")
    except httpx.TransportError as error:
        raise Unavailable(f"no service at {client.base_url}: {error}") from error
    for response in (status, metrics):
        if response.status_code != httpx.codes.OK:
            raise Unavailable(f"{response.url} answers {response.status_code}; set {KEY_VARIABLE} to an admin's key")
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(metrics.text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return Sight(time.monotonic(), status.json(), samples)


def view(now: Sight, before: Sight | None) -> Group:
    """Tables of pools, requests and cache; rates need an earlier look."""
    pools = Table("model", "pool", "replicas", "in work", "load", title="pools", title_justify="left")
    requests = Table("model", "requests/s", "errors/s", "p50", "p99", "images/s", "from cache", title_justify="left")
    for model in now.status["models"]:
        name = model["name"]
        for pool in ("encoder", "language"):
            if model[pool]:  # an encoder alone has one pool
                pools.add_row(name, pool, *_pool(model[pool]))
        requests.add_row(name, *_requests(name, now, before))
    cache = now.status["cache"]
    words = "Redis does not answer"
    if cache["reachable"]:
        share = f" of {cache['max_bytes'] / 1e6:,.0f}" if cache["max_bytes"] else ""
        words = (
            f"cache: {cache['keys']} keys, {cache['used_bytes'] / 1e6:,.0f}{share} MB, {cache['evicted_keys']} evicted"
        )
    return Group(pools, requests, words)


def _pool(pool: dict[str, Any]) -> tuple[str, str, str]:
    stats = pool["stats"]
    replicas = " ".join(f"{number} {state.lower()}" for state, number in pool["replicas"].items()) or "none"
    if "kv_cache_usage" in stats:
        work = f"{stats['running']:.0f} running, {stats['waiting']:.0f} waiting"
        return replicas, work, f"KV cache {stats['kv_cache_usage']:.0%}"
    if "waiting_patches" in stats:
        return replicas, f"{stats['in_work']:.0f} images", f"{stats['waiting_patches']:.0f} patches waiting"
    return replicas, "?", "?"


def _requests(model: str, now: Sight, before: Sight | None) -> list[str]:
    def rate(name: str, **labels: str) -> float:
        if before is None:
            return 0.0
        return (now.total(name, **labels) - before.total(name, **labels)) / max(now.at - before.at, 1e-9)

    labels = {dict(found)["status"] for found in now.samples.get("lookonce_requests_total", {})}
    errors = sum(rate("lookonce_requests_total", model=model, status=s) for s in labels if s >= "400")
    images = rate("lookonce_images_total", model=model)
    cached = rate("lookonce_images_total", model=model, source="cache")
    times = [now.quantile(before, "lookonce_request_seconds", share, model=model) for share in (0.5, 0.99)]
    return [
        f"{rate('lookonce_requests_total', model=model):.1f}",
        f"{errors:.1f}",
        *("" if seconds is None else f"≤ {seconds:g} s" for seconds in times),
        f"{images:.1f}",
        f"{cached / images:.0%}" if images else "",
    ]


def top(
    url: Annotated[str, typer.Option(help="A running service.")] = "http://127.0.0.1:8000",
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print, and end.")] = False,
) -> None:
    """Show pools, rates and cache of a running service until Ctrl-C."""
    console, key = Console(), os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=10, trust_env=False) as client:
            before = look(client)
            if once:
                time.sleep(every)
                console.print(view(look(client), before))
                return
            with Live(view(before, None), console=console, screen=True) as live:
                while True:
                    time.sleep(every)
                    now = look(client)
                    live.update(view(now, before), refresh=True)
                    before = now
    except KeyboardInterrupt:
        return
    except LookonceError as error:
        Console(stderr=True).print(f"[red]error:[/] {error.message}", highlight=False)
        raise typer.Exit(1) from error
