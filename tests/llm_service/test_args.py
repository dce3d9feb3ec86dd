"""What settings of a language pool become in vLLM's terms."""

from __future__ import annotations

from pathlib import Path

from llm_service.engine.args import engine_args
from shared.config import CacheSettings, LanguageSettings, ModelSettings

DEMO = Path(__file__).parent.parent.parent / "models" / "demo"


def test_a_bound_of_held_embeddings_reaches_the_connector() -> None:
    """A13: whatever a replica keeps of pictures that came by, it keeps within a bound that can be set."""
    model = ModelSettings(name="demo", checkpoint=DEMO, language=LanguageSettings(prefetch_mib=3))
    transfer = engine_args(model, CacheSettings(), "redis://cache:6379/0").ec_transfer_config
    assert transfer is not None
    assert transfer.ec_connector_extra_config["prefetch_bytes"] == 3 << 20
