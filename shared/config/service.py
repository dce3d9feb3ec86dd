"""Settings that all models share: cache, images, HTTP, access, Ray, logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from shared.config.section import Seconds, Section


class LocalSettings(Section):
    """The node's own level in front of Redis, in shared memory; processes with the same Redis and user share it.

    Attributes:
        mib: memory for records, MiB; 0 is off. It never takes more than half of what ``/dev/shm`` has free.
        idle: a record that Redis was not seen to have for so long is removed, seconds.
        grace: while Redis is silent, a record is used so long after Redis was last seen to have it, seconds; 0: never.
    """

    mib: int = Field(0, ge=0)
    idle: Seconds = 600.0
    grace: float = Field(60.0, ge=0)


class CacheSettings(Section):
    """The embedding cache.

    Attributes:
        url: ``redis://``, ``rediss://``, ``unix://``, ``redis+sentinel://`` or ``rediss+sentinel://`` URL; None
            starts a private Redis on a unix socket.
        private_maxmemory_mib: memory of that private Redis, MiB; least recently used entries go first.
        timeout: deadline of one operation, seconds.
        ttl: life of an entry, seconds; None leaves it to eviction.
        lease: how long after an encoder's death another takes over the image that it worked on, seconds.
        local: the node's own level in front of it.
    """

    url: str | None = None
    private_maxmemory_mib: int = Field(512, ge=16)
    timeout: Seconds = 0.5
    ttl: Seconds | None = None
    lease: Seconds = 10.0
    local: LocalSettings = LocalSettings()


class ImageSettings(Section):
    """Limits on images, all checked before memory is spent.

    Attributes:
        max_per_request: images in one request.
        max_bytes: encoded size of one image, bytes.
        max_pixels: width × height of one image; Isaac's own ceiling is 60 megapixels.
        max_request_pixels: sum over the images of one request.
        max_frames: frames of an animation.
        fetch_timeout: seconds for one URL, redirects included.
        max_redirects: hops.
        allow_private_hosts: permit URLs that lead to loopback, private or link-local addresses.
        allowed_hosts: when not empty, only these host names (exact, or ``.example.org`` for subdomains).
        file_roots: folders below which ``file://`` URLs may be read; none by default.
        quarantine_after: encoder processes that may die over one image; then it is refused (422).
        quarantine_seconds: how long these deaths are remembered.
    """

    max_per_request: int = Field(16, ge=1)
    max_bytes: int = Field(32 << 20, ge=1)
    max_pixels: int = Field(60_000_000, ge=1)
    max_request_pixels: int = Field(240_000_000, ge=1)
    max_frames: int = Field(1000, ge=1)
    fetch_timeout: Seconds = 10.0
    max_redirects: int = Field(5, ge=0)
    allow_private_hosts: bool = False
    allowed_hosts: tuple[str, ...] = ()
    file_roots: tuple[Path, ...] = ()
    quarantine_after: int = Field(2, ge=1)
    quarantine_seconds: Seconds = 3600.0


class HttpSettings(Section):
    """The HTTP endpoint.

    Attributes:
        host, port: address to listen on.
        max_body_bytes: request body limit.
        replicas: processes that answer HTTP; limits of requests and rates count in each by itself.
        max_concurrent: requests in work at once in each of them; more are answered 429.
        request_timeout: deadline of one request, seconds.
        keep_alive: an idle connection is closed after so long, seconds; longer than a load balancer in front keeps it.
    """

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    max_body_bytes: int = Field(64 << 20, ge=1)
    replicas: int = Field(1, ge=1)
    max_concurrent: int = Field(512, ge=1)
    request_timeout: Seconds = 120.0
    keep_alive: Seconds = 75.0


class TenantSettings(Section):
    """Somebody who may ask, known by API keys. Tenants share neither cache entries nor their timing.

    Attributes:
        name: shown in logs.
        keys: SHA-256 of each API key, hex, as ``lookonce key`` prints it; the keys themselves stand nowhere.
        salt: mixed into the identity of the tenant's images; None takes the name. Tenants of one salt share images.
        models: names of the models that it may use; empty for all.
        requests_per_minute: rate limit over all its keys; None for none.
        admin: whether its keys open ``/metrics`` and ``/v1/status``.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    keys: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field(min_length=1)
    salt: str | None = Field(None, min_length=1)
    models: tuple[str, ...] = ()
    requests_per_minute: float | None = Field(None, gt=0)
    admin: bool = False


