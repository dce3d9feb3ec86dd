"""The dependency rules of the house, read from the imports themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("shared", "encoder_service", "llm_service", "lookonce")
FORBIDDEN = {
    "shared": {"encoder_service", "llm_service", "lookonce", "ray"},
    "encoder_service": {"llm_service", "lookonce", "vllm"},
    "llm_service": {"encoder_service", "lookonce"},
}
#: the only modules of the services that know Ray
RAY_SHELLS = {
    "encoder_service/deployment.py",
    "llm_service/deployment.py",
    "llm_service/api/ray_pools.py",
    "llm_service/captioning/ray_flow.py",
}


def imported_packages(path: Path) -> set[str]:
    """Top-level packages that a file imports, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_keep_their_boundaries(package: str) -> None:
    broken = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in modules(package)
        if (bad := imported_packages(path) & FORBIDDEN[package])
    }
    assert not broken


@pytest.mark.parametrize("package", ["encoder_service", "llm_service"])
def test_only_the_shells_know_ray(package: str) -> None:
    users = {str(path.relative_to(ROOT)) for path in modules(package) if "ray" in imported_packages(path)}
    assert users <= RAY_SHELLS


def test_nothing_reads_pickle() -> None:
    users = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in modules(package)
        if imported_packages(path) & {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
        or "torch.load(" in path.read_text()
    }
    assert not users


def test_imports_are_seen(tmp_path: Path) -> None:
    """The reader of imports itself: an import hidden in a function counts."""
    file = tmp_path / "a.py"
    file.write_text("def f():\n    from ray.serve import run\n    import vllm.config\n")
    assert imported_packages(file) == {"ray", "vllm"}
