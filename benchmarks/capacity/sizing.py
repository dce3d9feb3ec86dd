"""From traffic to replicas: enough of everything, checked by simulating a slice of the cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from benchmarks.capacity.model import Cluster, Costs, Outcome, Simulation, Traffic
from benchmarks.capacity.queues import servers_for

#: of a pool, so that a burst finds room
USE = 0.7
#: requests in one simulated run, at least
REQUESTS = 2000
#: a slice of a large cluster has about this many language replicas; smaller pools wait longer, so it errs on our side
SLICE = 8


@dataclass(frozen=True)
class Plan:
    """What a cluster needs for a traffic.

    Attributes:
        cluster: replicas and shards.
        redis_bytes: per second, both directions.
        lookups: questions to Redis per second.
        stored: bytes in Redis for the pictures of ``hours``.
        monolithic: devices that engines with a tower each would need, at their own hit rate.
        break_even: hit rate above which the separated pools need fewer device seconds.
    """

    cluster: Cluster
    redis_bytes: float
    lookups: float
    stored: float
    monolithic: int
    break_even: float

    @property
    def devices(self) -> int:
        """Encoder and language replicas, one device each."""
        return self.cluster.encoders + self.cluster.language


def language_seconds(costs: Costs, traffic: Traffic, sequences: int) -> float:
    """Device seconds of one request in a replica that answers so many at once: its share of the steps."""
    step = costs.step
    return step.prompt_token * traffic.prompt_tokens + traffic.answer_tokens * (step.fixed / sequences + step.sequence)


def encoder_seconds(costs: Costs, batch: int) -> float:
    """Device seconds of one image in full batches."""
    return costs.forward_image + costs.forward_fixed / batch


def plan(
    costs: Costs, traffic: Traffic, *, hours: float, stock_hit_rate: float, cluster: Cluster | None = None
) -> Plan:
    """The least cluster that stays under :data:`USE` everywhere.

    Args:
        costs: service times.
        traffic: with a rate.
        hours: of new pictures that Redis shall hold.
        stock_hit_rate: share of images that a monolithic engine finds in its own caches.
        cluster: batch and step limits; defaults without it.
    """
    base = cluster or Cluster()
    images = traffic.rate * traffic.images
    misses = images * (1 - traffic.hit_rate)
    reads = images + misses  # what is written is read as well
    encode = encoder_seconds(costs, base.batch)
    answer = language_seconds(costs, traffic, base.max_sequences)
    shard_work = images * costs.lookup + reads * costs.transfer
    stock = answer + traffic.images * (1 - stock_hit_rate) * costs.forward_image
    chosen = replace(
        base,
        ingress=servers_for(traffic.rate, costs.ingress, costs.ingress, USE),
        encoders=_replicas(misses * encode),
        language=_replicas(traffic.rate * answer),
        shards=max(1, math.ceil(shard_work / USE)),
    )
    return Plan(
        chosen,
        redis_bytes=reads * costs.record_bytes,
        lookups=images + reads,
        stored=misses * 3600 * hours * costs.record_bytes,
        monolithic=_replicas(traffic.rate * stock),
        break_even=break_even(costs, stock_hit_rate, base.batch),
    )


def _replicas(work: float) -> int:
    """For so many device seconds a second."""
    return max(1, math.ceil(work / USE))


def break_even(costs: Costs, stock_hit_rate: float, batch: int) -> float:
    """Hit rate at which an image costs as many device seconds either way; 0 when the pools win at any.

    A language replica spends what a record's copy to the device takes; the tower's launch is shared by a batch.
    """
    ours = encoder_seconds(costs, batch)
    stock = (1 - stock_hit_rate) * (costs.forward_image + costs.forward_fixed)
    copy = costs.record_bytes / COPY_BANDWIDTH
    return min(1.0, max(0.0, 1 - (stock - copy) / ours))


#: from host memory to a device, bytes per second
COPY_BANDWIDTH = 20e9


def check(costs: Costs, traffic: Traffic, chosen: Cluster, seed: int = 0) -> Outcome:
    """Simulates the planned cluster, a slice of it when it is large."""
    part = max(1, chosen.language // SLICE)
    small = replace(
        chosen,
        ingress=max(1, math.ceil(chosen.ingress / part)),
        encoders=max(1, math.ceil(chosen.encoders / part)),
        language=max(1, math.ceil(chosen.language / part)),
        shards=max(1, math.ceil(chosen.shards / part)),
    )
    # long enough for the pools to fill: many times the longest answer
    step = costs.step
    longest = traffic.answer_tokens * (step.fixed + chosen.max_sequences * step.sequence)
    requests = max(REQUESTS, int(10 * longest * traffic.rate / part))
    return Simulation(costs, small, replace(traffic, rate=traffic.rate / part), seed).run(min(requests, 20_000))
