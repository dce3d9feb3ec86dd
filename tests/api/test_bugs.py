"""An error that nobody foresaw: the client learns an id, and the log has the rest under it."""

from __future__ import annotations

import logging
from contextlib import AbstractAsyncContextManager

import httpx
import pytest

from llm_service.api.app import create_app
from llm_service.api.endpoint import Backend
from shared.config import AccessSettings, HttpSettings
from shared.log import request_id


def connect() -> AbstractAsyncContextManager[Backend]:
    raise AssertionError("nothing is asked")


async def test_a_bug_has_the_requests_id_in_the_answer_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(HttpSettings(), AccessSettings(), connect)
    ids: list[str] = []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            ids.append(request_id.get())

    @app.get("/bug")
    async def bug() -> None:
        raise ZeroDivisionError("of a secret by nothing")

    handler, logger = Noted(), logging.getLogger("llm_service.api.app")
    logger.addHandler(handler)
    try:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            answer = await client.get("/bug", headers={"X-Request-Id": "mine"})
    finally:
        logger.removeHandler(handler)
    assert answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR
    assert answer.headers["x-request-id"] == "mine"
    assert "secret" not in answer.text
    assert ids == ["mine"]
    assert "of a secret by nothing" in caplog.text
