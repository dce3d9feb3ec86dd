"""vLLM's own server on the same checkpoint: what OpenAI-compatible means here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from lookonce.listening import free_port

START_SECONDS = 600.0


@contextmanager
def stock_server(checkpoint: Path, name: str, max_model_len: int, log: Path, *more_arguments: str) -> Iterator[str]:
    """Base URL of ``vllm serve``, started as a process of its own without anything of ours in it.

    Args:
        checkpoint: what to serve, in float32.
        name: how clients call it.
        max_model_len: context, tokens.
        log: file for its output.
        more_arguments: of its command line.
    """
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(max_model_len), "--enforce-eager"]
    more = {
        "VLLM_PLUGINS": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command += more_arguments
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=os.environ | more, stdout=out, stderr=out)
    try:
        url = f"http://127.0.0.1:{port}"
        _await_models(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)


def _await_models(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/v1/models", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"vLLM's server was not ready: {log.read_text()[-2000:]}")
