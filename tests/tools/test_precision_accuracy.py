"""Records of a byte a value, and towers in 8 bits, cost the demo models nothing that counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from encoder_service.towers.int8 import Int8Linear, to_int8
from shared.record_values import Encoding
from tools.demo import tokenizer
from tools.demo.batches import BatchMaker
from tools.demo.evaluate import exact_answers
from tools.demo.model import DemoModel

MODELS = Path(__file__).parents[2] / "models"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["demo", "demo-pixtral"])
def test_accuracy_stays_within_half_a_point(name: str) -> None:
    """The same held-out pictures and questions each time; over 800 answers."""
    model = DemoModel.from_checkpoint(MODELS / name)
    maker = BatchMaker(tokenizer.build(model.design), model.design)
    raw, *others = (exact_answers(model, maker, 192, 7, encoding=encoding) for encoding in Encoding)
    assert raw["all"] > 0.9, "the model answers nothing: the test is idle"
    to_int8(model.tower)
    assert any(isinstance(layer, Int8Linear) for layer in model.tower.modules())
    others += [exact_answers(model, maker, 192, 7, encoding=encoding) for encoding in (Encoding.RAW, Encoding.INT8)]
    for figures in others:
        assert abs(figures["all"] - raw["all"]) <= 0.005
        assert abs(figures["cells"] - raw["cells"]) <= 0.005
