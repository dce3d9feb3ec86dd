"""What the settings of pools become in Ray's terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.serve import Application

from lookonce.application import build
from shared.config import load_settings
from tests.lookonce.test_reloading import with_value

CONFIG = Path(__file__).parent.parent.parent / "configs" / "demo.yaml"
CACHE = "redis://cache:6379/0"


def deployments(**changes: Any) -> dict[str, Any]:
    """Deployments by name; changes by path, with "__" for "."."""
    settings = load_settings(CONFIG)
    for path, value in changes.items():
        settings = with_value(settings, path.split("__"), value)
    ingress = build(settings, CACHE)._bound_deployment
    pools = [argument for argument in ingress.init_args if isinstance(argument, Application)]
    return {found.name: found for found in (ingress, *(pool._bound_deployment for pool in pools))}


def test_fractions_of_gpus_reach_ray() -> None:
    """Four towers share a GPU, and a language model takes the rest of another."""
    found = deployments(models__encoder__num_gpus=0.25, models__encoder__num_cpus=0.5, models__language__num_gpus=0.75)
    encoder = found["encoder:lookonce-demo"].ray_actor_options
    assert (encoder["num_gpus"], encoder["num_cpus"]) == (0.25, 0.5)
    assert found["language:lookonce-demo"].ray_actor_options["num_gpus"] == 0.75
    assert found["ingress"].ray_actor_options["num_cpus"] == 0


def test_a_version_changes_with_what_replicas_were_started_with() -> None:
    """Serve takes a random version when it gets none, and would load every model at every change."""
    first, same, other = deployments(), deployments(), deployments(models__encoder__threads=2)
    bounds = deployments(models__encoder__max_replicas=5)
    for name, deployment in first.items():
        assert deployment.version == same[name].version
    assert other["encoder:lookonce-demo"].version != first["encoder:lookonce-demo"].version
    assert other["language:lookonce-demo"].version == first["language:lookonce-demo"].version
    assert bounds["encoder:lookonce-demo"].version == first["encoder:lookonce-demo"].version


def test_replicas_finish_what_they_have_begun() -> None:
    """A8: whoever goes, since its pool shrinks or is replaced, has as long as any request may take."""
    for deployment in deployments(http__request_timeout=77.0).values():
        config = deployment._deployment_config
        assert config.graceful_shutdown_timeout_s > 77
        assert config.max_surge_percent == 100, "the new one first"
