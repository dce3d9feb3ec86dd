"""Which language replica gets a request: the one that has seen its image or its prefix, unless that one is busier.

Serve carries this module's code to every handle by value: it must import nothing of ours.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

#: tokens at the start of a prompt that are taken for its prefix; shorter prompts are cheaper to read than to find
PREFIX_TOKENS = 64


def affinity(arguments: Sequence[Any]) -> str | None:
    """What requests have in common that should meet in one replica: their first image, else their first tokens.

    Args:
        arguments: of ``LanguageReplica.generate``; those of any other call have no affinity.
    """
    if len(arguments) != 4:
        return None
    _, prompt, items, _ = arguments
    if items:
        return str(items[0].key)
    if len(prompt.token_ids) < PREFIX_TOKENS:
        return None
    return hashlib.blake2b(repr((prompt.cache_salt, prompt.token_ids[:PREFIX_TOKENS])).encode()).hexdigest()


def order(key: str | None, loads: Mapping[str, int | None], slack: int) -> list[list[str]]:
    """Replicas to try, group after group; of a group the one with the least work is taken.

    Each key has a favourite (rendezvous hashing: a replica that comes or goes moves its own keys only). It is passed
    over while it has ``slack`` requests more than the least loaded one; then, and without a key, two at random are
    compared.

    Args:
        key: as from :func:`affinity`.
        loads: requests in work by replica; None where nobody knows.
        slack: how much busier the favourite may be.
    """
    pair = random.sample(sorted(loads), min(2, len(loads)))
    if key is None or not loads:
        return [pair]
    favourite = max(loads, key=lambda name: hashlib.blake2b(f"{key} {name}".encode(), digest_size=8).digest())
    least = min(load or 0 for load in loads.values())
    if (loads[favourite] or 0) - least > slack:
        return [[name for name in pair if name != favourite] or pair]
    return [[favourite], pair]


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """:func:`order` for Serve, which passes over replicas that are full, dead, or do not answer in time."""

    def initialize_state(self, slack: int) -> None:
        """Takes the settings; called by Serve."""
        self._slack = slack

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas in the order in which to try them."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) for name, replica in by_name.items()}
        groups = order(affinity(pending_request.args), loads, self._slack)
        return [[by_name[name] for name in group] for group in groups]
