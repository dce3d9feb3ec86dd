"""A demo model as one module for training: the product's tower and a small language model."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from encoder_service.checkpoints import load_encoder
from shared.families import family_of, read_config
from tools.demo.batches import IGNORE, Batch, Pictures
from tools.demo.design import DESIGNS, ISAAC, PIXTRAL, Design
from tools.demo.language_model import LanguageModel
from tools.demo.pictures import COLOURS, KINDS
from tools.demo.tensors import language_tensors

#: most rows and most columns of a picture
MOST_ROWS = 3
#: the block of the language model after which every image token should know its row and column
PLACED_AFTER = 1


def _below(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


class DemoModel(nn.Module):
    """Tower, language model, and auxiliary heads that are dropped at export."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        self.tower = design.make_tower()
        self.language = LanguageModel(design.language)
        width = design.language.width
        self.kind_head = nn.Linear(width, 1 + len(KINDS))
        self.colour_head = nn.Linear(width, len(COLOURS))
        self.extent_heads = nn.ModuleList(nn.Linear(width, MOST_ROWS) for _ in range(2))
        self.middle_head = nn.Linear(width, 2)
        self.place_heads = nn.ModuleList(nn.Linear(width, MOST_ROWS) for _ in range(2))

    @classmethod
    def from_run(cls, run: Path) -> DemoModel:
        """The model of a training run; the auxiliary heads are random."""
        saved = torch.load(run / "state.pt", weights_only=True)
        model, state = cls(DESIGNS[saved.get("design", "isaac")]), saved["model"]
        model.tower.load_state_dict(_below("tower.", state))
        model.language.load_state_dict(_below("language.", state))
        return model

    @classmethod
    def from_checkpoint(cls, checkpoint: Path) -> DemoModel:
        """An exported model, read back as the services read it; the auxiliary heads are random."""
        model = cls(ISAAC if family_of(read_config(checkpoint)).name == ISAAC.name else PIXTRAL)
        model.tower.load_state_dict(load_encoder(checkpoint, "float32").tower.state_dict())
        tensors = load_file(checkpoint / "model.safetensors")
        model.language.load_state_dict(language_tensors(model.design, tensors))
        return model

    def embed(self, pictures: Pictures) -> torch.Tensor:
        """Embeddings ``[pictures · tokens, width]``, differentiable."""
        grids = [pictures.grid] * len(pictures.scenes)
        embeddings: torch.Tensor = self.tower(pictures.patches, self.design.plan(self.tower, grids))
        return embeddings

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
