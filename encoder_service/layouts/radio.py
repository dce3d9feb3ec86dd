"""RADIO checkpoints: the old remote-code names and transformers' own, alone or inside a Nemotron chat model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from encoder_service.layouts.base import Config, Layout, Sources, Stored, positive, section, whole
from encoder_service.layouts.radio_names import VISION, absent, is_spare, stored_names
from encoder_service.preprocess.base import CLIP_MEAN, CLIP_STD, Channels, Preprocess
from encoder_service.preprocess.radio import RadioPreprocess
from encoder_service.towers.base import Tower
from encoder_service.towers.layers import ACTIVATIONS
from encoder_service.towers.radio import RadioTower, RadioTowerConfig
from shared.errors import CheckpointError
from shared.model_config import PREPROCESSOR
from shared.radio import language
from shared.sizing import SizeRule
from shared.sizing_radio import DynamicRule, FixedRule, TileRule

MAX_LAYERS = 1024
#: (width, layers, heads, inner width) of the ViTs that old configurations give by name
VITS = {
    "vit_small_patch16_224": (384, 12, 6, 1536),
    "vit_base_patch16_224": (768, 12, 12, 3072),
    "vit_large_patch16_224": (1024, 24, 16, 4096),
    "vit_huge_patch16_224": (1280, 32, 16, 5120),
}
NORMALISATION = {"norm_mean": CLIP_MEAN, "norm_std": CLIP_STD}
#: where the files may repeat that, and how far bfloat16 moves it
CONDITIONERS = tuple(f"{vision}{radio}input_conditioner." for vision in ("", VISION) for radio in ("", "radio_model."))
ROUNDING = 4e-3
#: Pillow's numbers for the filters that an image processor may name
FILTERS: dict[Any, Literal["bicubic-8bit"]] = {3: "bicubic-8bit", None: "bicubic-8bit"}


def vit_config(vision: Config, rule: SizeRule) -> dict[str, Any]:
    """Sizes of the ViT from ``config.json``, alone, or from the ``vision_config`` of a chat model.

    Old configurations name a ViT in ``args``; sizes that stand next to it win, as they do in fine-tuned copies.

    Raises:
        CheckpointError: a value that no tower can have; names it.
    """
    old = section(vision, "args")
    sizes = _old_sizes(vision, old, rule) if old else _native_sizes(vision, rule)
    activation = vision.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise CheckpointError(f"config.json: hidden_act of the tower must be one of {known}; found {activation!r:.80}")
    if sizes["width"] % sizes["heads"]:
        raise CheckpointError(
            f"config.json: hidden_size {sizes['width']} of the tower is not divisible by num_attention_heads "
            f"{sizes['heads']}"
        )
    if (used := max(sizes["summary"], default=0)) >= sizes["class_tokens"]:
        raise CheckpointError(
            f"config.json: the summary uses class token {used}, but there are {sizes['class_tokens']} (summary_idxs)"
        )
    if rule.patch_size * sizes["position_side"] > 1 << 16:
        raise CheckpointError(f"config.json: max_img_size of {sizes['position_side']} patches is too large")
    frames = 1 if vision.get("video_temporal_patch_size") is None else vision["video_temporal_patch_size"]
    return {
        **sizes,
        "patch_size": rule.patch_size,
        "qkv_bias": bool({**vision, **old}.get("qkv_bias", True)),
        "qk_norm": bool({**vision, **old}.get("qk_normalization", False)),
        "norm_eps": positive(vision, "layer_norm_eps", 1e-6),
        "activation": activation,
        "frames": whole({"video_temporal_patch_size": frames}, "video_temporal_patch_size", most=64),
    }


def _old_sizes(vision: Config, args: Config, rule: SizeRule) -> dict[str, Any]:
    name = args.get("model")
    if str(name) not in VITS and "hidden_size" not in vision:
        raise CheckpointError(f"config.json: args.model must be one of {', '.join(VITS)}; found {name!r:.80}")
    width, layers, heads, hidden = VITS.get(str(name), (None, None, None, None))
    if vision.get("separate_video_embedder") is False and vision.get("video_temporal_patch_size") not in (None, 1):
        raise CheckpointError("config.json: separate_video_embedder must be true for video_temporal_patch_size above 1")
    table = whole(args, "cpe_max_size", 2048)
    resolution = vision.get("preferred_resolution") or [224, 224]
    if not isinstance(resolution, list) or not resolution:
        raise CheckpointError(f"config.json: preferred_resolution must be two numbers, found {resolution!r:.80}")
    teachers = args.get("teachers") or []
    if not isinstance(teachers, list) or not all(isinstance(teacher, Mapping) for teacher in teachers):
        raise CheckpointError("config.json: teachers must be a list of objects")
    names = [str(teacher.get("name")) for teacher in teachers]
    per_teacher = bool(args.get("cls_token_per_teacher")) and bool(teachers)
    class_tokens = len(set(names)) if per_teacher else 1
    summary = [i for i, teacher in enumerate(teachers) if teacher.get("use_summary", True)]
    return {
        "width": whole(vision, "hidden_size", width),
        "layers": whole(vision, "num_hidden_layers", layers, most=MAX_LAYERS),
        "heads": whole(vision, "num_attention_heads", heads),
        "hidden": whole(vision, "intermediate_size", hidden),
        "position_side": max(round(table / rule.patch_size), 1),
        "resize_first": table != resolution[0],
        "class_tokens": class_tokens,
        "registers": _old_registers(args, class_tokens),
        # one token for all teachers is the summary itself
        "summary": tuple(i for i in summary if names.index(names[i]) == i) if per_teacher else (0,),
    }


def _old_registers(args: Config, class_tokens: int) -> int:
    """Given as such, or as what fills the prefix up to a multiple: a full multiple more when it comes out even."""
    if args.get("cpe_num_registers"):
        return whole(args, "cpe_num_registers", most=1024)
    if args.get("register_multiple"):
        multiple = whole(args, "register_multiple", most=1024)
        return multiple - class_tokens % multiple
    return 0


def _native_sizes(vision: Config, rule: SizeRule) -> dict[str, Any]:
    if vision.get("use_swiglu_ffn"):
        raise CheckpointError("config.json: use_swiglu_ffn is not supported; RADIO's published towers have none")
    if (channels := vision.get("num_channels", 3)) != 3:
        raise CheckpointError(f"config.json: num_channels must be 3, found {channels!r:.80}")
    width = whole(vision, "hidden_size", 1280)
    ratio = vision.get("mlp_ratio", 4.0)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 64:
        raise CheckpointError(f"config.json: mlp_ratio must be a number up to 64, found {ratio!r:.80}")
    summary = vision.get("summary_idxs")
    summary = [0, 1] if summary is None else summary
    if not isinstance(summary, list) or not summary or not all(type(i) is int and i >= 0 for i in summary):
        raise CheckpointError(f"config.json: summary_idxs must be a list of class tokens, found {summary!r:.80}")
    registers = vision.get("num_registers", 7)
    return {
        "width": width,
        "layers": whole(vision, "num_hidden_layers", 32, most=MAX_LAYERS),
        "heads": whole(vision, "num_attention_heads", 16),
        "hidden": int(width * ratio),
        "position_side": max(whole(vision, "max_img_size", 2048) // rule.patch_size, 1),
        "class_tokens": whole(vision, "num_cls_tokens", 3, most=1024),
        "registers": registers if registers == 0 else whole(vision, "num_registers", 7, most=1024),
        "summary": tuple(summary),
    }


def _build_alone(config: Config, rule: SizeRule) -> Tower:
    return RadioTower(RadioTowerConfig(**vit_config(config, rule)))


def _build_chat(config: Config, rule: SizeRule, kind: str) -> Tower:
    sizes = vit_config(section(config, "vision_config"), rule)
    if (stated := config.get("vit_hidden_size", sizes["width"])) != sizes["width"]:
        raise CheckpointError(f"config.json: vit_hidden_size is {stated!r:.80}, the tower has {sizes['width']}")
    text = language(config)
    return RadioTower(
        RadioTowerConfig(
            **sizes,
            merge=rule.merge,
            columns_first=config.get("ps_version", "v2") == "v1",
            tile=rule.tile if isinstance(rule, TileRule) else None,
            final_norm=kind == "nano" and bool(text.get("num_nextn_predict_layers")),
            projector=kind,
            projector_hidden=whole(config, "projector_hidden_size"),
            output_width=whole(text, "hidden_size"),
        )
    )


def _describe(tower: Tower) -> str:
    assert isinstance(tower, RadioTower)
    return repr(tower.config)


def _sources(tower: Tower) -> Sources:
    return _spelled(tower, {}, frozenset())


def _spelled(tower: Tower, sources: Sources, names: frozenset[str]) -> Sources:
    assert isinstance(tower, RadioTower)
    return stored_names(tower.config, tuple(tower.state_dict()), names)


def channels(config: Config, name: str, default: Channels) -> Channels:
    """Three numbers of 0 to 1, such as a mean per channel.

    Raises:
        CheckpointError: anything else.
    """
    found = config.get(name)
    if found is None:
        return default
    if (
        not isinstance(found, list)
        or len(found) != 3
        or not all(type(v) in (int, float) and 0 <= v <= 1 for v in found)
    ):
        raise CheckpointError(f"config.json: {name} must be three numbers from 0 to 1, found {found!r:.80}")
    first, second, third = (float(value) for value in found)
    return first, second, third


def _completed(config: Config, stored: Stored) -> Config:
    """With the mean and deviation of the files' input conditioner, where the configuration gives none.

    Files in bfloat16 hold them rounded; then the exact ones stay.

    Raises:
        CheckpointError: the files contradict the configuration.
    """
    found: dict[str, Any] = {}
    for name, default in NORMALISATION.items():
        known = channels(config, name, default)
        for prefix in CONDITIONERS:
            if (tensor := stored(f"{prefix}{name}")) is None:
                continue
            values = tensor.float().flatten().tolist()
            if len(values) == 3 and max(abs(a - b) for a, b in zip(values, known, strict=True)) <= ROUNDING:
                continue
            if config.get(name) is not None:
                raise CheckpointError(f"config.json: {name} is {list(known)}, {prefix}{name} in the files is {values}")
            found[name] = values
    return {**config, **found}


def _preprocess(config: Config, rule: SizeRule) -> Preprocess:
    mean, std = (channels(config, name, default) for name, default in NORMALISATION.items())
    if not all(std):
        raise CheckpointError("config.json: norm_std must be above 0")
    if isinstance(rule, FixedRule):
        number = section(config, PREPROCESSOR).get("resample")
        if number not in FILTERS:
            raise CheckpointError(f"preprocessor_config.json: resample must be 3 (bicubic), found {number!r:.80}")
        return RadioPreprocess(rule, FILTERS[number], mean, std)
    if isinstance(rule, TileRule) and rule.choice == "area":
        return RadioPreprocess(rule, "pillow", mean, std)
    smooth = isinstance(rule, TileRule | DynamicRule)
    return RadioPreprocess(rule, "bicubic" if smooth else "bilinear", mean, std)


def _layout(build: Callable[[Config, SizeRule], Tower]) -> Layout:
    return Layout(
        build, _describe, _sources, _preprocess, spare=is_spare, spelled=_spelled, absent=absent, completed=_completed
    )


ALONE = _layout(_build_alone)
LLAMA = _layout(partial(_build_chat, kind="llama"))
NANO = _layout(partial(_build_chat, kind="nano"))
