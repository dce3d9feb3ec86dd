"""vLLM's own load generator, unchanged, against the service: every request answered, every token counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import MODEL, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: what `vllm bench serve` runs; the command itself wants a distribution that is named vllm
GENERATOR = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
PICTURES = ("--random-mm-base-items-per-request", "2", "--random-mm-num-mm-items-range-ratio", "0.5")
BUCKETS = ("--random-mm-bucket-config", "{(96, 96, 1): 0.5, (256, 192, 1): 0.5}")
LIMIT = ("--random-mm-limit-mm-per-prompt", '{"image": 3, "video": 0}')
CASES = {
    "chat": ("openai-chat", "/v1/chat/completions", ("--dataset-name", "random"), 100),
    "text": ("openai", "/v1/completions", ("--dataset-name", "random"), 100),
    "pictures": (
        "openai-chat",
        "/v1/chat/completions",
        ("--dataset-name", "random-mm", *PICTURES, *BUCKETS, *LIMIT),
        60,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_no_request_fails(case: str, service: str, tmp_path: Path) -> None:
    backend, path, dataset, requests = CASES[case]
    words = ["--backend", backend, "--base-url", service, "--endpoint", path, *dataset]
    words += ["--model", MODEL, "--tokenizer", str(ROOT / "models" / "demo"), "--num-prompts", str(requests)]
    words += ["--input-len", "40", "--output-len", "16", "--ignore-eos", "--max-concurrency", "16", "--seed", "1"]
    words += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json", "--disable-tqdm"]
    command = [sys.executable, "-c", GENERATOR, *words]
    done = subprocess.run(command, env=os.environ | {"VLLM_PLUGINS": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    line = {name: result[name] for name in ("completed", "failed", "request_throughput", "total_output_tokens")}
    print(case, line, f"median TTFT {result['median_ttft_ms']:.0f} ms, ITL {result['median_itl_ms']:.1f} ms")
    assert (result["completed"], result["failed"]) == (requests, 0)
    assert result["total_output_tokens"] == 16 * requests
