"""The settings tree: one YAML file, overridden by environment variables, unknown keys refused.

``LOOKONCE_HTTP__PORT=9000`` overrides ``http.port``; a list is given as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shared.errors import ConfigError

ENV_PREFIX = "LOOKONCE_"
Dtype = Literal["float32", "bfloat16", "float16"]
ReplayBackend = Literal["eager", "compiled", "cuda-graph"]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """Base of every section: unknown keys are an error, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolSettings(Section):
    """Replicas of one pool and what each takes from Ray.

    Attributes:
        min_replicas, max_replicas: bounds of Ray Serve's autoscaling; equal numbers switch it off.
        target_ongoing: requests in work per replica that autoscaling aims at.
        max_ongoing: requests that one replica takes at once.
        num_cpus, num_gpus: Ray resources of one replica; fractions are allowed.
    """

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    target_ongoing: float = Field(8, gt=0)
    max_ongoing: int = Field(64, ge=1)
    num_cpus: float = Field(1, ge=0)
    num_gpus: float = Field(0, ge=0)

    @model_validator(mode="after")
    def _bounds(self) -> PoolSettings:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        return self


class ReplaySettings(Section):
    """Forwards of fixed size.

    Attributes:
        backend: how the forward of a budget runs: ``eager`` as it is, ``compiled`` by torch.compile (needs a C++
            compiler on CPU), ``cuda-graph`` captured on a CUDA device.
        budgets: patches of each fixed size; none takes powers of two between the smallest useful picture and
            ``max_batch_patches``, except for ``eager``, which then runs every batch at its own size.
    """

    backend: ReplayBackend = "eager"
    budgets: tuple[Annotated[int, Field(ge=1)], ...] = ()


class EncoderSettings(PoolSettings):
    """One model's encoder pool.

    Attributes:
        dtype: dtype of the tower and of the stored embeddings.
        device: torch device of each replica.
        threads: torch threads for the tower; 0 leaves torch's default.
        preprocess_threads: host threads for decoding and preprocessing.
        max_batch_patches: patches in one forward, at most; a larger single image runs alone.
        batch_wait_ms: how long a batch waits for company.
        max_queue: images that may wait in one replica before it answers "busy".
        replay: forwards of fixed size.
    """

    dtype: Dtype = "float32"
    device: str = "cpu"
    threads: int = Field(0, ge=0)
    preprocess_threads: int = Field(2, ge=1)
    max_batch_patches: int = Field(16384, ge=1)
    batch_wait_ms: float = Field(2.0, ge=0)
    max_queue: int = Field(256, ge=1)
    replay: ReplaySettings = ReplaySettings()

    @model_validator(mode="after")
    def _device_for_backend(self) -> EncoderSettings:
        if self.replay.backend == "cuda-graph" and not self.device.startswith("cuda"):
            raise ValueError(f"replay.backend cuda-graph needs a CUDA device, device is {self.device}")
        return self


class LanguageSettings(PoolSettings):
    """One model's language pool, handed to vLLM.

    Attributes:
        dtype: dtype of the language model.
        max_model_len: context, tokens; None takes the checkpoint's.
        max_num_seqs: sequences decoded together.
        max_num_batched_tokens: tokens of one engine step; None takes vLLM's default.
        gpu_memory_utilization: share of the GPU that vLLM may take.
        kv_cache_gib: size of the KV cache on CPU, GiB.
        enforce_eager: no compilation and no CUDA graphs in the engine: starts faster, decodes slower.
        prefix_caching: vLLM's prefix cache.
        seed: seed of the engine.
    """

    dtype: Dtype = "float32"
    max_model_len: int | None = Field(None, ge=16)
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=16)
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    kv_cache_gib: int = Field(1, ge=1)
    enforce_eager: bool = True
    prefix_caching: bool = True
    seed: int = 0


class ModelSettings(Section):
    """One served model.

    Attributes:
        name: the name that clients send.
        checkpoint: folder of the checkpoint; a relative path is relative to the YAML file.
        encoder, language: its two pools.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")
    checkpoint: Path
    encoder: EncoderSettings = EncoderSettings()
    language: LanguageSettings = LanguageSettings()


class CacheSettings(Section):
    """The embedding cache.

    Attributes:
        url: ``redis://``, ``rediss://`` or ``unix://`` URL; None starts a private Redis on a unix socket.
        private_maxmemory_mib: memory of that private Redis, MiB; least recently used entries go first.
        timeout: deadline of one operation, seconds.
        ttl: life of an entry, seconds; None leaves it to eviction.
        lease: how long one encoder may work on an image before another takes over, seconds.
    """

    url: str | None = None
    private_maxmemory_mib: int = Field(512, ge=16)
    timeout: Seconds = 0.5
    ttl: Seconds | None = None
    lease: Seconds = 30.0


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


class HttpSettings(Section):
    """The HTTP endpoint.

    Attributes:
        host, port: address to listen on.
        max_body_bytes: request body limit.
        max_concurrent: requests in work at once; more are answered 429.
        request_timeout: deadline of one request, seconds.
    """

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    max_body_bytes: int = Field(64 << 20, ge=1)
    max_concurrent: int = Field(512, ge=1)
    request_timeout: Seconds = 120.0


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


class Settings(BaseSettings):
    """The whole tree."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_nested_delimiter="__")

    models: tuple[ModelSettings, ...] = Field(min_length=1)
    cache: CacheSettings = CacheSettings()
    images: ImageSettings = ImageSettings()
    http: HttpSettings = HttpSettings()
    access: AccessSettings = AccessSettings()
    ray: RaySettings = RaySettings()
    log: LogSettings = LogSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over the file, which comes in as the initial values."""
        return env_settings, init_settings

    @field_validator("models")
    @classmethod
    def _distinct(cls, models: tuple[ModelSettings, ...]) -> tuple[ModelSettings, ...]:
        names = [model.name for model in models]
        if len(set(names)) < len(names):
            raise ValueError(f"model names must differ: {names}")
        return models

    def model(self, name: str) -> ModelSettings:
        """The model of that name.

        Raises:
            ConfigError: no such model.
        """
        for model in self.models:
            if model.name == name:
                return model
        raise ConfigError(f"no model named {name!r}; configured: {', '.join(m.name for m in self.models)}")


def load_settings(path: Path) -> Settings:
    """Reads a YAML file and applies the environment's overrides.

    Raises:
        ConfigError: unreadable file, unknown key or wrong value; names the key.
    """
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, found {type(tree).__name__}")
    try:
        settings = Settings(**tree)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ConfigError("\n".join([f"{path} cannot be used:", *lines])) from error
    root = path.resolve().parent
    models = tuple(m.model_copy(update={"checkpoint": (root / m.checkpoint).resolve()}) for m in settings.models)
    return settings.model_copy(update={"models": models})
