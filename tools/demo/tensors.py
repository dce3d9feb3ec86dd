"""The demo models' tensors under the names of their checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tools.demo.design import ISAAC, Design

if TYPE_CHECKING:
    from tools.demo.model import DemoModel

Tensors = dict[str, torch.Tensor]

ISAAC_BLOCK = {
    "norm1": "layer_norm1",
    "norm2": "layer_norm2",
    "attention.out": "self_attn.out_proj",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
ISAAC_ENDS = {
    "position_table": "0.embeddings.position_embedding.weight",
    "patch_embedding.weight": "0.embeddings.patch_embedding.weight",
    "patch_embedding.bias": "0.embeddings.patch_embedding.bias",
    "norm.weight": "0.post_layernorm.weight",
    "norm.bias": "0.post_layernorm.bias",
    "project_up.weight": "1.weight",
    "project_down.weight": "3.weight",
}
PIXTRAL_BLOCK = {
    "norm1": ("attention_norm",),
    "norm2": ("ffn_norm",),
    "attention.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attention.out": ("attention.o_proj",),
    "mlp.gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp.down": ("feed_forward.down_proj",),
}
PIXTRAL_ENDS = {
    "patch_weight": "vision_tower.patch_conv.weight",
    "norm.weight": "vision_tower.ln_pre.weight",
    "projector_norm.weight": "multi_modal_projector.norm.weight",
    "merger.weight": "multi_modal_projector.patch_merger.merging_layer.weight",
    "project_in.weight": "multi_modal_projector.linear_1.weight",
    "project_out.weight": "multi_modal_projector.linear_2.weight",
}
#: before the language model's own names in a Pixtral checkpoint
PIXTRAL_LANGUAGE = "language_model."


def checkpoint_tensors(model: DemoModel) -> Tensors:
    """All tensors of a model in bfloat16; q, k and v split, gate and up too."""
    isaac = model.design is ISAAC
    out: Tensors = {}
    for name, tensor in model.tower.state_dict().items():
        out |= _isaac(name, tensor) if isaac else _pixtral(name, tensor)
    prefix = "" if isaac else PIXTRAL_LANGUAGE
    out |= {prefix + name: tensor for name, tensor in model.language.state_dict().items()}
    return {name: tensor.to(torch.bfloat16).contiguous().clone() for name, tensor in out.items()}


def language_tensors(design: Design, tensors: Tensors) -> Tensors:
    """The language model's part of a checkpoint, by its own names, in float32."""
    if design is ISAAC:
        return {name: tensor.float() for name, tensor in tensors.items() if "vision_embedding" not in name}
    return {
        name.removeprefix(PIXTRAL_LANGUAGE): tensor.float()
        for name, tensor in tensors.items()
        if name.startswith(PIXTRAL_LANGUAGE)
    }


def _isaac(name: str, tensor: torch.Tensor) -> Tensors:
    prefix = "model.vision_embedding."
    if name in ISAAC_ENDS:
        return {prefix + ISAAC_ENDS[name]: tensor}
    _, number, rest = name.split(".", 2)
    layer, (module, kind) = f"{prefix}0.encoder.layers.{number}", rest.rsplit(".", 1)
    if module == "attention.qkv":
        parts = zip("qkv", tensor.chunk(3), strict=True)
        return {f"{layer}.self_attn.{letter}_proj.{kind}": part for letter, part in parts}
    return {f"{layer}.{ISAAC_BLOCK[module]}.{kind}": tensor}


def _pixtral(name: str, tensor: torch.Tensor) -> Tensors:
    if name in PIXTRAL_ENDS:
        return {PIXTRAL_ENDS[name]: tensor}
    _, number, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    theirs = PIXTRAL_BLOCK[module]
    layer = f"vision_tower.transformer.layers.{number}"
    return {f"{layer}.{one}.{kind}": part for one, part in zip(theirs, tensor.chunk(len(theirs)), strict=True)}
