"""Closed forms: what the simulation must agree with where queueing theory has an answer."""

from __future__ import annotations


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival waits in M/M/c.

    Args:
        servers: c.
        offered: arrival rate times mean service time, below ``servers``.
    """
    blocked = 1.0  # Erlang B by recursion
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    use = offered / servers
    return blocked / (1 - use * (1 - blocked))


def mean_wait(servers: int, rate: float, service: float, variation: float = 1.0) -> float:
    """Mean seconds in the queue; exact for M/M/c, Allen and Cunneen's approximation otherwise.

    Args:
        servers: c.
        rate: Poisson arrivals per second.
        service: mean seconds of a service.
        variation: squared coefficient of variation of the service time: 1 exponential, 0 constant.
    """
    offered = rate * service
    if offered >= servers:
        return float("inf")
    return erlang_c(servers, offered) * service / (servers - offered) * (1 + variation) / 2


def servers_for(rate: float, service: float, wait: float, use: float, variation: float = 0.0) -> int:
    """Fewest servers that keep the mean wait under ``wait`` seconds and the use under ``use``."""
    offered = rate * service
    servers = max(1, int(offered / use))
    while offered / servers > use or mean_wait(servers, rate, service, variation) > wait:
        servers += 1
    return servers
