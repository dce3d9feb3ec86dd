"""The whole tree and how it is read."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shared.config.models import ModelSettings
from shared.config.service import (
    AccessSettings,
    BatchSettings,
    CacheSettings,
    HttpSettings,
    ImageSettings,
    JobSettings,
    LogSettings,
    RaySettings,
    TelemetrySettings,
)
from shared.errors import ConfigError

ENV_PREFIX = "LOOKONCE_"


class Settings(BaseSettings):
    """The whole tree."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_nested_delimiter="__")

    models: tuple[ModelSettings, ...] = Field(min_length=1)
    cache: CacheSettings = CacheSettings()
    images: ImageSettings = ImageSettings()
    http: HttpSettings = HttpSettings()
    access: AccessSettings = AccessSettings()
    batches: BatchSettings = BatchSettings()
    ray: RaySettings = RaySettings()
    jobs: JobSettings = JobSettings()
    log: LogSettings = LogSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

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
