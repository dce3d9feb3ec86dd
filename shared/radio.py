"""RADIO's families: the encoder alone, and the two chat models that see through it."""

from __future__ import annotations

from typing import Any

from shared.errors import CheckpointError
from shared.family import Family
from shared.model_config import PREPROCESSOR, Config, section, whole_number
from shared.sizing import SizeRule
from shared.sizing_radio import DynamicRule, FixedRule, NearestRule, TileRule

#: no side of a patch, tile or picture is longer, pixels
MOST = 1 << 20
#: tiles of a picture where a checkpoint does not say
MAX_TILES = 12


def _first(configs: tuple[Config, ...], *names: str) -> Any:
    """The first of these settings that one of the configurations has."""
    return next((config[name] for name in names for config in configs if config.get(name) is not None), None)


def _alone_rule(config: Config) -> SizeRule:
    """A fixed size when the image processor resizes, else the nearest size that the tower takes."""
    patch = whole_number("patch_size", config.get("patch_size", 16))
    processor = section(config, PREPROCESSOR)
    if processor.get("do_resize") and (size := section(processor, "size")):
        height, width = (whole_number(name, size.get(name)) for name in ("height", "width"))
        if height % patch or width % patch:
            raise CheckpointError(f"preprocessor_config.json: size {height}x{width} is not whole patches of {patch}")
        return FixedRule(patch_size=patch, rows=height // patch, columns=width // patch)
    side = _first((config, section(config, "args")), "max_img_size", "cpe_max_size", "max_resolution")
    return NearestRule(patch_size=patch, max_side=max(whole_number("max_img_size", side or 2048), patch))


def _alone_max_tokens(config: Config) -> int:
    rule = _alone_rule(config)
    return rule.grid(MOST, MOST).patches


def _merge(config: Config) -> int:
    ratio = config.get("downsample_ratio", 0.5)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1 or 1 / ratio % 1:
        raise CheckpointError(f"config.json: downsample_ratio must be 1/2, 1/3, …, found {ratio!r:.80}")
    return round(1 / ratio)


def _tile_rule(config: Config, choice: Any, tiles: Any, thumbnail: Any) -> TileRule:
    vision = section(config, "vision_config")
    patch = whole_number("patch_size", _first((vision, config), "patch_size") or 16)
    size = whole_number("force_image_size", _first((config, vision), "force_image_size", "image_size") or 512)
    merge = _merge(config)
    if size % (patch * merge):
        raise CheckpointError(
            f"config.json: force_image_size {size} is not whole blocks of {merge}x{merge} patches of {patch}"
        )
    return TileRule(
        patch_size=patch,
        merge=merge,
        tile=size // patch,
        max_tiles=whole_number("max_num_tiles", tiles or MAX_TILES),
        thumbnail="last" if thumbnail is None or thumbnail else "none",
        choice=choice,
    )


def _llama_rule(config: Config) -> TileRule:
    """The image processor's settings come first, as in the published model's code."""
    processor = section(config, PREPROCESSOR)
    tiles = _first((processor, config), "max_num_tiles", "max_dynamic_patch")
    return _tile_rule(
        {**config, "force_image_size": processor.get("image_size") or config.get("force_image_size")},
        "area",
        tiles,
        _first((processor, config), "use_thumbnail"),
    )


def _nano_rule(config: Config) -> TileRule | DynamicRule:
    """Dynamic resolution when the vision configuration has bounds of patches, else tiles."""
    args = section(section(config, "vision_config"), "args")
    if "min_num_patches" not in args:
        return _tile_rule(
            config, "ratio", section(config, PREPROCESSOR).get("max_num_tiles"), config.get("use_thumbnail")
        )
    merge = _merge(config)
    most = args.get("max_num_patches") or 0
    if most == 0:  # no bound of its own: what the context holds
        most = merge**2 * whole_number("max_position_embeddings", language(config).get("max_position_embeddings"))
    return DynamicRule(
        patch_size=whole_number("patch_size", _first((config, section(config, "vision_config")), "patch_size") or 16),
        merge=merge,
        min_patches=whole_number("min_num_patches", args["min_num_patches"]),
        max_patches=whole_number("max_num_patches", most),
    )


def language(config: Config) -> Config:
    """The text model's part of a chat model's configuration, under its old or its new name."""
    return section(config, "text_config") or section(config, "llm_config")


RADIO = Family(
    name="radio",
    model_type="radio",
    architectures=("RADIOModel", "RadioModel"),
    tower_parts=("radio_model.", "embeddings.", "encoder.", "input_conditioner.", "summary_idxs"),
    size_rule=_alone_rule,
    max_tokens=_alone_max_tokens,
)

LLAMA_NEMOTRON = Family(
    name="llama-nemotron",
    model_type="Llama_Nemotron_Nano_VL",
    architectures=("Llama_Nemotron_Nano_VL",),
    tower_parts=("vision_model.", "mlp1."),
    size_rule=_llama_rule,
    max_tokens=lambda config: _llama_rule(config).max_tokens,
    image_text="<image>",
    image_token="<image>",
    around=("<img>", "</img>"),
    language_architecture="LlamaForCausalLM",
    language_prefixes=(("language_model.", ""),),
)

#: its text model has layers of attention and of Mamba
NEMOTRON_NANO = Family(
    name="nemotron-nano",
    model_type="NemotronH_Nano_VL_V2",
    architectures=("NemotronH_Nano_VL_V2",),
    tower_parts=("vision_model.", "mlp1.", "vision_projector."),
    size_rule=_nano_rule,
    max_tokens=lambda config: _nano_rule(config).max_tokens,
    image_text="<image>",
    image_token="<image>",
    around=("<img>", "</img>"),
    language_architecture="NemotronHForCausalLM",
    hybrid=True,
    stacked=(("q_proj", "k_proj", "v_proj"),),
    language_prefixes=(("language_model.", ""),),
)
