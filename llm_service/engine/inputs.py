"""From our prompt, items and sampling settings to vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.inputs import EngineInput
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from llm_service.prompts import Placeholder, Prompt
from llm_service.sampling import SamplingOptions
from llm_service.vllm_plugin.processing import image_item
from shared.errors import EmbeddingLost, RequestError
from shared.items import VisionItem
from shared.records import RecordError, decode_record

MODALITY = "image"


def engine_input(prompt: Prompt, items: Sequence[VisionItem], width: int) -> EngineInput:
    """An already processed engine input: vLLM has nothing left to do with pictures.

    Everything that vLLM takes on trust, and would end the engine over, is checked here.

    Args:
        prompt: token ids and placeholders.
        items: the images, by the placeholders' ``image_index``.
        width: hidden size of the language model.

    Raises:
        RequestError: placeholders and items do not fit each other, or an item's grid is absurd.
        EmbeddingLost: a record in an item is damaged; it names the key.
    """
    if not prompt.token_ids:
        raise RequestError("the prompt is empty", param="messages")
    if sorted(p.image_index for p in prompt.placeholders) != list(range(len(items))):
        raise RequestError(f"{len(prompt.placeholders)} image placeholders for {len(items)} images", param="messages")
    if not items:
        return tokens_input(prompt.token_ids, cache_salt=prompt.cache_salt)
    end = 0
    placeholders = sorted(prompt.placeholders, key=lambda p: p.offset)
    for placeholder in placeholders:
        _check(placeholder, items[placeholder.image_index], start=end, limit=len(prompt.token_ids))
        end = placeholder.offset + placeholder.length
    ordered = [items[placeholder.image_index] for placeholder in placeholders]
    fields = [image_item((1, *item.merged), _embedding(item, width)) for item in ordered]
    return mm_input(
        prompt_token_ids=prompt.token_ids,
        mm_kwargs=MultiModalKwargsItems({MODALITY: fields}),
        mm_hashes={MODALITY: [item.key for item in ordered]},
        mm_placeholders={MODALITY: [_range(placeholder) for placeholder in placeholders]},
        cache_salt=prompt.cache_salt,
    )


def _range(placeholder: Placeholder) -> PlaceholderRange:
    mask = None if placeholder.mask is None else torch.tensor(placeholder.mask)
    return PlaceholderRange(offset=placeholder.offset, length=placeholder.length, is_embed=mask)


def _check(placeholder: Placeholder, item: VisionItem, *, start: int, limit: int) -> None:
    if placeholder.offset < start or placeholder.offset + placeholder.length > limit:
        raise RequestError(f"image placeholders overlap or leave the prompt at token {placeholder.offset}")
    if placeholder.mask is not None and len(placeholder.mask) != placeholder.length:
        raise RequestError(f"an image of {placeholder.length} tokens has a mask of {len(placeholder.mask)}")
    grid, merged = item.grid, item.merged
    if item.merge < 1 or min(grid) < 1 or grid.height % item.merge or grid.width % item.merge:
        raise RequestError(f"an image has the patch grid {grid.height}x{grid.width} with merge {item.merge}")
    if not merged.patches == item.tokens == placeholder.embeddings:
        raise RequestError(
            f"an image has {item.tokens} embedding rows and the token grid {merged.height}x{merged.width}, where the "
            f"prompt holds {placeholder.embeddings} placeholders"
        )


def _embedding(item: VisionItem, width: int) -> torch.Tensor | None:
    if item.record is None:
        return None
    try:
        _, tensor = decode_record(item.record, item.key)
    except RecordError as error:
        raise EmbeddingLost(
            f"the embedding record sent for {item.key} is damaged: {error}", keys=(item.key,)
        ) from error
    if tuple(tensor.shape) != (item.tokens, width):
        raise RequestError(f"an image embedding is {list(tensor.shape)}, not [{item.tokens}, {width}]")
    return tensor


def sampling_params(options: SamplingOptions, *, whole: bool = False) -> SamplingParams:
    """vLLM's sampling parameters; text and tokens come as deltas, or ``whole`` at the end."""
    shape = None
    if options.json_schema is not None:
        shape = StructuredOutputsParams(json=options.json_schema)
    elif options.regex is not None:
        shape = StructuredOutputsParams(regex=options.regex)
    return SamplingParams(
        n=options.n,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
        stop=list(options.stop) or None,
        stop_token_ids=list(options.stop_token_ids) or None,
        logprobs=options.logprobs,
        logit_bias=options.logit_bias or None,
        structured_outputs=shape,
        ignore_eos=options.ignore_eos,
        skip_special_tokens=options.skip_special_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA,
    )
