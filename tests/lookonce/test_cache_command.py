"""``lookonce cache`` and what ``doctor`` says of a Redis, against a real one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import redis
import torch
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from lookonce.cli import app
from lookonce.doctor import Finding, examine
from shared.cache import EmbeddingCache
from shared.config import CacheSettings, LocalSettings
from shared.keys import Namespace, alias_key, bytes_digest, image_digest, seal_alias
from shared.local_redis import LocalRedis
from shared.records import encode_record
from shared.sizing import Grid

MODELS = [Namespace(name, "0" * 64, "1" * 64) for name in ("org/one", "org/one-b", "o*")]
SALTS = {None: None, "red": "red", "blue": "sea"}
CONFIG = """
models: [{{name: m, checkpoint: models/demo}}]
cache: {{url: "{url}"{more}}}
access:
  tenants:
    - {{name: red, keys: ["{a}"]}}
    - {{name: blue, keys: ["{b}"], salt: sea}}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = LocalRedis(tmp_path_factory.mktemp("redis"), 64)
    server.start()
    yield server.url
    server.stop()


def config(folder: Path, url: str, more: str = "") -> Path:
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(url=url, more=more, a="a" * 64, b="b" * 64))
    return path


def picture(seed: int) -> tuple[np.ndarray, bytes]:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 9, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return pixels, file.getvalue()


@pytest.fixture
def full(url: str) -> redis.Redis:
    """Two pictures of two tenants and of nobody, in three models."""
    client = redis.Redis.from_url(url)
    client.flushall()
    for seed in (1, 2):
        pixels, data = picture(seed)
        for salt in SALTS.values():
            digest, alias = image_digest(pixels, salt), alias_key(bytes_digest(data, salt))
            client.set(alias, seal_alias(alias, digest))
            for namespace in MODELS:
                key = namespace.embedding_key(digest)
                client.set(key, encode_record(key, torch.full((4, 8), float(seed)), Grid(2, 2), 1))
    client.set("somebody:else", "here")
    assert client.dbsize() == 2 * 3 * 4 + 1
    return client


def run(url: str, *words: object) -> Result:
    command, *rest = map(str, words)
    return CliRunner().invoke(app, ["cache", command, *rest, "--redis", url])


def test_ls_lists_a_model_literally(full: redis.Redis, url: str) -> None:
    listed = run(url, "ls", "--model", "o*").output
    assert listed.count("[4, 8] float32") == 6
    assert run(url, "ls").output.count("[4, 8] float32") == 18
    assert "only the first 5" in run(url, "ls", "--limit", 5).output


def test_show_and_get(full: redis.Redis, url: str, tmp_path: Path) -> None:
    key = MODELS[0].embedding_key(image_digest(picture(2)[0]))
    shown = run(url, "show", key)
    assert shown.exit_code == 0
    assert all(said in shown.output for said in ("org/one", "[4, 8]", "2 × 2", "header is good"))
    out = tmp_path / "one.safetensors"
    assert run(url, "get", key, "--out", out).exit_code == 0
    assert torch.equal(load_file(out)["embedding"], torch.full((4, 8), 2.0))
    for command in (["show"], ["get", "--out", out]):
        missing = run(url, *command, key[:-1] + "0")
        assert missing.exit_code == 1
        assert "no entry" in missing.output


def test_verify_finds_and_deletes_what_is_damaged(full: redis.Redis, url: str, tmp_path: Path) -> None:
    keys = [namespace.embedding_key(image_digest(picture(1)[0])) for namespace in MODELS]
    full.setrange(keys[0], 140, b"\x55")
    full.set(keys[1], full.get(keys[2]))  # type: ignore[arg-type]
    full.delete(keys[2])
    full.lpush(keys[2], "no string")
    run_of = run(url, "verify")
    assert run_of.exit_code == 1
    assert "15 good, 3 damaged, 0 deleted" in run_of.output
    assert run(url, "get", keys[0], "--out", tmp_path / "x").exit_code == 1
    assert not (tmp_path / "x").exists()
    assert "15 good, 3 damaged, 3 deleted" in run(url, "verify", "--delete").output
    assert run(url, "verify").exit_code == 0


