"""Training batches: several questions share one prefix of images, none sees another's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from encoder_service.preprocess.base import Preprocess
from llm_service.mrope import GridOrigin, ImageSpan, positions
from shared.sizing import Grid
from tools.demo import questions
from tools.demo.design import MERGE, Design
from tools.demo.pictures import COLOURS, DIGIT_SHARE, KINDS, Scene, Split, draw, pick_size
from tools.demo.questions import Question

USER, ANSWER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
END, PAD = "<|im_end|>", "<|endoftext|>"
COLOUR_NAMES = tuple(COLOURS)
IGNORE = -100


@dataclass(frozen=True)
class Pictures:
    """Pictures of one size, packed for the tower.

    Attributes:
        patches: float32 ``[pictures · grid.patches, patch_dim]``.
        grid: patch grid of each.
        scenes: what is in them.
    """

    patches: torch.Tensor
    grid: Grid
    scenes: list[Scene]

    @classmethod
    def of(cls, drawn: Sequence[tuple[Image.Image, Scene]], preprocess: Preprocess) -> Pictures:
        """Packs pictures of one size."""
        cut = [preprocess.patches(torch.from_numpy(np.array(picture))) for picture, _ in drawn]
        return cls(torch.cat([patches for patches, _ in cut]), cut[0][1], [scene for _, scene in drawn])

    @property
    def merged(self) -> Grid:
        """Grid of tokens of each."""
        return Grid(self.grid.height // MERGE, self.grid.width // MERGE)

    def labels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Per token: what kind of thing covers its middle (0: none, else 1 + index) and its colour's index or -100."""
        rows, columns = self.merged
        kinds = np.zeros((len(self.scenes), rows, columns), dtype=np.int64)
        colours = np.full((len(self.scenes), rows, columns), IGNORE, dtype=np.int64)
        y, x = (np.arange(rows) + 0.5) / rows, (np.arange(columns) + 0.5) / columns
        for index, scene in enumerate(self.scenes):
            for thing, box in scene.boxes:
                left, top, right, bottom = (edge / scene.size[axis % 2] for axis, edge in enumerate(box))
                down, across = (y > top) & (y < bottom), (x > left) & (x < right)
                down[int((top + bottom) / 2 * rows)] = across[int((left + right) / 2 * columns)] = True
                inside = np.ix_(down, across)
                kinds[index][inside] = 1 + KINDS.index(thing.kind)
                colours[index][inside] = COLOUR_NAMES.index(thing.colour)
        return torch.from_numpy(kinds.ravel()), torch.from_numpy(colours.ravel())

    def middles(self) -> torch.Tensor:
        """Per token whether it holds the middle of a thing, and whether it holds the middle of a cell.

        Returns:
            float32 ``[2, tokens]``, 0 or 1: each thing and each cell has one token of its own.
        """
        rows, columns = self.merged
        out = np.zeros((2, len(self.scenes), rows, columns), dtype=np.float32)
        for index, scene in enumerate(self.scenes):
            for _, (left, top, right, bottom) in scene.boxes:
                y, x = (top + bottom) / 2 / scene.size[1], (left + right) / 2 / scene.size[0]
                out[0, index, int(y * rows), int(x * columns)] = 1
            y, x = (np.arange(scene.rows) + 0.5) / scene.rows, (np.arange(scene.columns) + 0.5) / scene.columns
            out[1, index][np.ix_((y * rows).astype(int), (x * columns).astype(int))] = 1
        return torch.from_numpy(out.reshape(2, -1))

    def extents(self) -> torch.Tensor:
        """Per token how many rows and columns of cells its picture has, less 1: int64 ``[2, tokens]``."""
        extents = torch.tensor([[scene.rows - 1, scene.columns - 1] for scene in self.scenes])
        return extents.T.repeat_interleave(self.merged.patches, dim=1)

    def places(self) -> torch.Tensor:
        """Per token the row and column of the cell that it lies in: int64 ``[2, tokens]``."""
        height, width = self.merged
        y, x = (np.arange(height) + 0.5) / height, (np.arange(width) + 0.5) / width
        out = np.empty((2, len(self.scenes), height, width), dtype=np.int64)
        for index, scene in enumerate(self.scenes):
            out[0, index] = (y * scene.rows).astype(int)[:, None]
            out[1, index] = (x * scene.columns).astype(int)[None]
        return torch.from_numpy(out.reshape(2, -1))

    def mirrored(self, rng: np.random.Generator, embeddings: torch.Tensor) -> tuple[Pictures, torch.Tensor]:
        """Turns half of the pictures upside down and half left to right *behind* the tower.

        Args:
            rng: decides for each picture.
            embeddings: ``[pictures · tokens, width]`` of the pictures as they are.

        Returns:
            The scenes that the language model is to tell, and their embeddings: each token keeps its embedding and gets
            another place. So nothing that the tower knows about places helps, only the positions that the language
            model gives to its tokens.
        """
        rows, columns = self.merged
        flips = rng.random((len(self.scenes), 2)) < 0.5
        shaped = embeddings.view(len(self.scenes), rows, columns, -1)
        turned = [
            image.flip([axis for axis in (0, 1) if flip[axis]]) for image, flip in zip(shaped, flips, strict=True)
        ]
        scenes = [scene.mirrored(*map(bool, flip)) for scene, flip in zip(self.scenes, flips, strict=True)]
        return Pictures(self.patches, self.grid, scenes), torch.stack(turned).flatten(0, 2)