class AccessSettings(Section):
    """Who may ask.

    Attributes:
        tenants: with none, everybody who reaches the port may ask, and all share one cache.
        cors_origins: web origins whose pages may call the API.
    """

    tenants: tuple[TenantSettings, ...] = ()
    cors_origins: tuple[str, ...] = ()

    @field_validator("tenants")
    @classmethod
    def _distinct(cls, tenants: tuple[TenantSettings, ...]) -> tuple[TenantSettings, ...]:
        for what, values in (
            ("tenant names", [tenant.name for tenant in tenants]),
            ("API keys of tenants", [key for tenant in tenants for key in tenant.keys]),
        ):
            if len(set(values)) < len(values):
                raise ValueError(f"{what} must differ")
        return tenants


class BatchSettings(Section):
    """Files and batches: many requests in one file, answered when there is room.

    Attributes:
        folder: where they are kept, on a disk that every ingress replica sees; None takes a temporary one, which goes
            with the ingress.
        concurrency: lines in work at once, over all batches.
        concurrency_beside_others: the same while interactive requests are in work.
        max_file_bytes: size of one file, bytes.
        max_tenant_bytes: size of all files of one tenant, bytes.
        max_requests: lines of one batch.
    """

    folder: Path | None = None
    concurrency: int = Field(16, ge=1)
    concurrency_beside_others: int = Field(1, ge=1)
    max_file_bytes: int = Field(200 << 20, ge=1)
    max_tenant_bytes: int = Field(10 << 30, ge=1)
    max_requests: int = Field(50_000, ge=1)


class RaySettings(Section):
    """Where the actors run.

    Attributes:
        address: an existing cluster (``auto`` or ``ray://…``); None starts a private one on this machine.
        num_cpus: logical CPUs of the private cluster.
        object_store_mib: its object store, MiB.
    """

    address: str | None = None
    num_cpus: int = Field(8, ge=1)
    object_store_mib: int = Field(256, ge=80)


class LogSettings(Section):
    """Structured logs: one JSON object a line, or plain text."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    json_lines: bool = False


class TelemetrySettings(Section):
    """OpenTelemetry traces.

    Attributes:
        otlp_endpoint: base URL of a collector that takes OTLP over HTTP, as ``http://collector:4318``; None for no
            traces. Headers for it come from ``OTEL_EXPORTER_OTLP_HEADERS``, so that no secret stands in the file.
        sample_ratio: share of requests that are traced, 0 to 1; a client's own ``traceparent`` decides for itself.
    """

    otlp_endpoint: str | None = Field(None, pattern=r"^https?://")
    sample_ratio: float = Field(1.0, ge=0, le=1)


class JobSettings(Section):
    """How captioning jobs flow through Ray Data.

    Attributes:
        readers: fragments of the source that are read at once.
        min_workers, max_workers: actors that caption rows; the pool grows while rows wait.
        in_flight: rows that one worker has in work: read, being encoded, being answered.
        row_timeout: deadline of one try of a row, seconds.
        patience: how long nothing may succeed before the job stops, seconds.
        shard_rows, shard_seconds: a part of the output is written after so many rows or seconds.
    """

    readers: int = Field(2, ge=1)
    min_workers: int = Field(1, ge=1)
    max_workers: int = Field(1, ge=1)
    in_flight: int = Field(64, ge=1)
    row_timeout: Seconds = 300.0
    patience: Seconds = 300.0
    shard_rows: int = Field(1000, ge=1)
    shard_seconds: Seconds = 15.0

    @model_validator(mode="after")
    def _bounds(self) -> JobSettings:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers {self.min_workers} is above max_workers {self.max_workers}")
        return self
