"""vLLM's monolithic Nemotrons with vLLM's own RADIO inside, where the published model runs code of its folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.internvl import BaseInternVLDummyInputsBuilder, BaseInternVLMultiModalProcessor
from vllm.model_executor.models.nano_nemotron_vl import (
    NanoNemotronVLDummyInputsBuilder,
    NanoNemotronVLMultiModalProcessor,
    NanoNemotronVLProcessingInfo,
    NemotronH_Nano_VL_V2,
)
from vllm.model_executor.models.nemotron_vl import LlamaNemotronVLChatModel, NemotronVLProcessingInfo
from vllm.model_executor.models.radio import RadioModel
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
)
from vllm.transformers_utils.configs.radio import RadioConfig
from vllm.transformers_utils.processors.nemotron_vl import LlamaNemotronNanoVLImageProcessor

from encoder_service.preprocess.base import CLIP_MEAN, CLIP_STD
from llm_service.tokens import read_tokenizer_config
from tests.llm_service.pictures import Embedded


def small_radio(vision: Any) -> RadioConfig:
    """vLLM knows ViTs by name only; the sizes of a small checkpoint are put in afterwards."""
    radio = RadioConfig(
        model_name=vision.args["model"],
        image_size=vision.preferred_resolution[0],
        patch_size=vision.patch_size,
        **vision.args,
    )
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        setattr(radio, name, getattr(vision, name))
    return radio


class Info(NemotronVLProcessingInfo):
    """Without the image processor of the folder, which is code too."""

    def get_image_processor(self, **_: object) -> Any:
        return LlamaNemotronNanoVLImageProcessor(self.get_hf_config().force_image_size, 1, 12, True, True)


@MULTIMODAL_REGISTRY.register_processor(
    BaseInternVLMultiModalProcessor[Info], info=Info, dummy_inputs=BaseInternVLDummyInputsBuilder[Info]
)
class Monolith(LlamaNemotronVLChatModel):
    """The two methods that vLLM's class names for this purpose; everything else is its own."""

    raw_pixels = False

    def _init_vision_model(self, config: Any, quant_config: Any, *, prefix: str) -> RadioModel:
        return RadioModel(small_radio(config.vision_config), quant_config, prefix=prefix)

    def _call_vision_model(self, pixel_values: torch.Tensor) -> torch.Tensor:
        if self.raw_pixels:  # the published tower normalises them itself
            mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
            pixel_values = (pixel_values - mean) / std
        _, features = self.vision_model(pixel_values)
        return features

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """vLLM's RADIO reads no layer scales and keeps them at 1; its loader would call that an error."""
        return super().load_weights(weights) | {name for name, _ in self.named_parameters() if ".ls" in name}


@MULTIMODAL_REGISTRY.register_processor(
    NanoNemotronVLMultiModalProcessor, info=NanoNemotronVLProcessingInfo, dummy_inputs=NanoNemotronVLDummyInputsBuilder
)
class NanoMonolith(NemotronH_Nano_VL_V2):
    """With a tower of the small checkpoint's sizes, and float32 where vLLM's casts to bfloat16 whatever the dtype."""

    def extract_feature(self, pixel_values: torch.Tensor, num_frames: int | None = None) -> torch.Tensor:
        _, features = self.vision_model(pixel_values)
        side = pixel_values.shape[-1] // self.patch_size
        features = self.pixel_shuffle(features.reshape(len(features), side, side, -1), self.downsample_ratio)
        return self.mlp1(features.flatten(1, 2))

    def get_vit_model_from_radio_config(self, hf_config: Any) -> RadioModel:
        return RadioModel(config=small_radio(hf_config.vision_config))


def register(*, raw_pixels: bool = False) -> None:
    """Takes the place of vLLM's classes; before any engine is made.

    Args:
        raw_pixels: tiles come from vLLM's own processor and not, normalised, from ours.
    """
    Monolith.raw_pixels = raw_pixels
    ModelRegistry.register_model("Llama_Nemotron_Nano_VL", Monolith)
    ModelRegistry.register_model("NemotronH_Nano_VL_V2", NanoMonolith)
    # vLLM's own rule for the dtype of Mamba states goes by the architecture's name, which stays
    assert "NemotronH_Nano_VL_V2" in MODELS_CONFIG_MAP


def image_item(image: Embedded, side: int, checkpoint: str) -> MultiModalKwargsItem:
    """The tiles of one picture as vLLM's class wants them."""
    tile = image.grid.width
    cut = image.patches.view(-1, tile, tile, 3, side, side).permute(0, 3, 1, 4, 2, 5)
    tiles = cut.reshape(-1, 3, tile * side, tile * side)
    tokens = read_tokenizer_config(Path(checkpoint))["added_tokens_decoder"]
    token = next(int(number) for number, entry in tokens.items() if entry["content"] == "<image>")
    batched = MultiModalBatchedField()
    return MultiModalKwargsItem(
        {
            "pixel_values_flat": MultiModalFieldElem(data=tiles, field=MultiModalFlatField(slices=[slice(None)])),
            "image_num_patches": MultiModalFieldElem(data=torch.tensor(len(tiles)), field=batched),
            "image_token_id": MultiModalFieldElem(data=torch.tensor(token), field=batched),
        }
    )
