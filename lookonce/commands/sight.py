"""One look at a running service, and what has happened between two looks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lookonce.client import KEY_VARIABLE
from shared.errors import Unavailable

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


@dataclass(frozen=True)
class Traffic:
    """What one model was asked between two looks.

    Attributes:
        requests, errors: per second; errors are those of 400 and above.
        median, slowest: upper bounds, seconds, of the buckets of the median and the 99th percentile; None for nothing.
        images: per second.
        cached: share of them that needed no encoder, 0 to 1; None for no images.
    """

    requests: float
    errors: float
    median: float | None
    slowest: float | None
    images: float
    cached: float | None


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


def traffic(model: str, now: Sight, before: Sight | None) -> Traffic:
    """Of one model; nothing without an earlier look."""

    def rate(name: str, **labels: str) -> float:
        if before is None:
            return 0.0
        return (now.total(name, **labels) - before.total(name, **labels)) / max(now.at - before.at, 1e-9)

    statuses = {dict(found)["status"] for found in now.samples.get("lookonce_requests_total", {})}
    images = rate("lookonce_images_total", model=model)
    return Traffic(
        requests=rate("lookonce_requests_total", model=model),
        errors=sum(rate("lookonce_requests_total", model=model, status=code) for code in statuses if code >= "400"),
        median=now.quantile(before, "lookonce_request_seconds", 0.5, model=model),
        slowest=now.quantile(before, "lookonce_request_seconds", 0.99, model=model),
        images=images,
        cached=rate("lookonce_images_total", model=model, source="cache") / images if images else None,
    )
