"""The configurations of the demo models' checkpoints."""

from __future__ import annotations

from typing import Any

from tools.checkpoints.pixtral import processor_files
from tools.demo.design import ISAAC, ISAAC_TOWER, PIXTRAL, PIXTRAL_RULE, PIXTRAL_TOWER
from tools.demo.language_model import LanguageConfig
from tools.demo.pictures import RULE

MAX_POSITIONS = 4096


def _text(language: LanguageConfig) -> dict[str, Any]:
    """Sizes of a language model, in the names that all its kinds share."""
    return {
        "vocab_size": language.vocabulary,
        "hidden_size": language.width,
        "intermediate_size": language.hidden,
        "num_hidden_layers": language.layers,
        "num_attention_heads": language.heads,
        "num_key_value_heads": language.key_heads,
        "head_dim": language.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": language.norm_eps,
        "rope_theta": language.rope_theta,
        "tie_word_embeddings": False,
    }


def isaac_config() -> dict[str, Any]:
    """``config.json`` of the Isaac demo."""
    language = ISAAC.language
    text = _text(language) | {
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": list(language.mrope_section),
        },
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    vision = {
        "model_type": "pixel_shuffle_siglip2",
        "hidden_size": ISAAC_TOWER.width,
        "intermediate_size": ISAAC_TOWER.hidden,
        "num_hidden_layers": ISAAC_TOWER.layers,
        "num_attention_heads": ISAAC_TOWER.heads,
        "num_channels": 3,
        "num_patches": ISAAC_TOWER.position_side**2,
        "patch_size": ISAAC_TOWER.patch_size,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": ISAAC_TOWER.norm_eps,
        "pixel_shuffle_scale_factor": ISAAC_TOWER.merge,
    }
    return {
        "architectures": ["IsaacForConditionalGeneration"],
        "model_type": "isaac",
        **text,
        "vision_config": vision,
        "video_patch_size": ISAAC_TOWER.patch_size,
        "pixel_shuffle_scale": ISAAC_TOWER.merge,
        "vision_min_num_patches": RULE.min_patches,
        "vision_max_num_patches": RULE.max_patches,
        "max_sequence_length": MAX_POSITIONS,
        "vision_token": "<image>",
    }


def pixtral_config(image_id: int) -> dict[str, Any]:
    """``config.json`` of the Pixtral demo; ``image_id``: of ``[IMG]``."""
    language, tower = PIXTRAL.language, PIXTRAL_TOWER
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "dtype": "bfloat16",
        "image_token_index": image_id,
        "multimodal_projector_bias": tower.projector_bias,
        "projector_hidden_act": tower.projector_activation,
        "spatial_merge_size": tower.merge,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            **_text(language),
            "sliding_window": None,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": tower.width,
            "num_hidden_layers": tower.layers,
            "num_attention_heads": tower.heads,
            "head_dim": tower.width // tower.heads,
            "intermediate_size": tower.hidden,
            "hidden_act": tower.activation,
            "image_size": PIXTRAL_RULE.longest,
            "patch_size": tower.patch_size,
            "num_channels": 3,
            "rope_theta": tower.rope_theta,
        },
    }


def pixtral_processor() -> dict[str, dict[str, Any]]:
    """Files that tell transformers and vLLM how the Pixtral demo sees pictures."""
    files = processor_files(PIXTRAL_RULE.patch_size, PIXTRAL_RULE.longest, PIXTRAL_RULE.merge)
    files["processor_config.json"] |= {
        "image_token": PIXTRAL.image,
        "image_break_token": PIXTRAL.row_end,
        "image_end_token": PIXTRAL.image_end,
    }
    return files
