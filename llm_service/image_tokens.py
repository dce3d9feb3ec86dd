"""What one image looks like in a prompt: which tokens, and which of them an embedding row replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import CheckpointError, RequestError
from shared.family import Family
from shared.sizing import Grid


class FilledImage(NamedTuple):
    """The tokens of one image.

    Attributes:
        ids: token ids.
        mask: True where an embedding row goes; None when it goes everywhere.
    """

    ids: list[int]
    mask: tuple[bool, ...] | None


@dataclass(frozen=True)
class ImageTokens:
    """Token ids of a family's images.

    Attributes:
        image: stands for one embedding row.
        row_end: after every row of tokens but the last; None for families that write no rows.
        image_end: after the last row.
    """

    image: int
    row_end: int | None = None
    image_end: int | None = None

    @classmethod
    def of(cls, family: Family, find: Callable[[str], int | None], where: str) -> ImageTokens:
        """Looks the family's tokens up: their ids differ between checkpoints of one family.

        Args:
            family: says which tokens there are.
            find: id of a token; None when there is none.
            where: named in errors.

        Raises:
            CheckpointError: a token is missing.
        """
        names = [family.image_token]
        if family.rows is not None:
            names += [family.rows.row_end, family.rows.image_end]
        found = []
        for name in names:
            if (token := find(name)) is None:
                raise CheckpointError(f"the tokenizer in {where} has no {name}")
            found.append(token)
        return cls(*found)

    def fill(self, size: int | Grid) -> FilledImage:
        """The tokens of an image with this grid of tokens; where no rows are written, their number will do.

        Raises:
            RequestError: a number where the rows must be known.
        """
        count = size if isinstance(size, int) else size.patches
        if not count or self.row_end is None or self.image_end is None:
            return FilledImage([self.image] * count, None)
        if isinstance(size, int):
            raise RequestError(f"this model writes images row by row; {size} tokens alone do not say how")
        row = [self.image] * size.width + [self.row_end]
        ids = row * size.height
        ids[-1] = self.image_end
        return FilledImage(ids, tuple(([True] * size.width + [False]) * size.height))
