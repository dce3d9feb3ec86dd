"""Towers of the published sizes, loaded and run in bfloat16 by an encoder process beside ten times as much language."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from encoder_service.checkpoints import check_encoder
from encoder_service.deployment import EncoderReplica
from shared.config import EncoderSettings, ModelSettings, Settings
from shared.local_redis import LocalRedis
from shared.records import decode_record
from tests.encoder_service.kit import file, pixels
from tools.checkpoints.true_size import TRUE_SIZES

#: beside the tower: Python, torch, Ray, buffers of a forward
ALLOWANCE, SHARE = 600e6, 1.25
#: width and height of the pictures; the largest is four times the patches of the first
SIZES = ((512, 512), (320, 200), (1024, 1024))
NEMOTRON_SIZES = ((512, 512), (320, 200), (1024, 512))


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024


class Process(EncoderReplica):
    """An encoder replica that tells what it took."""

    async def peak(self) -> int:
        """The most memory that this process had at any time, bytes."""
        return peak_bytes()


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    os.environ.setdefault("RAY_worker_niceness", "0")  # else anything else on the machine starves the process
    import ray

    folder = tempfile.mkdtemp(prefix="lookonce-")  # short: Ray's sockets lie in it
    options = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "_temp_dir": folder}
    ray.init(address="local", num_cpus=1, object_store_memory=128 << 20, log_to_driver=False, **options)
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def test_an_encoder_process_does_not_load_the_compilers() -> None:
    """220 MB in every replica, and seconds of its start."""
    code = (
        "import sys, encoder_service.deployment, encoder_service.engine\n"
        "print([name for name in ('torch._dynamo', 'triton', 'vllm', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TRUE_SIZES)
def test_a_tower_takes_its_own_size_and_little_more(name: str, ray: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "c"
    subprocess.run(
        [sys.executable, "-m", "tools.checkpoints.true_size", name, checkpoint], check=True
    )  # it needs more memory than what is measured
    tower = sum(parameter.nbytes for parameter in check_encoder(checkpoint).parameters())
    files = list(checkpoint.glob("*.safetensors"))
    whole, on_disk = (
        sum(map(size, files)) for size in (lambda f: f.stat().st_size, lambda f: f.stat().st_blocks * 512)
    )
    model = ModelSettings(
        name="m", checkpoint=checkpoint, encoder=EncoderSettings(dtype="bfloat16", threads=1, preprocess_threads=1)
    )
    redis = LocalRedis(tmp_path / "redis", maxmemory_mib=512)
    redis.start()
    cache = Redis.from_url(redis.url)
    try:
        process = ray.remote(Process).options(num_cpus=0).remote(Settings(models=(model,)), model, redis.url)
        ray.get(process.reconfigure.remote(None), timeout=900)
        loaded = ray.get(process.peak.remote())
        for seed, size in enumerate(NEMOTRON_SIZES if name == "radio-h" else SIZES):
            item = ray.get(process.encode.remote(file(pixels(seed, *size)), "r", None, False, False), timeout=900)
            assert item.record is None, "it is in the cache"
            _, rows = decode_record(cache.get(item.key), item.key)
            assert rows.isfinite().all()
            assert len(rows) == item.tokens
        after = ray.get(process.peak.remote())
        ray.kill(process)
    finally:
        redis.stop()
        shutil.rmtree(checkpoint)
    bound = SHARE * tower + ALLOWANCE
    print(
        f"\n{name}: files of {whole / 1e9:.1f} GB ({on_disk / 1e9:.1f} on disk), tower {tower / 1e6:.0f} MB; "
        f"peak {loaded / 1e6:.0f} MB after loading, {after / 1e6:.0f} MB after {len(SIZES)} pictures; "
        f"allowed {bound / 1e6:.0f} MB"
    )
    assert whole > 10 * tower > 5 * on_disk
    assert after <= bound
