"""An image that ends encoder processes is refused; everybody else is answered."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.service.conftest import metric, random_png
from tests.service.failures.conftest import Faulty, poisoned
from tests.service.failures.victims import eventually, victims

pytestmark = pytest.mark.slow


def test_a_poison_image_is_quarantined_and_its_neighbours_are_answered(faulty: Faulty) -> None:
    """A10: two processes die, not the pool; whoever shared them is cleared and answered."""
    alone = [faulty.text(random_png(seed)) for seed in range(6)]
    before = set(victims("encoder"))
    assert len(before) == 2
    with ThreadPoolExecutor(16) as threads:
        bad = [threads.submit(faulty.ask, poisoned(99)) for _ in range(3)]
        # other pixels than before, so that each needs an encoder, and known answers at the end
        good = [threads.submit(faulty.ask, random_png(seed)) for seed in range(100, 108)]
        again = [threads.submit(faulty.text, random_png(seed)) for seed in range(6)]
    assert {response.result().status_code for response in bad} == {422}
    body = bad[0].result().json()["error"]
    assert body["code"] == "image_quarantined"
    assert body["type"] == "invalid_request_error"
    assert [response.result().status_code for response in good] == [httpx.codes.OK] * len(good)
    assert [answer.result() for answer in again] == alone
    eventually(lambda: len(victims("encoder")) == 2, 60, "two encoders run again")
    assert len(set(victims("encoder")) & before) == 0, "both had to die"
    survivors, refused = set(victims("encoder")), metric(faulty.url, "lookonce_quarantined_total")
    assert faulty.ask(poisoned(99)).status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert metric(faulty.url, "lookonce_quarantined_total") == refused + 1
    assert set(victims("encoder")) == survivors, "a quarantined image reaches no encoder"


def test_other_bytes_of_the_picture_are_welcome(faulty: Faulty) -> None:
    """The hash of the file is refused, not its sender, nor the picture under it."""
    assert faulty.text(random_png(99))
