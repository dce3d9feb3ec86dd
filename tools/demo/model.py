"""The demo model as one module for training: the product's tower and a small language model."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from encoder_service.checkpoints import load_encoder
from encoder_service.towers.base import Plan
from encoder_service.towers.isaac import IsaacTower, IsaacTowerConfig
from encoder_service.towers.layers import merge_index
from tools.demo.batches import IGNORE, Batch, Pictures
from tools.demo.language_model import LanguageConfig, LanguageModel
from tools.demo.pictures import COLOURS, KINDS
from tools.demo.starts import start_as_convolution

TOWER = IsaacTowerConfig(
    width=128, layers=4, heads=4, hidden=384, patch_size=16, position_side=16, merge=2, output_width=192
)
LANGUAGE = LanguageConfig()
#: most rows and most columns of a picture
MOST_ROWS = 3
#: the block of the language model after which every image token should know its row and column
PLACED_AFTER = 1


def _below(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


class DemoModel(nn.Module):
    """Tower, language model, and auxiliary heads that are dropped at export."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = IsaacTower(TOWER)
        self.language = LanguageModel(LANGUAGE)
        self.kind_head = nn.Linear(LANGUAGE.width, 1 + len(KINDS))
        self.colour_head = nn.Linear(LANGUAGE.width, len(COLOURS))
        self.extent_heads = nn.ModuleList(nn.Linear(LANGUAGE.width, MOST_ROWS) for _ in range(2))
        self.middle_head = nn.Linear(LANGUAGE.width, 2)
        self.place_heads = nn.ModuleList(nn.Linear(LANGUAGE.width, MOST_ROWS) for _ in range(2))
        start_as_convolution(self.tower)

    @classmethod
    def from_run(cls, run: Path) -> DemoModel:
        """The model of a training run; the auxiliary heads are random."""
        model = cls()
        state = torch.load(run / "state.pt", weights_only=True)["model"]
        model.tower.load_state_dict(_below("tower.", state))
        model.language.load_state_dict(_below("language.", state))
        return model

    @classmethod
    def from_checkpoint(cls, checkpoint: Path) -> DemoModel:
        """An exported model, read back as the services read it; the auxiliary heads are random."""
        model = cls()
        model.tower.load_state_dict(load_encoder(checkpoint, "float32").tower.state_dict())
        tensors = load_file(checkpoint / "model.safetensors")
        language = {name: tensor.float() for name, tensor in tensors.items() if "vision_embedding" not in name}
        model.language.load_state_dict(language)
        return model

    def embed(self, pictures: Pictures) -> torch.Tensor:
        """Embeddings ``[pictures · tokens, width]``, differentiable through the resized position table."""
        number = len(pictures.scenes)
        grids = [pictures.grid] * number
        # not tower.plan: its positions are cached without gradients
        extras = {
            "positions": self.tower.resize_positions(pictures.grid).repeat(number, 1),
            "merge_index": merge_index(grids, self.tower.merge),
        }
        bounds = torch.arange(number + 1, dtype=torch.int32) * pictures.grid.patches
        plan = Plan(bounds, pictures.grid.patches, extras)
        return self.tower(pictures.patches, plan)

    def auxiliary_loss(self, embeddings: torch.Tensor, pictures: Pictures) -> tuple[torch.Tensor, float]:
        """What each token is asked directly, so that the tower learns before the answers do.

        What covers it, in which colour, whether the middle of a thing or of a cell lies in it, and how many rows and
        columns of cells there are. Not where it lies: that is for the language model to know from its positions.

        Returns:
            The loss, and the share of covered tokens whose kind is named right.
        """
        kinds, colours = pictures.labels()
        weight = torch.ones(1 + len(KINDS))
        weight[0] = 0.2
        logits = self.kind_head(embeddings)
        loss = F.cross_entropy(logits, kinds, weight) + 0.5 * F.cross_entropy(
            self.colour_head(embeddings), colours, ignore_index=IGNORE
        )
        for head, truth in zip(self.extent_heads, pictures.extents(), strict=True):
            loss = loss + 0.25 * F.cross_entropy(head(embeddings), truth)
        loss = loss + F.binary_cross_entropy_with_logits(self.middle_head(embeddings).T, pictures.middles())
        covered = kinds > 0
        return loss, (logits.argmax(-1) == kinds)[covered].float().mean().item()

    def answer(
        self, embeddings: torch.Tensor, pictures: Pictures, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The language model's part.

        Args:
            embeddings: ``[pictures · tokens, width]``.
            pictures: what the embeddings show, at the places where the language model sees it.
            batch: questions about it.

        Returns:
            Logits ``[answer tokens, vocabulary]``, the tokens ``[answer tokens]`` where answers are learned, and the
            loss of telling every image token's row and column early on.
        """
        blocks = self.language.layers(batch.ids, embeddings, batch.is_image, batch.positions, batch.mask)
        places = blocks[PLACED_AFTER][batch.is_image]
        losses = [
            F.cross_entropy(head(places), truth)
            for head, truth in zip(self.place_heads, pictures.places(), strict=True)
        ]
        learned = batch.labels != IGNORE
        hidden = self.language.model.norm(blocks[-1][learned])
        return self.language.lm_head(hidden), batch.labels[learned], torch.stack(losses).sum()
