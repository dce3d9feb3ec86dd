"""A trained demo model that helps to train one of another family: same pictures, same words, another architecture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from encoder_service.preprocess.isaac import IsaacPreprocess
from shared.sizing import Grid, NaflexRule
from tools.demo import tokenizer
from tools.demo.batches import BatchMaker, Pictures, ask_all, draw_pictures
from tools.demo.design import ISAAC, MERGE
from tools.demo.language_model import Attention
from tools.demo.model import DemoModel
from tools.demo.pictures import Scene

#: keeps whatever grid a picture comes with
AS_IT_IS = IsaacPreprocess(NaflexRule(patch_size=16, merge=MERGE, min_patches=None, max_patches=4096))
#: pictures to measure the sizes of queries and keys on
MEASURED = 32


class Teacher:
    """The Isaac demo model, whose embeddings another tower learns to give and whose language model another starts from.

    Args:
        checkpoint: the exported Isaac demo.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._model = DemoModel.from_checkpoint(checkpoint).eval().requires_grad_(False)
        if self._model.design is not ISAAC:
            raise ValueError(f"{checkpoint} is no Isaac demo")

    @torch.no_grad()
    def embeddings(self, drawn: Sequence[tuple[Image.Image, Scene]], merged: Grid) -> torch.Tensor:
        """Embeddings ``[pictures · tokens, width]`` of pictures of one size, on this grid of tokens.

        The pictures are resized to as many of the teacher's tokens, so each token shows both models the same part.
        """
        side = AS_IT_IS.rule.patch_size * MERGE
        size = (merged.width * side, merged.height * side)
        resized = [(picture.resize(size, Image.Resampling.BICUBIC), scene) for picture, scene in drawn]
        return self._model.embed(Pictures.of(resized, AS_IT_IS))

    @torch.no_grad()
    def start(self, model: DemoModel) -> None:
        """Gives a model of another design the language model's weights, as far as both have them.

        Queries and keys that the teacher normalises and the model does not are scaled to the size that they have on
        average after the teacher's norm.
        """
        theirs = self._model.language.state_dict()
        for layer, sizes in enumerate(self._sizes()):
            attention = f"model.layers.{layer}.self_attn"
            for letter, size in zip("qk", sizes, strict=True):
                scale = theirs.pop(f"{attention}.{letter}_norm.weight")
                weight = theirs[f"{attention}.{letter}_proj.weight"]
                heads = weight.view(len(size), len(scale), -1)
                theirs[f"{attention}.{letter}_proj.weight"] = (heads * scale[:, None] / size[:, None, None]).view(
                    weight.shape
                )
        model.language.load_state_dict(theirs)

    def _sizes(self) -> list[list[torch.Tensor]]:
        """For every block the root mean square of queries and of keys before their norm, by head."""
        found: list[list[torch.Tensor]] = []

        def note(attention: Attention, inputs: tuple[torch.Tensor, ...], _: torch.Tensor) -> None:
            dim = attention.config.head_dim
            found.append(
                [
                    product(inputs[0]).unflatten(-1, (-1, dim)).pow(2).mean((0, 1, 3)).sqrt()
                    for product in (attention.q_proj, attention.k_proj)
                ]
            )

        hooks = [layer.self_attn.register_forward_hook(note) for layer in self._model.language.model.layers]
        rng = np.random.default_rng(0)
        pictures = Pictures.of(draw_pictures(rng, MEASURED, "train"), ISAAC.preprocess)
        maker = BatchMaker(tokenizer.build(ISAAC), ISAAC)
        batch = maker.shared_prefix(pictures, 1, [ask_all(rng, scene) for scene in pictures.scenes])
        self._model.answer(self._model.embed(pictures), pictures, batch)
        for hook in hooks:
            hook.remove()
        return found
