"""The container files: what they name exists, what they set is a setting, nothing but HTTP is published."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.config import load_settings

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = [name for name, service in SERVICES.items() if "build" in service]
DOCKERFILES = sorted((ROOT / "docker").glob("*Dockerfile"))


def filled(text: str) -> str:
    """A value with its defaults put in, as an empty environment gives it."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_only_http_is_published() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert {filled(port) for port in ports} == {"8000:8000", "127.0.0.1:3000:3000"}


@pytest.mark.parametrize("name", OURS)
def test_a_service_names_files_that_exist_and_settings_that_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SERVICES[name]
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    sources = [filled(volume).split(":")[0] for volume in service["volumes"]]
    assert all((ROOT / source).exists() for source in sources)
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, value)
    settings = load_settings(ROOT / sources[0])
    assert settings.cache.url == "redis://redis:6379/0"
    assert settings.log.json_lines


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_checked_and_have_no_powers(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]


def test_redis_forgets_instead_of_refusing() -> None:
    command = [filled(part) for part in SERVICES["redis"]["command"]]
    assert command[command.index("--maxmemory-policy") + 1].startswith("allkeys-")
    assert command[command.index("--maxmemory") + 1] != "0"


@pytest.mark.parametrize("path", DOCKERFILES, ids=[path.name for path in DOCKERFILES])
def test_dockerfiles_copy_what_exists_and_do_not_run_as_root(path: Path) -> None:
    lines = path.read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    assert any(line.startswith("USER ") and line != "USER root" for line in lines)
    packages = set(re.findall(r'"(\w+)\*"', (ROOT / "pyproject.toml").read_text()))
    assert packages <= set(copied)
