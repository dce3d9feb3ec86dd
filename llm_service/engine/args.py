"""From our settings to vLLM's engine arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from vllm.config import ECTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform

from llm_service.vllm_plugin import LOAD_FORMAT
from llm_service.vllm_plugin.overrides import tower_free
from shared.config import CacheSettings, ModelSettings, TelemetrySettings
from shared.environment import temporary_environment
from shared.families import family_of, read_config
from shared.model_config import PARAMS, Config, config_file
from shared.radio import language as text_config
from shared.tracing import traces_url

#: images per prompt as far as the engine is concerned; the API has its own, lower limit
MAX_IMAGES = 1024

#: set for vLLM, in this process too; a value that the operator gave wins
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
}


@contextmanager
def engine_environment(model: ModelSettings, telemetry: TelemetrySettings) -> Iterator[None]:
    """The environment in which the engine's processes must be started; this process keeps only what it needs too."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if telemetry.otlp_endpoint is not None:  # vLLM would speak gRPC
        os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    for_children = {"VLLM_CPU_KVCACHE_SPACE": str(model.language.kv_cache_gib)}
    if current_platform.is_cpu():
        # scheduler and model runner in one process, as on a GPU: one start of Python and one copy less per step
        for_children["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if model.language.enforce_eager:
        # vLLM compiles a few sampling helpers even so, 20 s of C++ in the middle of the first request that wants
        # log-probabilities
        for_children["TORCHDYNAMO_DISABLE"] = "1"
    with temporary_environment(for_children):
        yield


def engine_args(
    model: ModelSettings,
    cache: CacheSettings,
    cache_url: str,
    telemetry: TelemetrySettings = TelemetrySettings(),  # noqa: B008 - frozen
) -> AsyncEngineArgs:
    """Arguments of a tower-free engine for this model."""
    language = model.language
    config = read_config(model.checkpoint)
    hybrid = family_of(config).hybrid
    # named, since vLLM's own guess takes Mistral's layout wherever a folder holds both
    layout = "mistral" if config_file(model.checkpoint) == PARAMS else "hf"
    return AsyncEngineArgs(
        model=str(model.checkpoint),
        served_model_name=model.name,
        trust_remote_code=False,
        load_format=LOAD_FORMAT,
        config_format=layout,
        tokenizer_mode=layout,
        hf_overrides=tower_free,
        dtype=language.dtype,
        max_model_len=language.max_model_len,
        max_num_seqs=language.max_num_seqs,
        max_num_batched_tokens=language.max_num_batched_tokens,
        gpu_memory_utilization=language.gpu_memory_utilization,
        mamba_ssm_cache_dtype=_state_dtype(config) if hybrid else "auto",
        enforce_eager=language.enforce_eager,
        # vLLM's CPU kernels of Mamba give no states from inside a prompt
        enable_prefix_caching=language.prefix_caching and not hybrid,
        enable_chunked_prefill=True,
        seed=language.seed,
        worker_extension_cls="llm_service.vllm_plugin.worker.WorkerExtension",
        limit_mm_per_prompt={"image": MAX_IMAGES},
        skip_mm_profiling=True,
        mm_processor_cache_gb=0,
        # embeddings that travel in a request are as large as a picture; a cache of them would be a second one
        enable_log_requests=False,
        disable_log_stats=True,
        otlp_traces_endpoint=None if telemetry.otlp_endpoint is None else traces_url(telemetry.otlp_endpoint),
        ec_transfer_config=ECTransferConfig(
            ec_connector="TowerFreeConnector",
            ec_connector_module_path="llm_service.vllm_plugin.tower_free_connector",
            ec_role="ec_consumer",
            ec_connector_extra_config={
                "cache": cache.model_dump(mode="json"),
                "cache_url": cache_url,
                "prefetch_bytes": language.prefetch_mib << 20,
                "owner": os.getpid(),
                "telemetry": telemetry.model_dump(mode="json"),
            },
        ),
    )


def _state_dtype(config: Config) -> str:
    """Of Mamba states: the checkpoint's, or float32. By itself vLLM knows that for its own architectures only."""
    return str(text_config(config).get("mamba_ssm_cache_dtype") or "float32")
