"""Records of a byte a value cost the demo model nothing that counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.record_values import Encoding
from tools.demo import tokenizer
from tools.demo.batches import BatchMaker
from tools.demo.evaluate import exact_answers
from tools.demo.model import DemoModel

DEMO = Path(__file__).parents[2] / "models" / "demo"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_accuracy_stays_within_half_a_point() -> None:
    """The same held-out pictures and questions through records of each kind; over 800 answers."""
    model = DemoModel.from_checkpoint(DEMO)
    maker = BatchMaker(tokenizer.build(model.design), model.design)
    raw, int8, fp8 = (exact_answers(model, maker, 192, 7, encoding=encoding) for encoding in Encoding)
    assert raw["all"] > 0.9, "the model answers nothing: the test is idle"
    for figures in (int8, fp8):
        assert abs(figures["all"] - raw["all"]) <= 0.005
        assert abs(figures["cells"] - raw["cells"]) <= 0.005
