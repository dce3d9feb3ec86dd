"""vLLM's own Isaac modules, run in this process with the weights of a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
from vllm.model_executor.models.isaac import IsaacForConditionalGeneration, IsaacVisionEmbedding
from vllm.transformers_utils.configs.isaac import PixelShuffleSiglip2VisionConfig

from shared.sizing import Grid
from tests.encoder_service.damage import all_tensors


@contextmanager
def vllm_context(folder: Path) -> Iterator[None]:
    """What vLLM's layers need around them: a configuration and a group of one process."""
    with set_current_vllm_config(VllmConfig()):
        if not parallel_state.model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{folder / 'rendezvous'}", 0, "gloo")
            initialize_model_parallel(1, 1)
        yield


def isaac_oracle(checkpoint: Path) -> IsaacVisionEmbedding:
    """The reference tower and projector in float32; call inside :func:`vllm_context`."""
    config = json.loads((checkpoint / "config.json").read_text())
    vision = PixelShuffleSiglip2VisionConfig(**config["vision_config"])
    merged = vision.hidden_size * vision.pixel_shuffle_scale_factor**2
    module = IsaacVisionEmbedding(vision, merged, config["hidden_size"])

    class Holder(torch.nn.Module):
        """The place of the module in the whole model, so that vLLM's own name map applies."""

        hf_to_vllm_mapper = IsaacForConditionalGeneration.hf_to_vllm_mapper

        def __init__(self) -> None:
            super().__init__()
            self.vision_embedding = module

    weights = [(name, t) for name, t in all_tensors(checkpoint).items() if name.startswith("model.vision_embedding.")]
    loaded = IsaacForConditionalGeneration.load_weights(Holder(), weights)  # type: ignore[arg-type]
    missing = {f"vision_embedding.{name}" for name, _ in module.named_parameters()} - loaded
    assert not missing, missing
    for layer in module.modules():
        if (method := getattr(layer, "quant_method", None)) is not None:
            method.process_weights_after_loading(layer)
    return module.eval()


def oracle_embeddings(module: Any, patches: list[torch.Tensor], grids: list[Grid]) -> list[torch.Tensor]:
    """Packed forward of the oracle, split by image."""
    with torch.inference_mode():
        out = module((torch.cat(patches), torch.tensor(grids, dtype=torch.int32)))
    return list(out.split([grid.patches // 4 for grid in grids]))
