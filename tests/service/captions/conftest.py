"""Settings of the service that captioning jobs run on."""

from __future__ import annotations

import pytest

from shared.config import Settings
from tests.service.conftest import service_settings


@pytest.fixture(scope="session")
def settings() -> Settings:
    return service_settings(images={"allow_private_hosts": True})
