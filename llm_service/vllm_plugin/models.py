"""The language half of a vision-language model: no tower is built, read or allocated.

One class serves every family; what differs comes from :mod:`shared.families`. Embeddings reach the model over the EC
connector or, when they travel in the request, over :meth:`TowerFreeModel.embed_multimodal`.
"""

# mypy: allow-subclassing-any
from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import product
from types import new_class
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.interfaces import (
    HasInnerState,
    IsHybrid,
    SupportsLoRA,
    SupportsMRoPE,
    SupportsMultiModal,
    SupportsPP,
)
from vllm.model_executor.models.module_mapping import MultiModelKeys
from vllm.model_executor.models.utils import (
    AutoWeightsLoader,
    WeightsMapper,
    init_vllm_registered_model,
    maybe_prefix,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sequence import IntermediateTensors

from llm_service.mrope import GridOrigin, ImageSpan, positions
from llm_service.vllm_plugin import SERVED, architecture
from llm_service.vllm_plugin.processing import EMBEDDING, GRID, NoDummies, TowerFreeInfo, TowerFreeProcessor
from shared.errors import CheckpointError
from shared.families import Family

logger = logging.getLogger(__name__)

LANGUAGE = "language_model"


class TowerFreeModel(nn.Module, SupportsMultiModal, SupportsLoRA, SupportsPP):
    """A text model that takes embedding rows at image positions.

    Attributes:
        family: what the subclass serves.
    """

    family: ClassVar[Family]
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    hf_to_vllm_mapper: ClassVar[WeightsMapper]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if family := getattr(cls, "family", None):
            prefixes = {theirs: f"{LANGUAGE}.{ours}" for theirs, ours in family.language_prefixes}
            cls.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix=prefixes)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        text = config.get_text_config()
        token = getattr(config, "vision_token", self.family.image_text)
        if token != self.family.image_text:
            raise CheckpointError(f"vision_token is {token!r}; {self.family.name} has {self.family.image_text!r}")
        self.width = int(text.hidden_size)
        self._quantized = vllm_config.quant_config is not None
        with self._mark_language_model(vllm_config):  # type: ignore[operator]
            self.language_model: Any = init_vllm_registered_model(
                vllm_config=vllm_config,
                hf_config=text,
                architectures=[self.family.language_architecture],
                prefix=maybe_prefix(prefix, LANGUAGE),
            )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """What a chat template writes for an image."""
        return cls.family.image_text if modality == "image" else None

    def embed_multimodal(self, **kwargs: object) -> list[torch.Tensor]:
        """Embeddings that travelled in the request, one ``[tokens, width]`` per image.

        Raises:
            ValueError: a request without its embedding got past the connector, or one of a wrong shape did past
                the engine's own check.
        """
        unknown = kwargs.keys() - {EMBEDDING, GRID}
        if unknown:
            raise ValueError(f"unknown image fields {sorted(unknown)}; this model takes {EMBEDDING} and {GRID}")
        given = kwargs.get(EMBEDDING)
        if not isinstance(given, list | torch.Tensor):
            raise ValueError(f"this model has no tower: an image needs {EMBEDDING}, in the request or from the cache")
        rows = list(given)
        for tensor in rows:
            if tensor.ndim != 2 or tensor.shape[1] != self.width:
                raise ValueError(f"{EMBEDDING} must be [tokens, {self.width}], not {list(tensor.shape)}")
        parameter = next(self.language_model.parameters())
        return [tensor.to(parameter.device, parameter.dtype) for tensor in rows]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Hidden states of the text model."""
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits of the text model."""
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads language tensors; tower tensors, should a loader hand any over, are dropped unread.

        Raises:
            CheckpointError: tensors are missing.
        """
        seen: set[str] = set()

        def language() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if not name.startswith(self.family.tower_prefixes):
                    seen.add(name)
                    yield name, tensor

        loaded = AutoWeightsLoader(self).load_weights(language(), mapper=self.hf_to_vllm_mapper)
        if not self._quantized:
            self._check_complete(seen, loaded)
        return loaded

    def _check_complete(self, seen: set[str], loaded: set[str]) -> None:
        """vLLM leaves parameters that no tensor filled as they are: uninitialised memory. Here that is an error."""
        missing = {name for name, _ in self.named_parameters()} - loaded
        for parts in self.family.stacked:  # one parameter, several tensors
            for name, part, other in product(seen, parts, parts):
                if f".{part}." in name:
                    missing |= {name.replace(f".{part}.", f".{other}.")} - seen
        if missing:
            raise CheckpointError(f"the checkpoint lacks {len(missing)} tensors, among them {sorted(missing)[:3]}")

    def get_mm_mapping(self) -> MultiModelKeys:
        """Module prefixes: a language model alone."""
        return MultiModelKeys.from_string_field(language_model=LANGUAGE)


class TowerFreeMRoPEModel(TowerFreeModel, SupportsMRoPE):
    """The same with three rows of positions."""

    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]:
        """Positions ``[3, tokens]`` and the delta for decoding.

        Raises:
            ValueError: an image without its grid; guessing would give fluent nonsense.
        """
        spans = []
        for feature in sorted(mm_features, key=lambda f: f.mm_position.offset):
            if feature.data is None or GRID not in feature.data:
                raise ValueError(f"image at token {feature.mm_position.offset} has no grid")
            spans.append(ImageSpan(feature.mm_position.offset, *feature.data[GRID].data.tolist()))
        rows, delta = positions(len(input_tokens), spans, GridOrigin(self.family.grid_origin))
        logger.debug("%d tokens with %d images: decoding counts on at %+d", len(input_tokens), len(spans), delta)
        return torch.from_numpy(rows), delta


class TowerFreeHybridModel(TowerFreeModel, HasInnerState, IsHybrid):
    """The same with Mamba layers, whose states the text model's own class describes."""

    @classmethod
    def _text_class(cls) -> Any:
        return ModelRegistry.models[str(cls.family.language_architecture)].load_model_cls()

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Shapes of a sequence's states."""
        text = vllm_config.with_hf_config(vllm_config.model_config.hf_config.get_text_config())
        return cls._text_class().get_mamba_state_shape_from_config(text)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> Any:
        """Dtypes of a sequence's states."""
        text = vllm_config.with_hf_config(vllm_config.model_config.hf_config.get_text_config())
        return cls._text_class().get_mamba_state_dtype_from_config(text)

    @classmethod
    def get_mamba_state_copy_func(cls) -> Any:
        """How the prefix cache copies states."""
        return cls._text_class().get_mamba_state_copy_func()


_processing = MULTIMODAL_REGISTRY.register_processor(TowerFreeProcessor, info=TowerFreeInfo, dummy_inputs=NoDummies)


def tower_free_class(family: Family) -> type[TowerFreeModel]:
    """The class that vLLM builds for a family: the same for all, but for M-RoPE's positions and Mamba's states."""
    base = TowerFreeHybridModel if family.hybrid else TowerFreeMRoPEModel if family.grid_origin else TowerFreeModel
    body = {"family": family, "__module__": __name__, "__doc__": base.__doc__}
    return _processing(new_class(architecture(family), (base,), exec_body=lambda namespace: namespace.update(body)))


# vLLM finds its classes as attributes of this module
globals().update({architecture(family): tower_free_class(family) for family in SERVED})
