"""Ray on one machine, for nobody else: its ports listen on 127.0.0.1 alone.

Whoever reaches a port of Ray runs code on its machine (CVE-2023-48022).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shared.environment import temporary_environment

EVERYWHERE = "[::]:"


@contextmanager
def ray_on_loopback() -> Iterator[None]:
    """Start Ray within; its processes may live longer.

    Ray replaces 127.0.0.1 by an address that others reach, and then listens on all, unless clusters are switched off.
    """
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with temporary_environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def close_replica_port() -> None:
    """Keeps the port of this worker, should it become a replica of Serve, on loopback.

    Every replica opens a second way in that unpickles what it is sent from anywhere. Requests take the other one, by
    Ray's own calls, as long as nobody asks Serve for gRPC between deployments.
    """
    from ray._common import tls_utils

    add_port = tls_utils.add_port_to_grpc_server

    def on_loopback(server: Any, address: str) -> Any:
        return add_port(
            server, address.replace(EVERYWHERE, "127.0.0.1:") if address.startswith(EVERYWHERE) else address
        )

    tls_utils.add_port_to_grpc_server = on_loopback
