"""The application for those who declare it to Ray instead of running ``lookonce serve``: KubeRay and ``serve deploy``.

``import_path: lookonce.declared:application`` with ``args: {config: /etc/lookonce/served.yaml}``. Ray's own settings
then come from the cluster, and ``ray`` of the file is not looked at. Declare ``proxy_location: Disabled``: the ingress
answers HTTP itself, on every machine where Ray puts a replica of it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel
from ray.serve import Application

from lookonce.application import build
from shared.config import load_settings
from shared.errors import ConfigError


class Arguments(BaseModel):
    """What the declaration gives.

    Attributes:
        config: YAML file with the settings, there on every node.
    """

    config: Path


def application(arguments: Arguments) -> Application:
    """Builds the application; called by Serve's controller.

    Raises:
        ConfigError: the file cannot be used, or names no Redis that all nodes reach.
    """
    settings = load_settings(arguments.config)
    if settings.cache.url is None:
        raise ConfigError(f"{arguments.config}: set cache.url to a Redis that all nodes reach")
    return build(settings, settings.cache.url, head=False)
