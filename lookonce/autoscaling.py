"""How many replicas each pool wants, by its own signal. Serve adds the bounds, the delays and the start from zero.

Serve carries this module's code to its controller by value: it must import nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

#: patches of an image about which nothing is known yet
UNKNOWN_IMAGE = 1024.0


def encoder_replicas(patches: Mapping[Any, float], images: Mapping[Any, float], queued: float, target: float) -> float:
    """Replicas of an encoder pool.

    Args:
        patches: taken on and not yet encoded, by replica.
        images: that these are of, by replica.
        queued: requests that wait for a place in any replica.
        target: patches that one replica should have before it.

    Returns:
        A number that is not rounded and not bounded; 0 without work.
    """
    waiting, known = sum(patches.values()), sum(images.values())
    mean = waiting / known if known else UNKNOWN_IMAGE
    return (waiting + queued * mean) / target


def language_replicas(
    requests: Mapping[Any, float],
    kv_use: Mapping[Any, float],
    queued: float,
    target_requests: float,
    target_kv_use: float,
) -> float:
    """Replicas of a language pool: as many as the scarcer of the two asks for.

    Args:
        requests: running and waiting in the engine, by replica.
        kv_use: share of the KV cache in use, 0 to 1, by replica.
        queued: requests that wait for a place in any replica.
        target_requests: that one replica should have.
        target_kv_use: share of the KV cache that one replica should fill, 0 to 1.

    Returns:
        A number that is not rounded and not bounded; 0 without work.
    """
    by_requests = (sum(requests.values()) + queued) / target_requests
    by_memory = sum(kv_use.values()) / target_kv_use
    return max(by_requests, by_memory)


class EncoderPolicy:
    """:func:`encoder_replicas` for Serve.

    Args:
        target_patches: patches that one replica should have before it.
    """

    def __init__(self, target_patches: float) -> None:
        self._target = target_patches

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The wanted number of replicas, and no state."""
        if not (metrics := known_metrics(context)):
            return float(context.target_num_replicas), {}
        wanted = encoder_replicas(metrics["patches"], metrics["images"], context.total_queued_requests, self._target)
        return wanted, {}


class LanguagePolicy:
    """:func:`language_replicas` for Serve.

    Args:
        target_requests, target_kv_use: as there.
    """

    def __init__(self, target_requests: float, target_kv_use: float) -> None:
        self._requests = target_requests
        self._kv_use = target_kv_use

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """The wanted number of replicas, and no state."""
        if not (metrics := known_metrics(context)):
            return float(context.target_num_replicas), {}
        wanted = language_replicas(
            metrics["requests"], metrics["kv_use"], context.total_queued_requests, self._requests, self._kv_use
        )
        return wanted, {}


def known_metrics(context: AutoscalingContext) -> Mapping[str, Mapping[Any, float]]:
    """What the replicas report, by metric and replica; empty while none has reported, when nothing should change."""
    metrics = context.aggregated_metrics or {}
    return metrics if {"patches", "requests"} & set(metrics) else {}
