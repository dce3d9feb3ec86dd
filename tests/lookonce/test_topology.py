"""Arrangements of Redis that the cache cannot use are refused at start, in one sentence."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.engine.arg_utils import EngineArgs

from llm_service.vllm_plugin.connector import RedisECConnector
from lookonce.doctor import examine
from lookonce.service import service
from shared.cache.topology import CLUSTER_REFUSED, check_topology
from shared.config import CacheSettings, load_settings
from shared.errors import ConfigError
from shared.local_redis import LocalRedis, find_server
from tests.llm_service.qwen2vl import write_qwen2vl
from tests.llm_service.stock import CONNECTOR

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """URL of a real node of a cluster."""
    path = tmp_path / "s"
    words = ["--port", "0", "--unixsocket", path, "--dir", tmp_path, "--save", "", "--cluster-enabled", "yes"]
    server = subprocess.Popen([str(find_server()), *map(str, words)], stdout=subprocess.DEVNULL)
    while not path.exists():
        time.sleep(0.02)
    yield f"unix://{path}"
    server.kill()
    server.wait()


def config(folder: Path, url: str) -> Path:
    path = folder / "lookonce.yaml"
    checkpoint = ROOT / "models" / "demo"
    path.write_text(f"models: [{{name: demo, checkpoint: {checkpoint}}}]\ncache: {{url: '{url}'}}\nhttp: {{port: 0}}\n")
    return path


def test_a_cluster_is_refused_before_anything_starts(cluster: str, tmp_path: Path) -> None:
    settings = load_settings(config(tmp_path, cluster))
    steps: list[str] = []
    with pytest.raises(ConfigError) as refused, service(settings, steps.append):
        raise AssertionError("started")
    assert refused.value.message == CLUSTER_REFUSED
    assert steps == []


def test_doctor_tells_of_a_cluster(cluster: str, tmp_path: Path) -> None:
    (found,) = [found for found in examine(config(tmp_path, cluster)) if found.what == "Redis"]
    assert not found.ok
    assert found.fix == CLUSTER_REFUSED


def test_one_redis_is_accepted_and_so_is_one_that_is_silent(tmp_path: Path) -> None:
    server = LocalRedis(tmp_path / "redis", 16)
    server.start()
    check_topology(CacheSettings(timeout=2.0), server.url)
    server.stop()
    check_topology(CacheSettings(timeout=0.2), server.url)


def test_the_connector_of_stock_vllm_refuses_a_cluster(cluster: str, tmp_path: Path) -> None:
    """The scheduler's half, as vLLM makes it while the engine starts."""
    transfer: dict[str, Any] = {**CONNECTOR, "ec_role": "ec_both", "ec_connector_extra_config": {"redis_url": cluster}}
    config = EngineArgs(
        model=str(write_qwen2vl(tmp_path / "m")), enforce_eager=True, max_model_len=512, ec_transfer_config=transfer
    ).create_engine_config()
    with pytest.raises(ConfigError) as refused:
        RedisECConnector(config, ECConnectorRole.SCHEDULER)
    assert refused.value.message == CLUSTER_REFUSED
