"""vLLM's and transformers' own RADIO modules, run in this process with the weights of a checkpoint folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import RadioModel
from vllm.model_executor.models.nano_nemotron_vl import NemotronH_Nano_VL_V2
from vllm.model_executor.models.nemotron_vl import LlamaNemotronVLChatModel
from vllm.model_executor.models.radio import RadioModel as VllmRadioModel
from vllm.transformers_utils.configs.radio import RadioConfig

from shared.sizing import Grid
from tests.encoder_service.damage import all_tensors


def vllm_radio(checkpoint: Path) -> VllmRadioModel:
    """The reference ViT in float32; call inside ``vllm_context``.

    vLLM knows ViTs by name only, so the sizes of the small checkpoint are put in afterwards. It skips the layer scales
    of a file; they are put in by hand.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    vision = config.get("vision_config", config)
    args = dict(vision["args"])
    radio = RadioConfig(
        model_name=args["model"],
        image_size=vision["preferred_resolution"][0],
        patch_size=vision["patch_size"],
        video_temporal_patch_size=vision["video_temporal_patch_size"],
        **args,
    )
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        setattr(radio, name, vision[name])
    model = VllmRadioModel(radio)
    tensors = {name.removeprefix("vision_model."): tensor for name, tensor in all_tensors(checkpoint).items()}
    loaded = model.load_weights(tensors)
    expected = {name for name, _ in model.named_parameters() if ".ls" not in name}
    assert loaded == expected, loaded ^ expected
    for name, parameter in model.named_parameters():
        stored = "radio_model." + name.replace("encoder.layers", "blocks")
        if ".ls" in name and stored in tensors:
            parameter.data.copy_(tensors[stored])
    for layer in model.modules():
        if (method := getattr(layer, "quant_method", None)) is not None:
            method.process_weights_after_loading(layer)
    return model.eval()


@torch.inference_mode()
def vllm_packed(model: Any, patches: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
    """Features of a packed forward, split by image."""
    side = model.config.patch_size
    sizes = [(grid.height * side, grid.width * side) for grid in grids]
    _, features = model(torch.cat(list(patches))[None], imgs_sizes=sizes)
    return list(features[0].split([grid.patches for grid in grids]))


def pixels_of(patches: torch.Tensor, grid: Grid, side: int) -> torch.Tensor:
    """The picture ``[3, height, width]`` that was cut into these patches."""
    cut = patches.view(grid.height, grid.width, 3, side, side)
    return cut.permute(2, 0, 3, 1, 4).reshape(3, grid.height * side, grid.width * side)


def transformers_radio(checkpoint: Path) -> Any:
    """The reference of the native layout in float32, loaded by transformers itself; it takes normalised pixels."""
    model, report = RadioModel.from_pretrained(checkpoint, output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report
    model.make_preprocessor_external()
    return model.eval()


def chat_projector(checkpoint: Path) -> nn.Module:
    """``mlp1`` as the reference builds it, with the checkpoint's weights."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = all_tensors(checkpoint)
    inner, hidden = config["vit_hidden_size"] * 4, config["projector_hidden_size"]
    if "llm_config" in config:
        text = SimpleNamespace(**config["llm_config"])
        whole = SimpleNamespace(**config, get_text_config=lambda: text)
        module = LlamaNemotronVLChatModel._init_mlp1(SimpleNamespace(downsample_ratio=0.5), whole)  # type: ignore[arg-type]
    else:
        from vllm.model_executor.layers.activation import ReLUSquaredActivation
        from vllm.model_executor.layers.layernorm import RMSNorm

        module = nn.Sequential(  # as in the reference's constructor, which cannot be run without its language model
            RMSNorm(hidden_size=inner, eps=1e-5),
            nn.Linear(inner, hidden, bias=False),
            ReLUSquaredActivation(),
            nn.Linear(hidden, config["text_config"]["hidden_size"], bias=False),
        )
    weights = {name.removeprefix("mlp1."): tensor for name, tensor in tensors.items() if name.startswith("mlp1.")}
    module.load_state_dict(weights)
    return module.eval()


def shuffled(features: torch.Tensor, grid: Grid, kind: str, ps_version: str) -> torch.Tensor:
    """The reference's pixel shuffle of one picture or tile: ``[P, width]`` → ``[T, 4 · width]``."""
    reference: Any = LlamaNemotronVLChatModel if kind == "llama" else NemotronH_Nano_VL_V2
    picture = features.view(1, grid.height, grid.width, -1)
    out = reference.pixel_shuffle(SimpleNamespace(ps_version=ps_version), picture, scale_factor=0.5)
    return out.reshape(grid.patches // 4, -1)
