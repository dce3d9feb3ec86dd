"""Service times of true models on true devices, worked out from their sizes. Every assumption is a named number."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.capacity.model import Costs
from benchmarks.capacity.stations import StepTimes


@dataclass(frozen=True)
class Tower:
    """A vision tower and the picture that is asked about.

    Attributes:
        layers, width, intermediate: of the transformer.
        patches: of one picture.
        merge: patches of one embedding row.
        columns: width of the language model.
    """

    layers: int
    width: int
    intermediate: int
    patches: int
    merge: int
    columns: int

    @property
    def operations(self) -> float:
        """Of one picture's forward: projections, feed-forward and attention."""
        weights = self.layers * (4 * self.width**2 + 2 * self.width * self.intermediate)
        return 2.0 * weights * self.patches + 4.0 * self.layers * self.width * self.patches**2

    @property
    def tokens(self) -> int:
        """Embedding rows of one picture."""
        return self.patches // self.merge

    @property
    def record_bytes(self) -> int:
        """Of one picture's embedding in bfloat16."""
        return self.tokens * self.columns * 2


@dataclass(frozen=True)
class Language:
    """A language model.

    Attributes:
        parameters: count.
        cache_bytes: of the KV cache, per token.
    """

    parameters: float
    cache_bytes: float


@dataclass(frozen=True)
class Device:
    """An accelerator.

    Attributes:
        operations: bfloat16 matrix operations per second, as its maker says.
        bandwidth: of its memory, bytes per second.
    """

    operations: float
    bandwidth: float


@dataclass(frozen=True)
class Assumptions:
    """What is not on a data sheet.

    Attributes:
        tower_share, prompt_share: of the device's operations that a tower and the reading of prompts reach.
        memory_share: of its bandwidth that decoding reaches.
        launch: of a forward or step, seconds.
        ingress: host work of a request, seconds.
        lookup: one question to Redis, seconds of the Redis process.
        shard_bandwidth: of one Redis process, bytes per second, both directions together.
        miss: of a new picture beside the forward, seconds.
        context: tokens whose KV cache an answer reads at every step.
    """

    tower_share: float = 0.40
    prompt_share: float = 0.50
    memory_share: float = 0.70
    launch: float = 0.003
    ingress: float = 0.004
    lookup: float = 0.00005
    shard_bandwidth: float = 1.5e9
    miss: float = 0.015
    context: int = 2048


#: pictures of 1024 x 1024 where the tower takes them so; sizes from the published configurations
TOWERS = {
    "isaac-0.1": Tower(27, 1152, 4304, patches=4096, merge=4, columns=2048),
    "pixtral-12b": Tower(24, 1024, 4096, patches=4096, merge=1, columns=5120),
    "mistral-small-3.1": Tower(24, 1024, 4096, patches=5329, merge=4, columns=5120),
    "nemotron-nano-vl": Tower(32, 1280, 5120, patches=5120, merge=4, columns=4096),
}
LANGUAGES = {
    "isaac-0.1": Language(1.7e9, 2 * 28 * 8 * 128 * 2),
    "pixtral-12b": Language(12.2e9, 2 * 40 * 8 * 128 * 2),
    "mistral-small-3.1": Language(23.6e9, 2 * 40 * 8 * 128 * 2),
    "nemotron-nano-vl": Language(8.0e9, 2 * 32 * 8 * 128 * 2),
}
DEVICES = {
    "h200": Device(989e12, 4.8e12),
    "h100": Device(989e12, 3.35e12),
    "a100": Device(312e12, 2.04e12),
    "l40s": Device(362e12, 0.86e12),
    "l4": Device(121e12, 0.30e12),
}


def costs(tower: Tower, language: Language, device: Device, assumed: Assumptions) -> Costs:
    """Service times of one replica per device."""
    bandwidth = device.bandwidth * assumed.memory_share
    step = StepTimes(
        fixed=max(assumed.launch, 2 * language.parameters / bandwidth),
        prompt_token=2 * language.parameters / (device.operations * assumed.prompt_share),
        sequence=language.cache_bytes * assumed.context / bandwidth,
    )
    return Costs(
        ingress=assumed.ingress,
        lookup=assumed.lookup,
        record_bytes=tower.record_bytes,
        shard_bandwidth=assumed.shard_bandwidth,
        miss=assumed.miss,
        forward_fixed=assumed.launch,
        forward_image=tower.operations / (device.operations * assumed.tower_share),
        step=step,
    )
