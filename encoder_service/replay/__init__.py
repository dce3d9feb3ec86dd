"""Forwards of fixed size: budgets, static buffers, and the backends that run on them."""

from encoder_service.replay.backends import Backend, make_backend
from encoder_service.replay.budgets import ladder, smallest_fit
from encoder_service.replay.build import make_replay
from encoder_service.replay.runner import Replay, Staged
from encoder_service.replay.warmup import Capture, usual_grids, warm_up

__all__ = [
    "Backend",
    "Capture",
    "Replay",
    "Staged",
    "ladder",
    "make_backend",
    "make_replay",
    "smallest_fit",
    "usual_grids",
    "warm_up",
]
