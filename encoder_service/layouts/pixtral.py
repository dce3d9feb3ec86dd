"""Pixtral checkpoints: Mistral's own names, and those of transformers' Llava and Mistral3 classes."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch

from encoder_service.layouts.base import Config, Layout, Sources, positive, section, whole
from encoder_service.preprocess.base import CLIP_MEAN, CLIP_STD, Channels, Preprocess
from encoder_service.preprocess.pixtral import PixtralPreprocess
from encoder_service.towers.base import Tower
from encoder_service.towers.layers import ACTIVATIONS
from encoder_service.towers.pixtral import NORM_EPS, PixtralTower, PixtralTowerConfig
from shared.errors import CheckpointError
from shared.model_config import CONFIG, PARAMS, PREPROCESSOR
from shared.sizing import LongestSideRule, SizeRule

MAX_LAYERS = 1024
MAX_THETA = 1e12
#: ``mm_projector_id`` of a native checkpoint with a patch merger
PATCH_MERGE = "patch_merge"
#: the projector's epsilon where ``text_config`` gives none, transformers' default for Mistral
TEXT_NORM_EPS = 1e-6
#: Pillow's numbers for the filters that the image processor may name
FILTERS: dict[int, Literal["smooth-bilinear", "smooth-bicubic"]] = {2: "smooth-bilinear", 3: "smooth-bicubic"}
#: what the image processor might say otherwise, and nobody's does
FIXED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_center_crop": False,
    "rescale_factor": 1 / 255,
}

#: names inside a block: attention's four products, the gate, up and down of the feed-forward
NATIVE_NAMES = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
HF_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def native_config(config: Config, rule: SizeRule) -> PixtralTowerConfig:
    """Sizes of the tower from ``params.json``.

    Raises:
        CheckpointError: a value that no tower can have; names it.
    """
    vision = section(config, "vision_encoder", file=PARAMS)
    number = partial(whole, vision, file=PARAMS)
    merger = vision.get("mm_projector_id") == PATCH_MERGE
    if rule.merge > 1 and not merger:
        raise CheckpointError(f"{PARAMS}: spatial_merge_size is {rule.merge}, but mm_projector_id is not {PATCH_MERGE}")
    layers = number("num_hidden_layers", most=MAX_LAYERS)
    return _checked(
        PixtralTowerConfig(
            width=number("hidden_size"),
            features=(layers,),
            heads=number("num_attention_heads"),
            hidden=number("intermediate_size"),
            patch_size=rule.patch_size,
            merge=rule.merge,
            output_width=whole(config, "dim", file=PARAMS),
            rope_theta=_theta(vision.get("rope_theta", 10000.0), PARAMS),
            projector_norm_eps=NORM_EPS if _flag(vision, "add_pre_mm_projector_layer_norm", False, PARAMS) else None,
            merger=merger,
            projector_bias=_flag(vision, "adapter_bias", True, PARAMS),
            stored_layers=layers,
        ),
        vision,
        PARAMS,
    )


def hf_config(config: Config, rule: SizeRule, *, merger: bool) -> PixtralTowerConfig:
    """Sizes of the tower from ``config.json``; what it leaves out is transformers' default.

    Args:
        config: the whole configuration.
        rule: the size rule made from it.
        merger: whether the projector begins with a norm and a patch merger, as Mistral3's does and Llava's does not.

    Raises:
        CheckpointError: a value that no tower can have; names it.
    """
    vision, text = section(config, "vision_config"), section(config, "text_config")
    stored = whole(vision, "num_hidden_layers", 24, most=MAX_LAYERS)
    features = _features(config.get("vision_feature_layer", -1 if merger else -2), stored)
    if merger and len(features) > 1:
        raise CheckpointError(f"{CONFIG}: vision_feature_layer must be one layer before a patch merger")
    if not merger and config.get("vision_feature_select_strategy", "default") != "full":
        raise CheckpointError(f"{CONFIG}: vision_feature_select_strategy must be 'full': this tower has no class token")
    # transformers takes the text model's epsilon here, vLLM always 1e-5; published files say 1e-5
    norm_eps = positive(text, "rms_norm_eps", TEXT_NORM_EPS) if merger else None
    return _checked(
        PixtralTowerConfig(
            width=whole(vision, "hidden_size", 1024),
            features=features,
            heads=whole(vision, "num_attention_heads", 16),
            hidden=whole(vision, "intermediate_size", 4096),
            patch_size=rule.patch_size,
            merge=rule.merge,
            output_width=whole(text, "hidden_size"),
            rope_theta=_theta(section(vision, "rope_parameters").get("rope_theta", vision.get("rope_theta", 10000.0))),
            activation=_activation(vision, "hidden_act"),
            projector_norm_eps=norm_eps,
            merger=merger,
            projector_bias=_flag(config, "multimodal_projector_bias", not merger),
            projector_activation=_activation(config, "projector_hidden_act"),
            stored_layers=stored,
        ),
        vision,
        CONFIG,
    )


def _checked(sizes: PixtralTowerConfig, vision: Config, file: str) -> PixtralTowerConfig:
    if (channels := vision.get("num_channels", 3)) != 3:
        raise CheckpointError(f"{file}: num_channels must be 3, found {channels!r:.80}")
    if sizes.width % (2 * sizes.heads):
        raise CheckpointError(
            f"{file}: hidden_size {sizes.width} of the tower does not give each of {sizes.heads} heads an even share"
        )
    return sizes


def _features(given: Any, stored: int) -> tuple[int, ...]:
    """``vision_feature_layer`` as numbers of blocks: -1 is after the last, 0 before the first."""
    layers = given if isinstance(given, list) else [given]
    whole_numbers = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
    if not layers or not whole_numbers or not all(-stored - 1 <= layer <= stored for layer in layers):
        raise CheckpointError(f"{CONFIG}: vision_feature_layer {given!r:.80} is no layer of a tower with {stored}")
    return tuple(layer if layer >= 0 else stored + 1 + layer for layer in layers)


def _theta(value: Any, file: str = CONFIG) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= MAX_THETA:
        raise CheckpointError(f"{file}: rope_theta of the tower must be from 1 to {MAX_THETA:g}, found {value!r:.80}")
    return float(value)


def _flag(config: Config, name: str, default: bool, file: str = CONFIG) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise CheckpointError(f"{file}: {name} must be true or false, found {value!r:.80}")
    return value


def _activation(config: Config, name: str) -> str:
    value = config.get(name) or "gelu"
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise CheckpointError(f"{CONFIG}: {name} must be one of {', '.join(ACTIVATIONS)}; found {value!r:.80}")
    return value


def _describe(tower: Tower) -> str:
    assert isinstance(tower, PixtralTower)
    return repr(tower.config)


def _blocks(tower: PixtralTower, prefix: str, names: tuple[str, ...]) -> Sources:
    """Sources of the tower proper; both layouts name it alike but for the products."""
    sources: Sources = {"patch_weight": (f"{prefix}patch_conv.weight",), "norm.weight": (f"{prefix}ln_pre.weight",)}
    for layer in range(tower.config.layers):
        ours, theirs = f"blocks.{layer}", f"{prefix}transformer.layers.{layer}"
        attention = [f"{theirs}.attention.{name}.weight" for name in names[:4]]
        feed = [f"{theirs}.feed_forward.{name}.weight" for name in names[4:]]
        sources |= {
            f"{ours}.norm1.weight": (f"{theirs}.attention_norm.weight",),
            f"{ours}.attention.qkv.weight": tuple(attention[:3]),
            f"{ours}.attention.out.weight": (attention[3],),
            f"{ours}.norm2.weight": (f"{theirs}.ffn_norm.weight",),
            f"{ours}.mlp.gate_up.weight": tuple(feed[:2]),
            f"{ours}.mlp.down.weight": (feed[2],),
        }
    return sources


def _projector(tower: PixtralTower, first: str, second: str, norm: str, merger: str) -> Sources:
    sources: Sources = {}
    for kind in ("weight", "bias") if tower.config.projector_bias else ("weight",):
        sources[f"project_in.{kind}"] = (f"{first}.{kind}",)
        sources[f"project_out.{kind}"] = (f"{second}.{kind}",)
    if tower.projector_norm is not None:
        sources["projector_norm.weight"] = (f"{norm}.weight",)
    if tower.merger is not None:
        sources["merger.weight"] = (f"{merger}.weight",)
    return sources


def _native_sources(tower: Tower) -> Sources:
    assert isinstance(tower, PixtralTower)
    adapter = "vision_language_adapter"
    ends = (f"{adapter}.w_in", f"{adapter}.w_out", "pre_mm_projector_norm", "patch_merger.merging_layer")
    return _blocks(tower, "vision_encoder.", NATIVE_NAMES) | _projector(tower, *ends)


def _hf_sources(tower: Tower) -> Sources:
    assert isinstance(tower, PixtralTower)
    ends = [f"multi_modal_projector.{name}" for name in ("linear_1", "linear_2", "norm", "patch_merger.merging_layer")]
    return _blocks(tower, "vision_tower.", HF_NAMES) | _projector(tower, *ends)


def pairs_to_halves(tower: Tower, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Native queries and keys in the order of the tower's rotation.

    Mistral turns the rows (2i, 2i + 1) of a head together, the tower the rows (i, i + head_dim / 2).

    Args:
        tower: gives the number of heads.
        name: of the tensor in the file.
        tensor: ``[width, width]`` for queries and keys; others come back as they are.
    """
    assert isinstance(tower, PixtralTower)
    if not name.endswith((".wq.weight", ".wk.weight")):
        return tensor
    width = tensor.shape[1]
    return tensor.view(tower.config.heads, -1, 2, width).transpose(1, 2).reshape(tensor.shape)


