"""vLLM's and transformers' own Pixtral towers, run in this process with the weights of a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, Mistral3Config, Mistral3ForConditionalGeneration
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models import pixtral as vllm_pixtral
from vllm.model_executor.models.llava import LlavaMultiModalProjector
from vllm.model_executor.models.mistral3 import Mistral3MultiModalProjector
from vllm.model_executor.models.utils import AutoWeightsLoader

from shared.sizing import Grid
from tests.encoder_service.damage import all_tensors

#: pictures of normalised pixels ``[3, height, width]`` → one embedding each
Oracle = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


def picture(patches: torch.Tensor, grid: Grid, side: int) -> torch.Tensor:
    """Patches as (channel, row, column) back in their places: ``[3, height, width]``."""
    return (
        patches.view(grid.height, grid.width, 3, side, side)
        .permute(2, 0, 3, 1, 4)
        .reshape(3, grid.height * side, grid.width * side)
    )


def vllm_native(checkpoint: Path) -> Oracle:
    """``PixtralForConditionalGeneration`` without its language model; call inside ``vllm_context``."""
    params = json.loads((checkpoint / "params.json").read_text())
    known = {field.name for field in fields(vllm_pixtral.VisionEncoderArgs)}
    args = vllm_pixtral.VisionEncoderArgs(**{k: v for k, v in params["vision_encoder"].items() if k in known})

    class Holder(torch.nn.Module):
        """The parts in their places, so that vLLM's own loading and forward apply."""

        def __init__(self) -> None:
            super().__init__()
            self.vision_args = args
            self.vision_encoder = vllm_pixtral.VisionTransformer(args)
            self.pre_mm_projector_norm = (
                RMSNorm(args.hidden_size, eps=1e-5) if args.add_pre_mm_projector_layer_norm else None
            )
            merging = args.mm_projector_id == vllm_pixtral.PATCH_MERGE
            self.patch_merger = vllm_pixtral.PatchMerger(args.hidden_size, args.spatial_merge_size) if merging else None
            self.vision_language_adapter = vllm_pixtral.VisionLanguageAdapter(args, dim=params["dim"])

    holder = Holder()
    holder.language_model = SimpleNamespace(load_weights=lambda weights: [name for name, _ in weights])  # type: ignore[assignment]
    model = vllm_pixtral.PixtralForConditionalGeneration
    model.load_weights(holder, all_tensors(checkpoint).items())  # type: ignore[arg-type]
    _finish(holder)

    @torch.inference_mode()
    def embed(pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        inputs: Any = {"images": list(pictures)}
        return list(model._process_image_input(holder, inputs))  # type: ignore[arg-type]

    return embed


def vllm_hf(checkpoint: Path) -> Oracle:
    """vLLM's ``PixtralHFVisionModel`` with the projector of its Llava or Mistral3; call inside ``vllm_context``."""
    tree = json.loads((checkpoint / "config.json").read_text())
    merging = tree["model_type"] == "mistral3"
    config: Any = (Mistral3Config if merging else LlavaConfig)(**tree)
    vision = config.vision_config
    shared: dict[str, Any] = {
        "vision_hidden_size": vision.hidden_size,
        "text_hidden_size": config.text_config.hidden_size,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": config.multimodal_projector_bias,
    }
    layers = config.vision_feature_layer
    built = layers if layers >= 0 else vision.num_hidden_layers + 1 + layers
    holder = torch.nn.Module()
    holder.vision_tower = vllm_pixtral.PixtralHFVisionModel(vision, num_hidden_layers_override=built)
    if merging:
        projector: torch.nn.Module = Mistral3MultiModalProjector(
            **shared, spatial_merge_size=config.spatial_merge_size, patch_size=vision.patch_size
        )
    else:
        projector = LlavaMultiModalProjector(**shared)
    holder.multi_modal_projector = projector
    weights = [(name.removeprefix("model."), tensor) for name, tensor in all_tensors(checkpoint).items()]
    ours = [(name, tensor) for name, tensor in weights if name.startswith(("vision_tower.", "multi_modal_projector."))]
    loaded = AutoWeightsLoader(holder).load_weights(ours)
    assert loaded == {name for name, _ in holder.named_parameters()}
    _finish(holder)

    @torch.inference_mode()
    def embed(pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        features = torch.cat(holder.vision_tower(list(pictures)))
        sizes = [tuple(picture.shape[1:]) for picture in pictures]
        out = projector(features, sizes) if merging else projector(features)
        cell = vision.patch_size * (config.spatial_merge_size if merging else 1)
        return list(out.split([height // cell * (width // cell) for height, width in sizes]))

    return embed


def _finish(module: torch.nn.Module) -> None:
    for layer in module.modules():
        if (method := getattr(layer, "quant_method", None)) is not None:
            method.process_weights_after_loading(layer)
    module.eval()


def transformers_hf(checkpoint: Path) -> Oracle:
    """``LlavaForConditionalGeneration`` or ``Mistral3ForConditionalGeneration`` from the folder itself."""
    merging = json.loads((checkpoint / "config.json").read_text())["model_type"] == "mistral3"
    kind: Any = Mistral3ForConditionalGeneration if merging else LlavaForConditionalGeneration
    model, report = kind.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"], report
    inner = model.eval().model

    @torch.inference_mode()
    def embed(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Mistral3 fails on a batch of one token in all, whose dimension it squeezes away: give that one company
        pictures = [*given, given[0]]
        sizes = torch.tensor([picture.shape[1:] for picture in pictures])
        tall, wide = sizes.amax(0).tolist()
        padded = torch.zeros(len(pictures), 3, tall, wide)
        for row, picture in zip(padded, pictures, strict=True):
            row[:, : picture.shape[1], : picture.shape[2]] = picture
        layer = model.config.vision_feature_layer
        out = inner.get_image_features(padded, image_sizes=sizes, vision_feature_layer=layer)
        rows = out.pooler_output if hasattr(out, "pooler_output") else out
        return [one.reshape(-1, one.shape[-1]) for one in rows][: len(given)]

    return embed
