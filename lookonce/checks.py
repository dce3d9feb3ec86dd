"""What is refused before minutes go into loading models."""

from __future__ import annotations

from lookonce.listening import listen
from shared.cache.topology import check_topology
from shared.config import Settings
from shared.errors import ConfigError
from shared.families import family_of, read_config


def check_port(host: str, port: int) -> None:
    """Refuses a port that is taken, before minutes go into loading models.

    Raises:
        ConfigError: says how to choose another.
    """
    try:
        listen(host, port).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port or http.port"
        ) from error


def check_models(settings: Settings) -> None:
    """Refuses models that cannot be served, before anything is started. An encoder alone gives embeddings.

    Raises:
        ConfigError: no such folder.
        CheckpointError: a folder whose configuration is of no known family.
    """
    for model in settings.models:
        if not model.checkpoint.is_dir():
            if settings.ray.address:  # another machine's folder, perhaps
                continue
            raise ConfigError(f"model {model.name}: there is no folder {model.checkpoint}; set its checkpoint")
        family_of(read_config(model.checkpoint), model.checkpoint)


def check_cache(settings: Settings) -> None:
    """Refuses a Redis that the service could not use.

    Raises:
        ConfigError: a private one for several machines, or a Redis Cluster.
    """
    if settings.cache.url is not None:
        check_topology(settings.cache, settings.cache.url)
    elif settings.ray.address:
        raise ConfigError(
            "a private Redis serves one machine; with ray.address set cache.url to a Redis that all nodes reach"
        )
