"""The OpenAPI document against the application: generated requests, right and wrong, and every answer as documented."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.core.parameters import ParameterLocation
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from llm_service.api.access import key_hash
from llm_service.api.app import create_app
from shared.config import AccessSettings, HttpSettings, TenantSettings
from tests.api.conftest import KEYS, MODEL

KEY = "Bearer " + KEYS["operator"]
ACCESS = AccessSettings(tenants=(TenantSettings(name="operator", keys=(key_hash(KEYS["operator"]),), admin=True),))


@asynccontextmanager
async def nothing():
    yield None


SCHEMA = schemathesis.openapi.from_dict(create_app(HttpSettings(), ACCESS, nothing).openapi())
OPERATIONS = {result.ok().label: result.ok() for result in SCHEMA.get_all_operations()}
#: where wrong requests can be made: by their parameters or their body
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
#: statuses of all cases, by operation
seen: Counter[str] = Counter()


def check(url: str, label: str, mode: GenerationMode, cases: int) -> None:
    """Sends generated cases and holds every answer against the document.

    A request of the right shape may still be refused, since its picture cannot be fetched or its prompt is too long;
    that it is refused as documented is checked all the same.
    """

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    def run(case: Case) -> None:
        _serve(case.body)
        answer = case.call(base_url=url, headers={"Authorization": KEY}, timeout=60)
        seen[f"{label} {answer.status_code}"] += 1
        skipped = [positive_data_acceptance] + ([] if _wrong_body(case) else [negative_data_rejection])
        case.validate_response(answer, excluded_checks=skipped, headers={"Authorization": KEY})

    try:
        run()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "nothing about this operation can be wrong"


def _wrong_body(case: Case) -> bool:
    """Whether something else is wrong than a header, which is set right here, or a query, where more is tolerated."""
    wrong = {place for place, component in case.meta.components.items() if component.mode.is_negative}
    return not wrong <= {ParameterLocation.HEADER, ParameterLocation.QUERY}


def _serve(body: object) -> None:
    """Generated requests name models that do not exist and set no end to their answers: some of that is mended."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        return
    if len(str(body)) % 4:
        body["model"] = MODEL
    for name in ("max_tokens", "max_completion_tokens"):
        if type(body.get(name, 1)) is int and body.get(name, 4) > 3:
            body[name] = 3


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("label", OPERATIONS)
def test_some_generated_requests(url: str, label: str, mode: GenerationMode) -> None:
    check(url, label, mode, cases=10)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_thousands_of_generated_requests(url: str) -> None:
    seen.clear()
    for label in OPERATIONS:
        heavy = "completions" in label
        for mode in MODES:
            check(url, label, mode, cases=1200 if heavy else 120)
    print("\n".join(f"{count:6} {what}" for what, count in sorted(seen.items())))
    assert seen.total() >= 5000
    assert seen["POST /v1/chat/completions 200"] > 100
    assert seen["POST /v1/completions 200"] > 100
