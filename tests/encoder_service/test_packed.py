"""Linear layers with weights laid out by oneDNN: the same products, for every family, activations joined with them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from encoder_service.checkpoints import load_encoder
from encoder_service.device import Patches, embed
from encoder_service.towers.base import Budget
from encoder_service.towers.int8 import Int8Linear, to_int8
from encoder_service.towers.layers import ACTIVATIONS
from encoder_service.towers.packed import FUSED, PackedLinear, can_pack, pack_weights
from encoder_service.utilisation import measure_work
from tests.encoder_service.conftest import relative_error
from tests.encoder_service.test_int8 import DEMO, demo_pictures
from tests.encoder_service.test_replay_families import batch
from tests.encoder_service.test_replay_families import tower as family_tower

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="torch is built without oneDNN here")

#: of a batch
ROOM = Budget(160, 10)


@pytest.mark.parametrize("activation", ["none", *(name for name, function in ACTIVATIONS.items() if function in FUSED)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_the_definition(activation: str, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, bias=bias).requires_grad_(False)
    after = ACTIVATIONS.get(activation, nn.Identity())
    layer = PackedLinear(linear, FUSED[after]) if after in FUSED else PackedLinear(linear)
    x = torch.randn(7, 33, 96)
    torch.testing.assert_close(layer(x), after(linear.double()(x.double())).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["pixtral", "radio", "radio tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_family_keeps_its_embeddings(name: str, dtype: torch.dtype) -> None:
    made = family_tower(name).to(dtype)
    images = [
        Patches(image.values.to(dtype), image.grid) for image in batch(name, random.Random(4), ROOM, made.patch_dim)
    ]
    wanted = torch.cat(embed(made, images).embeddings).float()
    pack_weights(made)
    assert not any(isinstance(layer, nn.Linear) for layer in made.modules())
    found = torch.cat(embed(made, images).embeddings).float()
    assert relative_error(found, wanted) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_eight_bits_stay_eight_bits() -> None:
    tower = load_encoder(DEMO, "bfloat16").tower
    to_int8(tower)
    eight = sum(isinstance(layer, Int8Linear) for layer in tower.modules())
    pack_weights(tower)
    assert sum(isinstance(layer, Int8Linear) for layer in tower.modules()) == eight > 0
    assert any(isinstance(layer, PackedLinear) for layer in tower.modules())


def test_its_work_is_counted() -> None:
    tower, picture = load_encoder(DEMO, "float32").tower, demo_pictures("float32")[0]
    plain = measure_work(tower, picture)
    pack_weights(tower)
    packed = measure_work(tower, picture)
    assert packed.per_patch == plain.per_patch > 0
    assert packed.gemm_rate > 0
