"""vLLM's view of image inputs when there is no tower: limits and field layout, no processing.

Requests come in already processed, with token ids, placeholders and grids. What is left for vLLM to ask is how many
tokens an image can have, which sizes its encoder cache.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.feature_extraction_utils import BatchFeature
from vllm.config.multimodal import MultiModalDummyOptions
from vllm.inputs import MultiModalDataDict
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
)
from vllm.multimodal.parse import MultiModalDataItems
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo, PromptUpdate

from shared.families import family_of, read_config

#: merged grid (frames, height, width) of one image, int64
GRID = "merged_grid_thw"
#: embedding rows of one image that travel in the request, ``[tokens, width]``
EMBEDDING = "image_embeds"

_BATCHED = MultiModalBatchedField()
_BATCHED_ON_HOST = MultiModalBatchedField(keep_on_cpu=True)


def image_item(grid: tuple[int, int, int], embedding: torch.Tensor | None = None) -> MultiModalKwargsItem:
    """One image of a request; with its embedding when that travels along."""
    fields = {GRID: MultiModalFieldElem(data=torch.tensor(grid, dtype=torch.int64), field=_BATCHED_ON_HOST)}
    if embedding is not None:
        fields[EMBEDDING] = MultiModalFieldElem(data=embedding, field=_BATCHED)
    return MultiModalKwargsItem(fields)


class TowerFreeInfo(BaseProcessingInfo):
    """Limits, from the checkpoint's configuration."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """Images only; how many, the API decides."""
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        """Most tokens of one image, no more than the context holds."""
        config = read_config(Path(self.model_id))
        return {"image": min(family_of(config).max_tokens(config), seq_len)}


class TowerFreeProcessor(BaseMultiModalProcessor[TowerFreeInfo]):
    """Refuses to process: pictures never come this far."""

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return {}

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, Any],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        raise NotImplementedError("this model takes image embeddings, not pictures")

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> MultiModalInput:
        """What vLLM warms up with: nothing."""
        return mm_input([], MultiModalKwargsItems(), {}, {})


class NoDummies(BaseDummyInputsBuilder[TowerFreeInfo]):
    """No dummy pictures: there is no tower to profile."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """Empty."""
        return ""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: MultiModalDummyOptions
    ) -> MultiModalDataDict:
        """Empty."""
        return {}
