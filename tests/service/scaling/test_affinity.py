"""Requests go to the replica that has seen their image."""

from __future__ import annotations

import pytest

from lookonce.service import running
from tests.service.scaling.kit import ask, pools

pytestmark = pytest.mark.slow


def test_requests_about_one_image_meet_in_one_language_replica() -> None:
    """The second question finds the first one's tokens in the prefix cache, whichever of two replicas took it.

    The pictures have more tokens than a block of that cache, which holds 128 on CPUs.
    """
    with running(pools({}, {"min_replicas": 2, "max_replicas": 2})) as url:
        for seed in range(300, 310):
            first, second, third = (ask(url, seed, side=640, max_tokens=2)["usage"] for _ in range(3))
            assert first["prompt_tokens_details"]["cached_tokens"] == 0
            for again in (second, third):
                assert again["prompt_tokens_details"]["cached_tokens"] > 0, f"image {seed} went to a stranger"
