"""The settings tree: one YAML file, overridden by environment variables, unknown keys refused.

``LOOKONCE_HTTP__PORT=9000`` overrides ``http.port``; a list is given as JSON.
"""

from shared.config.models import (
    Dtype,
    EncoderOutput,
    EncoderSettings,
    LanguageSettings,
    ModelSettings,
    PoolSettings,
    Quantization,
    RecordEncoding,
    ReplayBackend,
    ReplaySettings,
)
from shared.config.section import Seconds, Section
from shared.config.service import (
    AccessSettings,
    BatchSettings,
    CacheSettings,
    HttpSettings,
    ImageSettings,
    JobSettings,
    LocalSettings,
    LogSettings,
    RaySettings,
    TelemetrySettings,
    TenantSettings,
)
from shared.config.tree import ENV_PREFIX, Settings, load_settings

__all__ = [
    "ENV_PREFIX",
    "AccessSettings",
    "BatchSettings",
    "CacheSettings",
    "Dtype",
    "EncoderOutput",
    "EncoderSettings",
    "HttpSettings",
    "ImageSettings",
    "JobSettings",
    "LanguageSettings",
    "LocalSettings",
    "LogSettings",
    "ModelSettings",
    "PoolSettings",
    "Quantization",
    "RaySettings",
    "RecordEncoding",
    "ReplayBackend",
    "ReplaySettings",
    "Seconds",
    "Section",
    "Settings",
    "TelemetrySettings",
    "TenantSettings",
    "load_settings",
]
