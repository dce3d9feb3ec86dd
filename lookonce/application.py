"""The Ray Serve application: one ingress, and an encoder and a language pool for every model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any

from blake3 import blake3
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from encoder_service.deployment import EncoderReplica
from llm_service.api.app import create_app
from llm_service.api.chat import ImageService, ModelService
from llm_service.api.endpoint import Backend
from llm_service.api.ray_pools import RayEncoderPool, RayLanguagePool
from llm_service.api.vision import ImageResolver
from llm_service.deployment import LanguageReplica
from llm_service.prompts import prompt_builder
from lookonce.autoscaling import EncoderPolicy, LanguagePolicy
from lookonce.ingress import IngressReplica
from lookonce.reloading import encoder_parts, ingress_parts, language_parts
from lookonce.routing import AffinityRouter
from shared import log, metrics, tracing
from shared.cache import AsyncEmbeddingCache
from shared.config import EncoderSettings, LanguageSettings, ModelSettings, PoolSettings, Settings
from shared.families import context_length, has_language, size_rule
from shared.fetch import ImageFetcher
from shared.sizing_radio import ONE_ROW

APPLICATION = "lookonce"
INGRESS = "ingress"
#: what Ray calls the one node that is never taken away
HEAD = "node:__internal_head__"
#: Serve's defaults find a wedged replica only after 90 to 120 s
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 10.0
#: a replica that goes, since its pool shrinks or its settings change, finishes what it has begun; looked at so often
DRAIN_LOOK_S = 0.2
#: it is ended so long after the last request in it must have met its deadline
DRAIN_MARGIN_S = 5.0


def encoder_name(model: ModelSettings) -> str:
    """Name of a model's encoder deployment."""
    return f"encoder:{model.name}"


def language_name(model: ModelSettings) -> str:
    """Name of a model's language deployment."""
    return f"language:{model.name}"


def build(settings: Settings, cache_url: str, front: Settings | None = None, *, head: bool = True) -> Application:
    """The application, ready for ``serve.run``.

    Args:
        settings: the whole tree.
        cache_url: URL of the embedding cache, the same for every replica.
        front: settings of the ingress, while it still knows others than the pools.
        head: whether HTTP is answered on the cluster's head only, or wherever Ray finds room.
    """
    front = front or settings
    pools = []
    common = _common(settings)
    for model in settings.models:
        encoder = _deployment(EncoderReplica, encoder_name(model), model.encoder, _encoder_policy(model.encoder))
        encoder = encoder.options(**common, **_version(encoder_parts(settings, model, cache_url)))
        pools.append(encoder.bind(settings, model, cache_url))
        if not has_language(model.checkpoint):
            continue
        language = _deployment(LanguageReplica, language_name(model), model.language, _language_policy(model.language))
        language = language.options(
            request_router_config=_router(model.language),
            **common,
            **_version(language_parts(settings, model, cache_url)),
        )
        pools.append(language.bind(settings, model, cache_url))

    options: dict[str, Any] = {"num_cpus": 0}
    if head:
        options["resources"] = {HEAD: 0.001}
    ingress = serve.deployment(
        IngressReplica,
        name=INGRESS,
        num_replicas=front.http.replicas,
        ray_actor_options=options,
        max_surge_percent=100,
        user_config={},
    ).options(**_common(front), **_version(ingress_parts(front, cache_url)))
    return ingress.bind(front, cache_url, *pools)


def _common(settings: Settings) -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": DRAIN_LOOK_S,
        "graceful_shutdown_timeout_s": settings.http.request_timeout + DRAIN_MARGIN_S,
    }


def _version(parts: Any) -> dict[str, Any]:
    """Serve replaces the replicas of a deployment whose version has changed, and no others.

    Without one of ours it would take a random one, and every change of settings would load every model again.
    """
    return {"version": blake3(repr(parts).encode()).hexdigest(), "_internal": True}


def _encoder_policy(pool: EncoderSettings) -> AutoscalingPolicy:
    return AutoscalingPolicy(policy_function=EncoderPolicy, policy_kwargs={"target_patches": pool.target_patches})


def _language_policy(pool: LanguageSettings) -> AutoscalingPolicy:
    targets = {"target_requests": pool.target_ongoing, "target_kv_use": pool.target_kv_use}
    return AutoscalingPolicy(policy_function=LanguagePolicy, policy_kwargs=targets)


def _router(pool: LanguageSettings) -> RequestRouterConfig:
    return RequestRouterConfig(
        request_router_class=AffinityRouter, request_router_kwargs={"slack": pool.affinity_slack}
    )


def _deployment(replica: type, name: str, pool: PoolSettings, policy: AutoscalingPolicy) -> serve.Deployment:
    options: dict[str, Any] = {
        "name": name,
        "max_ongoing_requests": pool.max_ongoing,
        "max_queued_requests": 4 * pool.max_ongoing,
        "ray_actor_options": {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus},
        "max_surge_percent": pool.surge_percent,
        "user_config": {},  # makes Serve call reconfigure(), where a replica starts its engine
    }
    if pool.min_replicas == pool.max_replicas:
        options["num_replicas"] = pool.min_replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=pool.min_replicas,
            max_replicas=pool.max_replicas,
            initial_replicas=pool.initial_replicas,
            upscale_delay_s=pool.upscale_delay,
            downscale_delay_s=pool.downscale_delay,
            look_back_period_s=pool.load_window,
            policy=policy,
        )
    return serve.deployment(replica, **options)


def build_ingress(settings: Settings, cache_url: str) -> FastAPI:
    """The HTTP application of one ingress replica."""
    log.configure(settings.log)
    tracing.configure(settings.telemetry, INGRESS)
    connect: Callable[[], AbstractAsyncContextManager[Backend]] = partial(_connect, settings, cache_url)
    return create_app(settings.http, settings.access, connect, settings.batches)


@asynccontextmanager
async def _connect(settings: Settings, cache_url: str) -> AsyncIterator[Backend]:
    cache = AsyncEmbeddingCache(settings.cache, cache_url)
    fetcher = ImageFetcher(settings.images)
    try:
        services = {model.name: model_service(settings, model, cache, fetcher) for model in settings.models}
        yield Backend(services, cache)
    finally:
        await fetcher.aclose()
        await cache.close()


def model_service(
    settings: Settings,
    model: ModelSettings,
    cache: AsyncEmbeddingCache,
    fetcher: ImageFetcher,
    *,
    batch: bool = False,
) -> ImageService:
    """What one model's pools can do; for any process of the application's cluster.

    Args:
        settings: the whole tree.
        model: which.
        cache: the embedding cache of the pools.
        fetcher: reads image URLs.
        batch: its images wait for those of people.
    """
    metrics.start_at_zero(model.name)
    encoder = RayEncoderPool(serve.get_deployment_handle(encoder_name(model), APPLICATION), model.encoder, batch=batch)
    images = ImageResolver(encoder, cache, fetcher, settings.images, model.name)
    if not has_language(model.checkpoint):
        return ImageService(images, ONE_ROW if model.encoder.output == "summary" else size_rule(model.checkpoint))
    language = RayLanguagePool(serve.get_deployment_handle(language_name(model), APPLICATION), model.language)
    return ModelService(
        images,
        language,
        prompt_builder(model.checkpoint),
        size_rule(model.checkpoint),
        model.language.max_model_len or context_length(model.checkpoint),
    )
