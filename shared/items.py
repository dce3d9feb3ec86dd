"""Messages between the two services: small, typed, without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.sizing import Grid


@dataclass(frozen=True)
class VisionItem:
    """One encoded image, as the language side gets it.

    Attributes:
        key: full cache key of its embedding record; also the engine's multimodal hash.
        grid: patch grid.
        merge: side of the block of patches that became one token.
        tokens: rows of the embedding.
        record: the embedding record itself, when it could not be stored; None when it lies in the cache.
        cached: True when no encoder forward ran for this request.
        timings: seconds per stage, by stage name.
    """

    key: str
    grid: Grid
    merge: int
    tokens: int
    record: bytes | None = None
    cached: bool = False
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def merged(self) -> Grid:
        """Grid of tokens."""
        return Grid(self.grid.height // self.merge, self.grid.width // self.merge)
