"""What every process of Ray does before its own work, on whatever machine it runs."""

from __future__ import annotations

import os
from pathlib import Path

from lookonce.loopback import close_replica_port

#: for Ray's runtime environment
WORKER_HOOK = "lookonce.worker.prepare"
#: as in :mod:`shared.metrics`, whose import needs the folder
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"


def prepare() -> None:
    """Closes what should not listen, and makes the folder of metrics, which the driver made on its own machine only."""
    close_replica_port()
    if folder := os.environ.get(METRICS_FOLDER):
        Path(folder).mkdir(parents=True, exist_ok=True)
