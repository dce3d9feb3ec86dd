"""Buffers of a large picture leave the process with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: buffers of 16 MiB side by side, a small thing kept above each; prints what is left of them, MiB
CODE = """
import sys
from pathlib import Path
import torch
from encoder_service.allocator import return_large_buffers

def resident():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line)

print(sys.argv[1] == "default" or return_large_buffers())
torch.ones(6 << 20)  # freed: from now on the default takes such buffers from the heap
before, kept, buffers = resident(), [], []
for _ in range(6):
    buffers.append(torch.ones(4 << 20))
    kept.append(torch.ones(8 << 10))
buffers.clear()
print((resident() - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_buffers_go_back_to_the_system() -> None:
    left = {}
    for way in ("default", "ours"):
        done, rest = subprocess.run(
            [sys.executable, "-c", CODE, way], capture_output=True, text=True, check=True
        ).stdout.split()
        assert done == "True"
        left[way] = int(rest)
    assert left["default"] > 64, "nothing stays by default any more: the setting can go"
    assert left["ours"] < 16