def draw_pictures(
    rng: np.random.Generator,
    number: int,
    split: Split,
    limit: int = 3,
    crowding: float = 0.0,
    digits: float = DIGIT_SHARE,
) -> list[tuple[Image.Image, Scene]]:
    """Draws pictures of one random size, with at most ``limit`` rows and columns."""
    size = pick_size(rng)
    return [draw(int(rng.integers(2**62)), split, size, limit, crowding, digits) for _ in range(number)]


@dataclass(frozen=True)
class Batch:
    """Sequences for the language model.

    Attributes:
        ids, labels: int64 ``[B, L]``; a label is the next token where an answer is learned, else -100.
        is_image: bool ``[B, L]``.
        positions: int64 ``[3, B, L]``.
        mask: bool ``[B, L, L]``.
        spans: for every question (row, first, last + 1) of its learned positions, with the question.
    """

    ids: torch.Tensor
    labels: torch.Tensor
    is_image: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    spans: list[tuple[int, int, int, Question]]


class BatchMaker:
    """Turns scenes and questions into :class:`Batch`.

    Args:
        tokenizer: the demo tokenizer.
        design: of the model; says how an image is written.
        flat_positions: plain 1-D positions instead of M-RoPE, to see how much the model leans on them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, design: Design, *, flat_positions: bool = False) -> None:
        self._tokenizer = tokenizer
        self._design = design
        self._flat = flat_positions or not design.grid_positions
        self._ids: dict[str, list[int]] = {}
        self.image, self.end, self._pad = (tokenizer.convert_tokens_to_ids(token) for token in (design.image, END, PAD))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens recognised."""
        if text not in self._ids:
            self._ids[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._ids[text]

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def images(self, merged: Grid, number: int, first: int) -> tuple[list[int], list[ImageSpan]]:
        """Ids of images with this grid of tokens, and where they stand if the first of them begins at ``first``."""
        one = self._tokenizer.convert_tokens_to_ids(self._design.image_tokens(merged))
        return one * number, [ImageSpan(first + i * len(one), 1, *merged) for i in range(number)]

    def prompt(self, merged: Grid, text: str) -> tuple[list[int], np.ndarray, int]:
        """Ids, positions ``[3, L]`` and decoding delta of a question about one image with this grid of tokens."""
        before = self.encode(USER)
        image, spans = self.images(merged, 1, len(before))
        ids = [*before, *image, *self.encode(text + ANSWER)]
        if self._flat:
            return ids, self._positions(len(ids), []), 0
        return ids, *positions(len(ids), spans, GridOrigin.ZERO)

    def _positions(self, length: int, spans: list[ImageSpan]) -> np.ndarray:
        if self._flat:
            return np.broadcast_to(np.arange(length), (3, length))
        return positions(length, spans, GridOrigin.ZERO)[0]

    def shared_prefix(self, pictures: Pictures, images: int, asked: list[list[Question]]) -> Batch:
        """Images first, then blocks of question and answer that see the images and themselves only."""
        prefix = self.encode(USER)
        ids, spans = self.images(pictures.merged, images, len(prefix))
        head = [*prefix, *ids]
        head_positions = self._positions(len(head) + 1, spans)
        base = int(head_positions[0, -1])
        rows = []
        for questions_of_row in asked:
            row = _Row(head, head_positions[:, :-1])
            for block, question in enumerate(questions_of_row, start=1):
                before, after = self.encode(question.text + ANSWER), self.encode(question.answer) + self.encode(END)
                row.add(before, after, np.arange(base, base + len(before) + len(after)), block, question)
            rows.append(row)
        return self._stack(rows)

    def text_first(self, pictures: Pictures, asked: list[Question]) -> Batch:
        """The question before the image, one question each."""
        rows = []
        for question in asked:
            before, after = self.encode(USER + question.text), self.encode(ANSWER)
            answer = self.encode(question.answer) + self.encode(END)
            image, spans = self.images(pictures.merged, 1, len(before))
            head = [*before, *image, *after]
            whole = self._positions(len(head) + len(answer), spans)
            row = _Row(head[:-1], whole[:, : len(head) - 1])
            row.add(head[-1:], answer, whole[0, len(head) - 1 :], 0, question)
            rows.append(row)
        return self._stack(rows)

    def turns(self, pictures: Pictures, asked: list[list[Question]]) -> Batch:
        """A conversation: every question sees the ones before it."""
        prefix = self.encode(USER)
        image, spans = self.images(pictures.merged, 1, len(prefix))
        head = [*prefix, *image]
        places = self._positions(len(head) + 1, spans)
        rows = []
        for questions_of_row in asked:
            row = _Row(head, places[:, :-1])
            base = int(places[0, -1])
            for turn, question in enumerate(questions_of_row):
                opening = "" if turn == 0 else "\n" + USER
                before, after = self.encode(opening + question.text + ANSWER), self.encode(question.answer + END)
                row.add(before, after, np.arange(base, base + len(before) + len(after)), 0, question)
                base += len(before) + len(after)
            rows.append(row)
        return self._stack(rows)

    def _stack(self, rows: list[_Row]) -> Batch:
        length = max(len(row.ids) for row in rows)
        ids = np.full((len(rows), length), self._pad)
        labels = np.full((len(rows), length), IGNORE)
        blocks = np.full((len(rows), length), -1)
        places = np.zeros((3, len(rows), length), dtype=np.int64)
        spans = []
        for index, row in enumerate(rows):
            used = len(row.ids)
            ids[index, :used], blocks[index, :used] = row.ids, row.blocks
            labels[index, :used] = row.labels
            places[:, index, :used] = np.concatenate(row.positions, axis=1)
            spans += [(index, first, last, question) for first, last, question in row.spans]
        block = torch.from_numpy(blocks)
        visible = (block[:, None, :] == 0) | (block[:, None, :] == block[:, :, None])
        mask = visible & torch.ones(length, length, dtype=torch.bool).tril() & (block[:, None, :] >= 0)
        mask |= torch.eye(length, dtype=torch.bool)  # padding rows see themselves: no empty softmax
        tokens = torch.from_numpy(ids)
        return Batch(tokens, torch.from_numpy(labels), tokens == self.image, torch.from_numpy(places), mask, spans)


class _Row:
    """One sequence while it grows."""

    def __init__(self, head: list[int], head_positions: np.ndarray) -> None:
        self.ids = list(head)
        self.labels = [IGNORE] * len(head)
        self.blocks = [0] * len(head)
        self.positions = [head_positions]
        self.spans: list[tuple[int, int, Question]] = []

    def add(self, before: list[int], answer: list[int], line: np.ndarray, block: int, question: Question) -> None:
        """Appends a question and its answer; ``line`` holds their positions, equal in all three rows."""
        tokens = before + answer
        first = len(self.ids) + len(before) - 1  # the position that predicts the answer's first token
        self.labels += [IGNORE] * (len(before) - 1) + answer + [IGNORE]
        self.ids += tokens
        self.blocks += [block] * len(tokens)
        self.positions.append(np.broadcast_to(line, (3, len(tokens))))
        self.spans.append((first, first + len(answer), question))


def drill(rng: np.random.Generator, scene: Scene) -> list[Question]:
    """What training asks about one picture: more of the kinds that are learned last."""
    hard = [questions.where(rng, scene), questions.where(rng, scene), questions.where(rng, scene)]
    asked = [questions.describe(rng, scene), questions.at(rng, scene), questions.count(rng, scene)]
    return [*asked, *(question for question in hard if question is not None)]


def ask_all(rng: np.random.Generator, scene: Scene) -> list[Question]:
    """A spread of questions about one picture."""
    asked = [questions.describe(rng, scene), questions.at(rng, scene), questions.at(rng, scene)]
    asked += [question] if (question := questions.where(rng, scene)) is not None else []
    return [*asked, questions.count(rng, scene), questions.count(rng, scene)]
