"""How a forward over static buffers is run: as it is, compiled, or captured (see ``cuda_graph``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from encoder_service.replay.buffers import Inputs
from encoder_service.towers.base import Plan, Tower
from shared.config import ReplayBackend
from shared.errors import ConfigError

#: reads the inputs it was made for and writes the output it was made for
Program = Callable[[], None]


class Backend(ABC):
    """Makes one program per budget."""

    name: ReplayBackend

    @abstractmethod
    def prepare(self, tower: Tower, inputs: Inputs, output: torch.Tensor) -> Program:
        """A program for these arrays, run once so that everything slow is behind it.

        Args:
            tower: on the arrays' device.
            inputs: holding a batch that can be run.
            output: ``[budget.patches / merge², width]``.
        """


class EagerBackend(Backend):
    """The tower as it is: what the other backends are compared with."""

    name: ReplayBackend = "eager"

    def prepare(self, tower: Tower, inputs: Inputs, output: torch.Tensor) -> Program:
        """See :meth:`Backend.prepare`."""

        def program() -> None:
            output.copy_(tower(inputs.patches, inputs.plan))

        program()
        return program


class CompiledBackend(Backend):
    """``torch.compile`` of the whole forward, every shape a constant; no graph break and no second compilation."""

    name: ReplayBackend = "compiled"

    def prepare(self, tower: Tower, inputs: Inputs, output: torch.Tensor) -> Program:
        """See :meth:`Backend.prepare`; takes a C++ compiler on CPU."""
        # the compiler itself is 70 MB, which the other backends need not hold
        from torch._inductor import config as inductor_config

        compiled = torch.compile(  # type: ignore[call-overload]  # its annotations lack the last two
            _forward_into, fullgraph=True, dynamic=False, recompile_limit=1, isolate_recompiles=True
        )
        bounds, most, extras = inputs.plan.cu_seqlens, inputs.plan.max_seqlen, inputs.plan.extras

        def program() -> None:
            compiled(tower, inputs.patches, bounds, most, extras, output)

        with inductor_config.patch(compile_threads=1):  # no pool of compiler processes beside the replica
            program()
        return program


def _forward_into(
    tower: Tower,
    patches: torch.Tensor,
    bounds: torch.Tensor,
    most: int,
    extras: dict[str, torch.Tensor],
    output: torch.Tensor,
) -> None:
    output.copy_(tower(patches, Plan(bounds, most, extras)))


def make_backend(name: ReplayBackend, device: torch.device) -> Backend:
    """The backend of that name.

    Raises:
        ConfigError: ``cuda-graph`` on a device that is not CUDA.
    """
    if name == "eager":
        return EagerBackend()
    if name == "compiled":
        return CompiledBackend()
    if device.type != "cuda":
        raise ConfigError(f"encoder.replay.backend cuda-graph needs a CUDA device, encoder.device is {device}")
    from encoder_service.replay.cuda_graph import CudaGraphBackend

    return CudaGraphBackend()
