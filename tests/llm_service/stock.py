"""``vllm serve`` as anybody would start it, for the tests of the connector."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from openai import OpenAI
from PIL import Image

ROOT = Path(__file__).parents[2]
CONNECTOR = {
    "ec_connector": "RedisECConnector",
    "ec_connector_module_path": "llm_service.vllm_plugin.connector",
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def data_url(seed: int, width: int = 96, height: int = 96) -> str:
    """A picture that differs with the seed."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height // 8, width // 8, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


class Server:
    """A running ``vllm serve``."""

    def __init__(self, port: int, log: Path) -> None:
        self.base = f"http://127.0.0.1:{port}"
        self.log = log
        self.client = OpenAI(base_url=f"{self.base}/v1", api_key="none", timeout=120, max_retries=0)

    def ask(self, *urls: str, text: str = "What is in the picture?", max_tokens: int = 12, **extra: Any) -> Any:
        """Greedy tokens with their log-probabilities."""
        images: list[Any] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        answer = self.client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": [*images, {"type": "text", "text": text}]}],
            max_tokens=max_tokens,
            temperature=0,
            logprobs=True,
            extra_body={"ignore_eos": True, **extra},
        )
        assert answer.choices[0].logprobs is not None
        return [(token.token, token.logprob) for token in answer.choices[0].logprobs.content or ()]

    def counters(self) -> dict[str, float]:
        """The connector's counters, by their short names."""
        found = {}
        for line in httpx.get(f"{self.base}/metrics").text.splitlines():
            if line.startswith("vllm:ec_redis_") and "_total{" in line:
                name = line.removeprefix("vllm:ec_redis_").split("_total{")[0]
                found[name] = float(line.rsplit(" ", 1)[1])
        return found

    def until(self, name: str, at_least: float, seconds: float = 15) -> dict[str, float]:
        """Waits for a counter; counters travel with steps, so there is a little to do meanwhile."""
        deadline = time.monotonic() + seconds
        while (counters := self.counters()).get(name, 0) < at_least:
            assert time.monotonic() < deadline, (name, counters, self.log.read_text()[-3000:])
            self.client.completions.create(model="m", prompt="picture", max_tokens=2)
            time.sleep(0.1)
        return counters


@contextmanager
def serve(checkpoint: Path, log: Path, role: str | None, extra: dict[str, Any] | None = None) -> Iterator[Server]:
    """A server, ready; without a role, one without a connector."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8", "--seed", "0"]
    if role is not None:
        transfer = {**CONNECTOR, "ec_role": role, "ec_connector_extra_config": extra or {}}
        command += ["--ec-transfer-config", json.dumps(transfer)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}, stdout=out, stderr=out
        )
    try:
        server = Server(port, log)
        deadline = time.monotonic() + 1200
        while True:
            try:
                if httpx.get(f"{server.base}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.3)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
