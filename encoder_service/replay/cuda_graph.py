"""Capture and replay of forwards on CUDA. Imported only where there is such a device."""

from __future__ import annotations

import torch

from encoder_service.replay.backends import Backend, Program
from encoder_service.replay.buffers import Inputs
from encoder_service.towers.base import Tower
from shared.config import ReplayBackend

#: forwards before a capture: libraries choose kernels and take their workspaces in the first ones
WARM_FORWARDS = 2


class CudaGraphBackend(Backend):
    """One graph per budget, all in one memory pool: only one runs at a time, so they may share what is in between.

    Budgets should be prepared from the largest to the smallest: the later ones then fit into the pool as it is.
    """

    name: ReplayBackend = "cuda-graph"

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def prepare(self, tower: Tower, inputs: Inputs, output: torch.Tensor) -> Program:
        """See :meth:`Backend.prepare`; the output stands outside the pool, so no other graph writes into it."""
        device = inputs.patches.device
        warm = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        warm.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(warm):
            for _ in range(WARM_FORWARDS):
                output.copy_(tower(inputs.patches, inputs.plan))
        torch.cuda.current_stream(device).wait_stream(warm)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": host threads go on copying other batches to the device meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output.copy_(tower(inputs.patches, inputs.plan))
        graph.replay()
        return graph.replay
