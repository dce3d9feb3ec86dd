"""Makes a CUDA-built torchvision importable beside CPU torch, in this environment only.

vLLM's Pixtral, Llava and Qwen-VL modules import torchvision. PyTorch's own CPU index has a torchvision that fits, but
some indexes offer only a CUDA build: its extension cannot load beside CPU torch, and ``import torchvision`` then
stops at two operators that the extension would have defined. Declaring their schemas beforehand is enough for
everything that vLLM uses. Where torchvision imports by itself this script changes nothing.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HOOK_MODULE = "_lookonce_torchvision_hook"

HOOK_SOURCE = '''\
"""Declares torchvision's missing operators just before its first import (written by scripts/mend_torchvision.py)."""
import importlib.abc
import sys


class _DeclareOperators(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            global _library
            _library = torch.library.Library("torchvision", "DEF")
            _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _DeclareOperators())
'''


def torchvision_error() -> str:
    """What ``import torchvision`` prints when it fails in a fresh interpreter; empty when it works."""
    run = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False)
    return run.stderr if run.returncode else ""


def main() -> int:
    """Writes the hook where it is needed; returns the process's exit code."""
    error = torchvision_error()
    if not error:
        print("torchvision imports; nothing to mend")
        return 0
    if "operator torchvision::nms does not exist" not in error:
        print(f"torchvision does not import, and not for the known reason:\n{error}", file=sys.stderr)
        return 1
    site = Path(sysconfig.get_paths()["purelib"])
    (site / f"{HOOK_MODULE}.py").write_text(HOOK_SOURCE)
    (site / f"{HOOK_MODULE}.pth").write_text(f"import {HOOK_MODULE}\n")
    error = torchvision_error()
    if error:
        print(f"torchvision still does not import:\n{error}", file=sys.stderr)
        return 1
    print("torchvision is a CUDA build beside CPU torch: wrote an import hook for its operators")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
