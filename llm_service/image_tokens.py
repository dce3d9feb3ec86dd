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
        around: before and after an image; None for families that write nothing there.
    """

    image: int
    row_end: int | None = None
    image_end: int | None = None
    around: tuple[int, int] | None = None

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

        def known(name: str) -> int:
            if (token := find(name)) is None:
                raise CheckpointError(f"the tokenizer in {where} has no {name}")
            return token

        image = known(family.image_token)
        if family.rows is not None:
            return cls(image, known(family.rows.row_end), known(family.rows.image_end))
        if family.around is not None:
            before, after = family.around
            return cls(image, around=(known(before), known(after)))
        return cls(image)

    def fill(self, size: int | Grid) -> FilledImage:
        """The tokens of an image with this grid of tokens; where no rows are written, their number will do.

        Raises:
            RequestError: a number where the rows must be known.
        """
        count = size if isinstance(size, int) else size.patches
        if count and self.around is not None:
            before, after = self.around
            return FilledImage([before, *[self.image] * count, after], (False, *[True] * count, False))
        if not count or self.row_end is None or self.image_end is None:
            return FilledImage([self.image] * count, None)
        if isinstance(size, int):
            raise RequestError(f"this model writes images row by row; {size} tokens alone do not say how")
        row = [self.image] * size.width + [self.row_end]
        ids = row * size.height
        ids[-1] = self.image_end
        return FilledImage(ids, tuple(([True] * size.width + [False]) * size.height))
