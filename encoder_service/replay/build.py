"""From settings to a replay that waits for its warm-up."""

from __future__ import annotations

from encoder_service.checkpoints import LoadedEncoder
from encoder_service.device import smallest_batch
from encoder_service.replay.backends import make_backend
from encoder_service.replay.budgets import ladder, smallest_useful
from encoder_service.replay.runner import Replay
from shared.config import EncoderSettings

#: batches under way at once where copies overlap with the device's work
DEPTH_ON_CUDA = 2


def make_replay(loaded: LoadedEncoder, settings: EncoderSettings) -> Replay:
    """The fixed sizes and the backend that the settings ask for; call it in the device's thread.

    Raises:
        ConfigError: a backend that the device cannot run, or a budget that cannot be.
    """
    tower, wanted = loaded.tower, settings.replay
    device = next(tower.parameters()).device
    backend = make_backend(wanted.backend, device)
    if wanted.backend == "eager" and not wanted.budgets:
        return Replay(tower, (), backend)
    budgets = ladder(
        wanted.budgets,
        smallest_useful(loaded.preprocess.rule),
        settings.max_batch_patches,
        tower.merge,
        smallest_batch(tower),
    )
    return Replay(tower, budgets, backend, depth=DEPTH_ON_CUDA if device.type == "cuda" else 1)
