"""API keys, tenants, rate limits, routes for administrators."""

from __future__ import annotations

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from llm_service.api.access import Access, RateLimit, key_hash, new_key
from shared.config import AccessSettings, TenantSettings
from shared.errors import Busy, Unauthorized
from tests.api.conftest import MODEL, as_tenant

ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("GET", "/v1/files"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/v1/images"),
    ("GET", "/v1/images/" + 64 * "0"),
    ("DELETE", "/v1/images/" + 64 * "0"),
    ("GET", "/v1/status"),
    ("GET", "/metrics"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic lo-alice", "lo-alice", "Bearer"])
def test_every_route_wants_a_key(url: str, method: str, path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    answer = httpx.request(method, url + path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_health_and_page_are_open(url: str) -> None:
    assert httpx.get(f"{url}/healthz").json() == {"status": "ok"}
    page = httpx.get(url)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]


def test_the_official_client_sees_an_authentication_error(url: str) -> None:
    with pytest.raises(AuthenticationError):
        OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


def test_a_tenant_sees_its_models_only(url: str, alice: httpx.Client) -> None:
    assert [card["id"] for card in alice.get("/v1/models").json()["data"]] == [MODEL]
    with as_tenant(url, "carol") as carol:
        assert carol.get("/v1/models").json()["data"] == []
        assert carol.get(f"/v1/models/{MODEL}").status_code == 404


def test_the_rate_limit_says_when_to_come_back(url: str) -> None:
    with as_tenant(url, "carol") as carol:
        answers = [carol.post("/v1/completions", json={"model": MODEL, "prompt": "x"}) for _ in range(4)]
    limited = answers[-1]
    assert limited.status_code == 429
    assert 1 <= int(limited.headers["retry-after"]) <= 15
    assert limited.json()["error"]["type"] == "rate_limit_error"


def test_a_bucket_fills_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("llm_service.api.access.time.monotonic", lambda: now[0])
    limit = RateLimit(per_minute=60)
    for _ in range(15):
        limit.take()
    with pytest.raises(Busy) as caught:
        limit.take()
    assert caught.value.retry_after == pytest.approx(1)
    now[0] = 1.0
    limit.take()
    with pytest.raises(Busy):
        limit.take()


def test_metrics_and_status_are_for_administrators(url: str, alice: httpx.Client) -> None:
    assert alice.get("/metrics").status_code == alice.get("/v1/status").status_code == 401
    with as_tenant(url, "operator") as operator:
        assert "lookonce_requests" in operator.get("/metrics").text
        state = operator.get("/v1/status").json()
    (model,) = state["models"]
    assert model["encoder"]["replicas"] == {"RUNNING": 1}
    assert model["language"]["stats"].keys() >= {"running", "waiting"}
    assert state["cache"]["reachable"]
    assert state["cache"]["max_bytes"] == 64 << 20
    assert state["cache"]["policy"].startswith("allkeys-")


def test_cross_origin_pages(url: str) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = httpx.options(f"{url}/v1/chat/completions", headers={"Origin": "https://example.org", **ask})
    assert allowed.headers["access-control-allow-origin"] == "https://example.org"
    refused = httpx.options(f"{url}/v1/chat/completions", headers={"Origin": "https://evil.example", **ask})
    assert "access-control-allow-origin" not in refused.headers


def test_a_new_key_opens_the_gate() -> None:
    key, hashed = new_key()
    access = Access(AccessSettings(tenants=(TenantSettings(name="one", keys=(hashed,)),)))
    assert key_hash(key) == hashed
    tenant = access.tenant(f"Bearer {key}")
    assert (tenant.name, tenant.salt) == ("one", "one")
    with pytest.raises(Unauthorized):
        access.tenant(f"Bearer {key}x")


def test_tenants_must_differ() -> None:
    one = {"name": "one", "keys": (key_hash("a"),)}
    for other in ({"name": "one", "keys": (key_hash("b"),)}, {"name": "two", "keys": (key_hash("a"),)}):
        with pytest.raises(ValueError, match="must differ"):
            AccessSettings(tenants=(TenantSettings(**one), TenantSettings(**other)))


def test_without_tenants_everybody_may_ask() -> None:
    tenant = Access(AccessSettings()).tenant(None)
    assert (tenant.name, tenant.salt, tenant.admin) == ("", None, True)
