"""The files for Ray's cluster launcher and for KubeRay: Ray's own schemas take them, and what they name exists."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from lookonce.application import APPLICATION
from lookonce.declared import Arguments, application
from lookonce.service import REPLICA_ENVIRONMENT
from lookonce.worker import METRICS_FOLDER, WORKER_HOOK
from shared.config import PoolSettings, Settings, load_settings
from shared.errors import ConfigError

ROOT = Path(__file__).parent.parent
LAUNCHER: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "ray-cluster.yaml").read_text())
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "configs" / "kuberay.yaml").read_text()))
RAY_SERVICE = next(document for document in DOCUMENTS if document["kind"] == "RayService")
CLUSTER = RAY_SERVICE["spec"]["rayClusterConfig"]
SERVE = yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"])


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """The manifest's settings as the file that it mounts; the model that is on this machine, found where it is here."""
    (text,) = (document["data"]["served.yaml"] for document in DOCUMENTS if document["kind"] == "ConfigMap")
    path = tmp_path / "served.yaml"
    path.write_text(text.replace("/opt/lookonce/models", str(ROOT / "models")))
    return path


def groups() -> list[dict[str, Any]]:
    """The pod specifications of head and workers."""
    specs = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]
    return [spec["template"]["spec"] for spec in specs]


def pools(settings: Settings) -> list[PoolSettings]:
    return [pool for model in settings.models for pool in (model.encoder, model.language)]


def test_rays_launcher_takes_the_file() -> None:
    validate_config(prepare_config(LAUNCHER))


def test_the_launchers_workers_have_room_for_every_configured_pool() -> None:
    types = [kind["resources"] for name, kind in LAUNCHER["available_node_types"].items() if name != "head"]
    assert any(kind.get("GPU") for kind in types)
    assert any(not kind.get("GPU") for kind in types)
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if path.name in ("ray-cluster.yaml", "kuberay.yaml"):
            continue
        for pool in pools(load_settings(path)):
            fits = [kind for kind in types if pool.num_cpus <= kind["CPU"] and pool.num_gpus <= kind.get("GPU", 0)]
            assert fits, f"no machine has room for a pool of {path.name}"


def test_the_launchers_comments_are_commands_that_exist() -> None:
    from typer.main import get_command

    from lookonce.cli import app

    commands = re.findall(r"lookonce (\w+) (--\w+)", (ROOT / "configs" / "ray-cluster.yaml").read_text())
    assert commands
    for command, option in commands:
        parameters = get_command(app).commands[command].params  # type: ignore[attr-defined]
        assert option in {name for parameter in parameters for name in parameter.opts}


def test_the_manifest_declares_our_application_to_serve() -> None:
    """Serve's own schema reads it; the builder exists, and the name is the one that handles ask for."""
    schema = ServeDeploySchema.model_validate(SERVE)
    (declared,) = schema.applications
    assert declared.name == APPLICATION
    module, name = declared.import_path.split(":")
    assert getattr(importlib.import_module(module), name) is application
    assert Arguments(**declared.args).config == Path("/etc/lookonce/served.yaml")
    environment = declared.runtime_env["env_vars"]
    hook, function = declared.runtime_env["worker_process_setup_hook"].rsplit(".", 1)
    assert f"{hook}.{function}" == WORKER_HOOK
    assert callable(getattr(importlib.import_module(hook), function))
    assert METRICS_FOLDER in environment


def test_every_variable_that_replicas_need_is_set() -> None:
    """Serve's own are read where its controller and proxies start, which is before any application."""
    environment = ServeDeploySchema.model_validate(SERVE).applications[0].runtime_env["env_vars"]
    for pod in groups():
        given = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}
        for name, value in REPLICA_ENVIRONMENT.items():
            assert (given if name.startswith("RAY_") else environment)[name] == value, name


def test_the_manifests_settings_hold_and_have_room(served: Path) -> None:
    settings = load_settings(served)
    assert settings.cache.url == "redis://lookonce-redis:6379/0"
    names = {document["metadata"]["name"] for document in DOCUMENTS if document["kind"] == "Service"}
    assert re.findall(r"//([^:]+):", settings.cache.url) == sorted(names)
    room = []
    for group in CLUSTER["workerGroupSpecs"]:
        resources = group["template"]["spec"]["containers"][0]["resources"]
        gpus = float(resources["limits"].get("nvidia.com/gpu", 0))
        room.append((float(resources["requests"]["cpu"]), gpus))
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for pool in pools(settings):
        assert any(pool.num_cpus <= cpus and pool.num_gpus <= gpus for cpus, gpus in room), pool


def test_the_manifests_application_can_be_built(served: Path) -> None:
    """With the model that this machine has."""
    tree = yaml.safe_load(served.read_text())
    tree["models"] = [model for model in tree["models"] if Path(model["checkpoint"]).is_dir()]
    served.write_text(yaml.safe_dump(tree))
    assert isinstance(application(Arguments(config=served)), Application)
    del tree["cache"]
    served.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"cache\.url"):
        application(Arguments(config=served))


def test_mounts_exist_and_nobody_runs_as_root() -> None:
    for pod in groups():
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
        assert "/etc/lookonce" in {mount["mountPath"] for mount in container["volumeMounts"]}
    containers = [container for pod in groups() for container in pod["containers"]]
    for document in DOCUMENTS:
        if document["kind"] == "Deployment":
            containers += document["spec"]["template"]["spec"]["containers"]
    for container in containers:
        assert container["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


def test_images_are_built_here() -> None:
    """By the commands that the Dockerfiles name."""
    built = {
        match for path in (ROOT / "docker").glob("*Dockerfile") for match in re.findall(r"-t (\S+)", path.read_text())
    }
    used = {container["image"] for pod in groups() for container in pod["containers"]}
    used |= set(re.findall(r"image: (\S+)", yaml.safe_dump(LAUNCHER)))
    assert {image.removesuffix(":latest") for image in used} == built


def test_the_ray_version_is_the_locked_one() -> None:
    locked = re.search(r"^ray(?:\[.*\])?==(\S+)", (ROOT / "requirements" / "cpu.lock").read_text(), re.MULTILINE)
    assert locked is not None
    assert CLUSTER["rayVersion"] == locked[1]


@pytest.mark.parametrize("key", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_ray_asks_for_its_token(key: str) -> None:
    """An open Ray is remote code execution (CVE-2023-48022)."""
    start = [command for command in LAUNCHER[key] if "ray start" in command]
    assert [shlex.split(command)[0] for command in start] == ["RAY_AUTH_MODE=token"]
    assert CLUSTER["authOptions"] == {"mode": "token"}
