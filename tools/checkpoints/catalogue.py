"""The layouts by name, each with what is special about it and how it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.checkpoints.isaac import write_isaac
from tools.checkpoints.pixtral import write_pixtral
from tools.checkpoints.radio import Shape, write_radio

#: a language model of 48 channels behind the tower, with its tokenizer
CHAT = Shape(language=True)


@dataclass(frozen=True)
class Entry:
    """One layout.

    Attributes:
        about: one line for the list.
        write: writes a checkpoint into a folder; equal seeds give equal files.
        family: as ``lookonce inspect`` tells it.
    """

    about: str
    write: Callable[..., Path]
    family: str


def _pixtral(about: str, family: str, kind: str, **options: object) -> Entry:
    return Entry(about, partial(write_pixtral, kind=kind, **options), family)


def _radio(about: str, family: str, kind: str, shape: Shape | None = None, **options: object) -> Entry:
    return Entry(about, partial(write_radio, kind=kind, shape=shape, **options), family)


LAYOUTS: dict[str, Entry] = {
    "isaac-flat": Entry("old Isaac: flat configuration, model.layers.*, shards", write_isaac, "isaac"),
    "isaac-nested": Entry(
        "new Isaac: text_config, model.text_model.*, shards", partial(write_isaac, nested=True), "isaac"
    ),
    "isaac-one-file": Entry("old Isaac in one file", partial(write_isaac, sharded=False), "isaac"),
    "isaac-tied": Entry("Isaac whose head is the token embeddings", partial(write_isaac, tied=True), "isaac"),
    "pixtral-native": _pixtral("Mistral's: params.json, consolidated file, tekken.json", "pixtral", "native"),
    "pixtral-native-sharded": _pixtral("the same, consolidated shards", "pixtral", "native", sharded=True),
    "pixtral-native-merger": _pixtral(
        "Mistral's with norm and patch merger (Mistral-Small-3.1)", "pixtral", "native-merger"
    ),
    "pixtral-hf": _pixtral("transformers' Llava with a Pixtral tower, older names", "pixtral-hf", "llava"),
    "pixtral-hf-new-names": _pixtral(
        "the same, model.vision_tower.*, shards", "pixtral-hf", "llava", new_names=True, sharded=True
    ),
    "pixtral-hf-two-layers": _pixtral(
        "the same, features of two layers side by side", "pixtral-hf", "llava", feature_layer=[1, -1]
    ),
    "mistral3": _pixtral("transformers' Mistral3: norm and patch merger, older names", "mistral3", "mistral3"),
    "mistral3-new-names": _pixtral(
        "the same, model.vision_tower.*, shards", "mistral3", "mistral3", new_names=True, sharded=True
    ),
    "radio-old": _radio("C-RADIO's own code: radio_model.*, fused q, k, v", "radio", "old"),
    "radio-old-sharded": _radio("the same, shards", "radio", "old", sharded=True),
    "radio-old-norms": _radio(
        "the same, norms of q and k, layer scales", "radio", "old", Shape(qk_norm=True, scales=True)
    ),
    "radio-video": _radio("the same, two frames to a tubelet", "radio", "old", Shape(frames=2)),
    "radio-native": _radio("transformers' RADIO: q_proj, k_proj, v_proj", "radio", "native"),
    "radio-native-long": _radio("the same, attention.query, key, value", "radio", "native-long"),
    "llama-nemotron": _radio("Llama-Nemotron-Nano-VL with its Llama", "llama-nemotron", "llama", CHAT),
    "llama-nemotron-sharded": _radio("the same, shards", "llama-nemotron", "llama", CHAT, sharded=True),
    "llama-nemotron-v1": _radio(
        "the same, older pixel shuffle", "llama-nemotron", "llama", Shape(language=True, ps_version="v1")
    ),
    "nemotron-nano-v2": _radio("Nemotron-Nano-VL-V2, attention and Mamba, tiles", "nemotron-nano", "nano", CHAT),
    "nemotron-nano-v2-dynamic": _radio(
        "the same, dynamic resolution", "nemotron-nano", "nano", Shape(language=True, bounds=(4, 64))
    ),
}
