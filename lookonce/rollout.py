"""Taking changed settings on while requests run: replicas are replaced one after another, none is cut off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from lookonce.checks import check_models
from lookonce.reloading import refusals, replaced
from lookonce.service import Service, deploy
from shared.config import PoolSettings, Settings
from shared.errors import ConfigError, Unavailable

Report = Callable[[str], None]


def reload(service: Service, new: Settings, report: Report = lambda _: None) -> Service:
    """Makes a running service take on other settings; returns when they are in force.

    Replicas that the change concerns are replaced: a new one starts and takes requests, then an old one finishes what
    it has and ends. Bounds of pools and the like change in place. When the new replicas do not start, the old settings
    come back, whose replicas have gone on meanwhile.

    Args:
        service: as from :func:`lookonce.service.service`, in the process that started it.
        new: the whole tree; ``http.port`` 0 keeps the port.
        report: called with a sentence at every step.

    Raises:
        ConfigError: something in it needs a restart, or there is no room for a second replica; nothing was changed.
        Unavailable: the new replicas did not start; the old settings are in force.
    """
    old = service.settings
    if new.http.port == 0:
        new = new.model_copy(update={"http": new.http.model_copy(update={"port": old.http.port})})
    if found := refusals(old, new):
        raise ConfigError("the settings in force were kept:\n" + "\n".join(f"  {sentence}" for sentence in found))
    check_models(new)
    changed = replaced(old, new, service.cache_url)
    if old.ray.address is None:  # a cluster may add nodes
        _check_room(new, changed)
    report("Replacing replicas of " + ", ".join(changed) if changed else "No replica needs to be replaced")
    names = {model.name for model in new.models}
    both = new.model_copy(update={"models": (*new.models, *(m for m in old.models if m.name not in names))})
    try:
        # first the pools, so that no request meets an ingress whose pools do not follow
        deploy(both, service.cache_url, front=old)
        deploy(new, service.cache_url)
    except Unavailable as error:
        report("The new replicas did not start; going back")
        deploy(old, service.cache_url)
        raise Unavailable(f"the settings in force were kept: {error.message}") from error
    return replace(service, settings=new)


def _check_room(settings: Settings, changed: list[str]) -> None:
    """Refuses to wait forever for a replica that has no room beside the old ones."""
    import ray

    free = ray.available_resources()
    for model in settings.models:
        for kind, pool in (("encoder", model.encoder), ("language", model.language)):
            if f"{kind}:{model.name}" in changed and pool.surge_percent and (lack := lacking(pool, free)):
                raise ConfigError(
                    f"there is no room for another replica of models[{model.name}].{kind}: it needs {lack}; set its "
                    "surge_percent to 0, and requests will wait while its replicas are replaced"
                )


def lacking(pool: PoolSettings, free: Mapping[str, float]) -> str:
    """What one more replica of a pool lacks; empty if it has room."""
    wanted = {"CPU": pool.num_cpus, "GPU": pool.num_gpus}
    short = [
        f"{number:g} {name}, {free.get(name, 0):g} free"
        for name, number in wanted.items()
        if number > free.get(name, 0) + 1e-6
    ]
    return " and ".join(short)
