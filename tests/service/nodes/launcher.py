"""A cluster whose machines are added and taken away by Ray's own autoscaler: processes here."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lookonce.listening import free_port
from shared.config import Settings
from tests.service.nodes.kit import Cluster, own_address, wait_for_port

#: after which a machine without work goes, minutes
IDLE = 0.25
#: an encoder and a language replica fill a machine
MACHINE = {"resources": {"CPU": 2, "object_store_memory": 100_000_000}, "node_config": {}, "max_workers": 2}


def launcher(gcs: str) -> dict[str, Any]:
    """As configs/ray-cluster.yaml, with another provider of machines."""
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    nothing: dict[str, Any] = {name: {} for name in ("auth", "docker", "file_mounts")}
    for stage in ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray"):
        nothing[f"{stage}_commands"] = []
    return nothing | {
        "cluster_name": "lookonce",
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "max_workers": 2,
        "idle_timeout_minutes": IDLE,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": gcs,
            "use_node_id_as_ip": True,  # all have one address
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {"ray.head.default": head, "machine": MACHINE},
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
    }


@contextmanager
def head_without_room() -> Iterator[Cluster]:
    """Every replica and actor needs a machine that is not there yet."""
    with tempfile.TemporaryDirectory(prefix="lkn", dir="/tmp", ignore_cleanup_errors=True) as folder:
        made = Cluster(Path(folder), isolated=False, host=own_address())
        try:
            config = Path(folder) / "launcher.json"
            config.write_text(json.dumps(launcher(made.address)))
            made.start_head(0, launcher=config)
            wait_for_port(made.address)
            yield made
        finally:
            made.close()


def on_cluster(settings: Settings, made: Cluster) -> Settings:
    return settings.model_copy(
        update={
            "ray": settings.ray.model_copy(update={"address": made.address}),
            "cache": settings.cache.model_copy(update={"url": made.redis}),
            "http": settings.http.model_copy(update={"port": free_port(), "replicas": 2}),
        }
    )


def machines() -> int:
    """Alive ones, without the head."""
    import ray

    return sum(node["Alive"] for node in ray.nodes()) - 1
