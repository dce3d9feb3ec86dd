"""What vLLM loads of ours: tower-free model classes, a weight loader and the Redis EC connector.

vLLM calls :func:`register` in every process it starts, over the entry point group ``vllm.general_plugins``. The
stock architectures stay as they are; ours have names of their own, which the engine asks for (see :mod:`.overrides`).
"""

from __future__ import annotations

from shared.families import FAMILIES, Family

#: families with a language half
SERVED: tuple[Family, ...] = tuple(family for family in FAMILIES.values() if family.language_architecture)

#: the ``load_format`` of :class:`llm_service.vllm_plugin.loader.TowerFreeLoader`
LOAD_FORMAT = "lookonce"


def architecture(family: Family) -> str:
    """The name under which vLLM knows the tower-free class of a family."""
    return f"Lookonce{family.architectures[0]}"


def register() -> None:
    """Makes the tower-free architectures and the loader known; safe to call again."""
    _calm_llvmlite()
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
    from vllm.model_executor.models import ModelRegistry

    from llm_service.vllm_plugin.configs import register_configs

    register_configs()
    known = ModelRegistry.get_supported_archs()
    for family in SERVED:
        name = architecture(family)
        if name not in known:
            # as a string, so that nothing is imported until the model is built
            ModelRegistry.register_model(name, f"llm_service.vllm_plugin.models:{name}")
    if LOAD_FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        from llm_service.vllm_plugin.loader import TowerFreeLoader

        register_model_loader(LOAD_FORMAT)(TowerFreeLoader)


def _calm_llvmlite() -> None:
    """Lets engines start on CPUs in processes that use numba (M-RoPE positions do).

    vLLM looks for Triton's kernels in the attributes of all modules. llvmlite's handle answers to every name, also to
    ``__dict__``, with a function, and the search stumbles over it. Here it gets an empty one.
    """
    from llvmlite.binding import ffi

    ffi.lib._fntab["__dict__"] = {}