def test_purge_of_an_image_takes_all_its_models_and_nobody_elses(full: redis.Redis, url: str, tmp_path: Path) -> None:
    pixels, data = picture(1)
    file = tmp_path / "one.png"
    file.write_bytes(data)
    assert "4 deleted" in run(url, "purge", "--image", file, "--yes").output
    assert full.dbsize() == 21
    again = tmp_path / "two.bmp"
    Image.fromarray(pixels).save(again)
    there = config(tmp_path, url)
    assert "3 deleted" in run(url, "purge", "--image", again, "--tenant", "blue", "--config", there, "--yes").output
    assert (
        "1 deleted" in run(url, "purge", "--image", image_digest(pixels, "red"), "--model", "org/one", "--yes").output
    )
    assert full.exists(MODELS[1].embedding_key(image_digest(pixels, "red")))


def test_purge_of_a_tenant_takes_everything_of_it_and_nothing_else(full: redis.Redis, url: str, tmp_path: Path) -> None:
    there = config(tmp_path, url)
    before = set(full.keys())
    assert "8 deleted" in run(url, "purge", "--tenant", "blue", "--config", there, "--yes").output
    gone = before - set(full.keys())
    digests = {image_digest(picture(seed)[0], "sea") for seed in (1, 2)}
    files = {bytes_digest(picture(seed)[1], "sea") for seed in (1, 2)}
    assert {key.decode().rsplit(":", 1)[1] for key in gone} == digests | files
    assert "8 deleted" in run(url, "purge", "--salt", "red", "--yes").output
    unknown = run(url, "purge", "--tenant", "green", "--config", there, "--yes")
    assert unknown.exit_code == 1
    assert "no tenant 'green'" in unknown.output


def test_purge_of_a_model_and_of_all(full: redis.Redis, url: str) -> None:
    assert "6 deleted" in run(url, "purge", "--model", "org/one", "--yes").output
    assert "18 deleted" not in CliRunner().invoke(app, ["cache", "purge", "--all", "--redis", url], input="n\n").output
    assert "18 deleted" in run(url, "purge", "--all", "--yes").output
    assert full.keys() == [b"somebody:else"]
    assert run(url, "purge", "--yes").exit_code == 1


def test_stats_count_by_model(full: redis.Redis, url: str) -> None:
    told = run(url, "stats").output
    assert "org/one-b" in told
    assert "allkeys-lru" in told
    assert "67 MB" in told
    assert "aliases  6" in told
    assert "local    no tier on this node" in told


def test_stats_tell_of_the_nodes_tier(full: redis.Redis, url: str) -> None:
    key = next(name.decode() for name in full.scan_iter("lookonce:emb:*"))
    cache = EmbeddingCache(CacheSettings(timeout=2.0, local=LocalSettings(mib=16)), url)
    for _ in range(2):
        assert cache.fetch(key) is not None
        assert cache.local.settle()
    told = run(url, "stats").output
    cache.close()
    assert "1 embeddings, 0.0 MB on this node" in told
    assert "no tier on this node" in run(url, "stats").output


def test_doctor_warns_of_too_little_shared_memory(url: str, tmp_path: Path) -> None:
    def tier(mib: int) -> Finding | None:
        path = config(tmp_path, url, f", local: {{mib: {mib}}}")
        return next((found for found in examine(path) if found.what == "local tier"), None)

    assert tier(0) is None
    found = tier(16)
    assert found is not None
    assert found.ok
    for mib in (4, 1 << 30):
        assert (found := tier(mib)) is not None
        assert not found.ok
        assert found.fix


def test_no_redis_is_one_sentence(tmp_path: Path) -> None:
    dead = run(f"unix://{tmp_path}/nobody", "ls")
    assert dead.exit_code == 1
    assert "does not answer" in dead.output
    private = CliRunner().invoke(app, ["cache", "ls"])
    assert private.exit_code == 1
    assert "names no Redis" in private.output.replace("\n", " ")


def test_doctor_warns_of_a_redis_that_would_not_let_anything_go(url: str, tmp_path: Path) -> None:
    """R6."""
    client = redis.Redis.from_url(url)

    def finding(more: str = "") -> Finding:
        return next(found for found in examine(config(tmp_path, url, more)) if found.what == "Redis")

    try:
        assert finding().ok
        client.config_set("maxmemory-policy", "noeviction")
        assert "allkeys-lru" in finding().fix
        client.config_set("maxmemory-policy", "volatile-lru")
        assert "cache.ttl" in finding().fix
        assert finding(", ttl: 3600").ok
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", 0)
        assert "maxmemory 8gb" in finding().fix
    finally:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", 64 << 20)
