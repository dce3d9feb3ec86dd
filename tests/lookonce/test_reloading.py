"""Which replicas a change of settings replaces, and which changes a running service refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lookonce.reloading import refusals, replaced
from lookonce.rollout import lacking
from shared.config import PoolSettings, RaySettings, Settings, load_settings

CONFIGS = Path(__file__).parent.parent.parent / "configs"
CACHE = "redis://cache:6379/0"
ENCODER, LANGUAGE, INGRESS = "encoder:lookonce-demo", "language:lookonce-demo", "ingress"


def changed(path: str, value: Any) -> tuple[Settings, Settings]:
    """The demo's settings before and after; a path as in ``models.encoder.dtype``."""
    old = load_settings(CONFIGS / "demo.yaml")
    return old, with_value(old, path.split("."), value)


def with_value(section: Any, steps: list[str], value: Any) -> Any:
    step, *rest = steps
    if rest and step == "models":
        return section.model_copy(update={"models": (with_value(section.models[0], rest, value),)})
    new = with_value(getattr(section, step), rest, value) if rest else value
    return section.model_copy(update={step: new})


@pytest.mark.parametrize(
    ("path", "value", "pools"),
    [
        ("models.encoder.max_replicas", 7, [INGRESS]),
        ("models.encoder.target_patches", 7, [INGRESS]),
        ("models.language.downscale_delay", 7.0, [INGRESS]),
        ("models.language.affinity_slack", 7, [INGRESS]),
        ("models.encoder.threads", 2, [ENCODER, INGRESS]),
        ("models.encoder.num_gpus", 0.5, [ENCODER, INGRESS]),
        ("models.encoder.records", "int8", [ENCODER, INGRESS]),
        ("models.language.max_num_seqs", 7, [LANGUAGE, INGRESS]),
        ("http.max_concurrent", 7, [INGRESS]),
        ("images.max_pixels", 7, [ENCODER, INGRESS]),
        ("cache.timeout", 7.0, [ENCODER, LANGUAGE, INGRESS]),
        ("log.level", "debug", [ENCODER, LANGUAGE, INGRESS]),
        ("telemetry.sample_ratio", 0.5, [ENCODER, LANGUAGE, INGRESS]),
        ("jobs.readers", 7, []),
    ],
)
def test_only_pools_that_a_change_concerns_are_replaced(path: str, value: Any, pools: list[str]) -> None:
    old, new = changed(path, value)
    assert refusals(old, new) == []
    assert replaced(old, new, CACHE) == pools


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("ray", RaySettings(num_cpus=7)),
        ("http.port", 7),
        ("http.host", "0.0.0.0"),
        ("cache.url", "redis://elsewhere:6379/0"),
        ("cache.private_maxmemory_mib", 77),
        ("models.checkpoint", CONFIGS),
        ("models.encoder.dtype", "bfloat16"),
        ("models.encoder.quantization", "int8"),
        ("models.encoder.output", "summary"),
    ],
)
def test_what_needs_a_restart_is_refused_by_name(path: str, value: Any) -> None:
    old, new = changed(path, value)
    (sentence,) = refusals(old, new)
    assert path.removeprefix("models.") in sentence
    assert "restart" in sentence


def test_models_may_come_and_go() -> None:
    old = load_settings(CONFIGS / "demo.yaml")
    other = load_settings(CONFIGS / "demo-pixtral.yaml").models[0]
    both = old.model_copy(update={"models": (*old.models, other)})
    for before, after in ((old, both), (both, old)):
        assert refusals(before, after) == []
        assert replaced(before, after, CACHE) == [INGRESS]


def test_a_second_replica_needs_room() -> None:
    pool = PoolSettings(num_cpus=1, num_gpus=0.25)
    assert lacking(pool, {"CPU": 1, "GPU": 0.25}) == ""
    assert lacking(pool, {"CPU": 1, "GPU": 0.2}) == "0.25 GPU, 0.2 free"
    assert lacking(pool, {}) == "1 CPU, 0 free and 0.25 GPU, 0 free"
