"""The processes of a service that this process started, and their memory."""

from __future__ import annotations

from pathlib import Path

import psutil

#: Ray names its workers after what they run
REPLICA = "ray::ServeReplica:lookonce:"


def replicas() -> dict[str, psutil.Process]:
    """Serve replicas and vLLM's engines below this process, by name and number."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if title.startswith((REPLICA, "VLLM::")):
            found[f"{title.split()[0].removeprefix(REPLICA)} {process.pid}"] = process
    return found


def forget_peaks() -> None:
    """Sets every replica's peak of resident memory to what it has now."""
    for process in replicas().values():
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")


def peaks() -> dict[str, int]:
    """Peak resident memory of every replica since then, bytes."""
    return {name: _status(process, "VmHWM") for name, process in replicas().items()}


def resident() -> dict[str, int]:
    """Resident memory of every replica, bytes."""
    return {name: _status(process, "VmRSS") for name, process in replicas().items()}


def _status(process: psutil.Process, field: str) -> int:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {field} of {process}")
