"""Settings of a served model and of its two pools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shared.config.section import Seconds, Section

Dtype = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8"]
EncoderOutput = Literal["features", "summary"]
#: see :class:`shared.record_values.Encoding`
RecordEncoding = Literal["raw", "int8", "fp8"]
ReplayBackend = Literal["eager", "compiled", "cuda-graph"]


class PoolSettings(Section):
    """Replicas of one pool and what each takes from Ray.

    Attributes:
        min_replicas, max_replicas: bounds of autoscaling; equal numbers switch it off. 0 lets an idle pool end all its
            replicas; the next request waits for one to start.
        initial_replicas: at the start; None takes ``min_replicas``.
        upscale_delay, downscale_delay: seconds for which more, or fewer, replicas must be wanted.
        load_window: seconds over which a pool's load is averaged.
        max_ongoing: requests that one replica takes at once.
        num_cpus, num_gpus: Ray resources of one replica; fractions are allowed.
        surge_percent: replicas that may run beside the old ones, in percent of the pool, while changed settings replace
            them; 0 ends the old ones first, for pools that leave no room on their devices.
    """

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    initial_replicas: int | None = Field(None, ge=0)
    upscale_delay: float = Field(3.0, ge=0)
    downscale_delay: float = Field(300.0, ge=0)
    load_window: Seconds = 10.0
    max_ongoing: int = Field(64, ge=1)
    num_cpus: float = Field(1, ge=0)
    num_gpus: float = Field(0, ge=0)
    surge_percent: int = Field(100, ge=0, le=100)

    @model_validator(mode="after")
    def _bounds(self) -> PoolSettings:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}")
        if self.initial_replicas is not None and not self.min_replicas <= self.initial_replicas <= self.max_replicas:
            raise ValueError(f"initial_replicas {self.initial_replicas} is not between min_replicas and max_replicas")
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
        quantization: ``int8`` computes the tower's linear layers in 8 bits (CPU only); embeddings keep ``dtype``.
        output: ``features``, one row per token, or ``summary``, one row per picture: for encoders that have no language
            model, see ``docs/encode.md``.
        records: how embeddings stand in Redis: ``raw`` in ``dtype``; ``int8`` and ``fp8`` take a byte a value and a
            scale per token, about half of bfloat16. Records of every kind are read, whatever is set.
        device: torch device of each replica.
        threads: torch threads for the tower; 0 leaves torch's default.
        preprocess_threads: host threads for decoding and preprocessing.
        max_batch_patches: patches in one forward, at most; a larger single image runs alone.
        batch_wait_ms: how long a batch waits for company.
        max_queue: images that may wait in one replica before it answers "busy".
        target_patches: patches taken on and not yet encoded, per replica, that autoscaling aims at.
        replay: forwards of fixed size.
    """

    dtype: Dtype = "float32"
    quantization: Quantization = "none"
    output: EncoderOutput = "features"
    records: RecordEncoding = "raw"
    device: str = "cpu"
    threads: int = Field(0, ge=0)
    preprocess_threads: int = Field(2, ge=1)
    max_batch_patches: int = Field(16384, ge=1)
    batch_wait_ms: float = Field(2.0, ge=0)
    max_queue: int = Field(256, ge=1)
    target_patches: int = Field(32768, ge=1)
    replay: ReplaySettings = ReplaySettings()

    @model_validator(mode="after")
    def _device_for_backend(self) -> EncoderSettings:
        if self.replay.backend == "cuda-graph" and not self.device.startswith("cuda"):
            raise ValueError(f"replay.backend cuda-graph needs a CUDA device, device is {self.device}")
        if self.quantization == "int8" and self.device != "cpu":
            raise ValueError(f"quantization int8 runs on CPUs only, device is {self.device}")
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
        prefix_caching: vLLM's prefix cache; models with Mamba layers run without it.
        prefetch_mib: image embeddings that a replica holds at a time, MiB: those of its requests, and then earlier ones
            until their room is needed.
        seed: seed of the engine.
        target_ongoing: running and waiting requests per replica that autoscaling aims at.
        target_kv_use: share of the KV cache in use per replica that autoscaling aims at, 0 to 1.
        affinity_slack: requests that the replica which has seen an image or a prefix may have more than the least
            loaded one before others get such requests too.
    """

    dtype: Dtype = "float32"
    max_model_len: int | None = Field(None, ge=16)
    max_num_seqs: int = Field(64, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=16)
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    kv_cache_gib: int = Field(1, ge=1)
    enforce_eager: bool = True
    prefix_caching: bool = True
    prefetch_mib: int = Field(1024, ge=1)
    seed: int = 0
    target_ongoing: float = Field(32, gt=0)
    target_kv_use: float = Field(0.8, gt=0, le=1)
    affinity_slack: int = Field(8, ge=0)


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