def _deeper(tower: Tower, name: str) -> bool:
    """Blocks past the last feature layer are in the file and of no use."""
    assert isinstance(tower, PixtralTower)
    root, _, rest = name.partition("transformer.layers.")
    number = rest.partition(".")[0]
    built, stored = tower.config.layers, tower.config.stored_layers
    return root == "vision_tower." and number.isdecimal() and built <= int(number) < stored


def _native_preprocess(config: Config, rule: SizeRule) -> Preprocess:
    assert isinstance(rule, LongestSideRule)
    return PixtralPreprocess(rule)


def _hf_preprocess(config: Config, rule: SizeRule) -> Preprocess:
    """What the checkpoint's image processor says, transformers' defaults where it says nothing."""
    assert isinstance(rule, LongestSideRule)
    settings = section(config, PREPROCESSOR)
    resample = settings.get("resample", 3)
    if type(resample) is not int or resample not in FILTERS:
        raise CheckpointError(
            f"the image processor's resample must be 2 (bilinear) or 3 (bicubic), not {resample!r:.80}"
        )
    for name, wanted in FIXED.items():
        if (found := settings.get(name)) not in (None, wanted):
            raise CheckpointError(f"the image processor's {name} must be {wanted}, found {found!r:.80}")
    mean = _channels(settings, "image_mean", CLIP_MEAN)
    std = _channels(settings, "image_std", CLIP_STD)
    if min(std) <= 0:
        raise CheckpointError(f"the image processor's image_std must be above 0, found {std}")
    return PixtralPreprocess(rule, FILTERS[resample], mean, std)


def _channels(settings: Config, name: str, default: Channels) -> Channels:
    given = settings.get(name, default)
    numbers = isinstance(given, list | tuple) and all(
        isinstance(one, int | float) and not isinstance(one, bool) and abs(one) < 1e3 for one in given
    )
    if not numbers or len(given) != 3:
        raise CheckpointError(f"the image processor's {name} must be three numbers, found {given!r:.80}")
    red, green, blue = given
    return float(red), float(green), float(blue)


def _native_tower(config: Config, rule: SizeRule) -> Tower:
    return PixtralTower(native_config(config, rule))


def _hf_tower(config: Config, rule: SizeRule, *, merger: bool) -> Tower:
    return PixtralTower(hf_config(config, rule, merger=merger))


NATIVE = Layout(_native_tower, _describe, _native_sources, _native_preprocess, arrange=pairs_to_halves)
LLAVA = Layout(partial(_hf_tower, merger=False), _describe, _hf_sources, _hf_preprocess, spare=_deeper)
MISTRAL3 = Layout(partial(_hf_tower, merger=True), _describe, _hf_sources, _hf_preprocess, spare=_deeper)
