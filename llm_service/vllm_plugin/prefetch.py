"""Fetches embeddings ahead of the engine's step loop and holds them while requests need them.

Plain Python, without vLLM. All methods are called by one thread, the engine's scheduler, and return at once; only
the fetch function runs elsewhere. "Held" means that the validated bytes are in this process: an entry may vanish from
the cache the moment after, which then no longer matters.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Need:
    """One embedding that a request needs.

    Attributes:
        key: its cache key.
        tokens: rows that the prompt has room for.
        grid: merged grid (height, width) that the prompt's positions assume.
        nbytes: memory that it will take.
    """

    key: str
    tokens: int
    grid: tuple[int, int]
    nbytes: int


Fetch = Callable[[Need], torch.Tensor | None]


class Lost(Exception):
    """Embeddings that cannot be had; holds their keys."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        super().__init__(", ".join(keys))
        self.keys = keys


@dataclass
class _Entry:
    future: Future[torch.Tensor | None]
    nbytes: int
    owners: set[str] = field(default_factory=set)

    @property
    def tensor(self) -> torch.Tensor | None:
        """The embedding, when it has come and is good."""
        done = self.future.done() and not self.future.cancelled() and self.future.exception() is None
        return self.future.result() if done else None

    @property
    def lost(self) -> bool:
        return self.future.done() and self.tensor is None


class Prefetcher:
    """Entries by key, owned by requests; unowned ones stay until their room is needed.

    Args:
        fetch: blocking; the embedding, checked against the need, or None.
        budget: bytes to hold at most. A single request above it is served when nothing else is held.
        threads: fetches at the same time.
    """

    def __init__(self, fetch: Fetch, budget: int, threads: int = 4) -> None:
        self._fetch = fetch
        self._budget = budget
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lookonce-prefetch")
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._owned: dict[str, set[str]] = {}
        #: owners that found no room, longest waiting first; only the first may be let in
        self._line: OrderedDict[str, None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes held or on their way."""
        return sum(entry.nbytes for entry in self._entries.values())

    @property
    def owners(self) -> int:
        """Requests that hold something or wait for room."""
        return len(self._owned.keys() | self._line.keys())

    def ready(self, owner: str, needs: Sequence[Need]) -> bool:
        """Whether all needs are held for this owner from now until :meth:`release`; starts fetching what is missing.

        Raises:
            Lost: some cannot be had.
        """
        mine = self._owned.get(owner, set())
        missing = [need for need in needs if need.key not in mine]
        if missing and not self._admit(owner, missing):
            return False
        entries = {need.key: self._entries[need.key] for need in needs}
        if lost := tuple(key for key, entry in entries.items() if entry.lost):
            raise Lost(lost)
        return all(entry.future.done() for entry in entries.values())

    def keep(self, owner: str, keys: Iterable[str]) -> None:
        """Holds those of ``keys`` that are here anyway; fetches nothing."""
        for key in keys:
            if (entry := self._entries.get(key)) is not None and entry.tensor is not None:
                self._own(owner, key, entry)

    def get(self, key: str) -> torch.Tensor | None:
        """The embedding, if it is held."""
        entry = self._entries.get(key)
        return None if entry is None else entry.tensor

    def release(self, owner: str) -> None:
        """The request has ended: what it held may go."""
        self._line.pop(owner, None)
        for key in self._owned.pop(owner, ()):
            entry = self._entries[key]
            entry.owners.discard(owner)
            if not entry.owners:
                if entry.lost:
                    del self._entries[key]
                else:
                    self._entries.move_to_end(key)

    def close(self) -> None:
        """Stops fetching."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _own(self, owner: str, key: str, entry: _Entry) -> None:
        entry.owners.add(owner)
        self._owned.setdefault(owner, set()).add(key)

    def _admit(self, owner: str, needs: list[Need]) -> bool:
        """Makes room and starts the fetches, all or nothing: half-served requests could block each other for ever."""
        wanted = {need.key: need for need in needs}
        # an entry that was lost for somebody else may have been written since
        fresh = [n for n in wanted.values() if (e := self._entries.get(n.key)) is None or (e.lost and not e.owners)]
        if fresh and not self._make_room(owner, sum(need.nbytes for need in fresh), wanted.keys()):
            self._line.setdefault(owner)
            return False
        self._line.pop(owner, None)
        for need in fresh:
            self._entries[need.key] = _Entry(self._pool.submit(self._run, need), need.nbytes)
        for key in wanted:
            self._own(owner, key, self._entries[key])
        return True

    def _make_room(self, owner: str, nbytes: int, spare: Iterable[str]) -> bool:
        if self._line and next(iter(self._line)) != owner:
            return False
        keep = set(spare)
        idle = [key for key, entry in self._entries.items() if not entry.owners and key not in keep]
        held = self.nbytes
        while held + nbytes > self._budget and idle:
            entry = self._entries.pop(idle.pop(0))
            entry.future.cancel()
            held -= entry.nbytes
        return held + nbytes <= self._budget or not self._owned

    def _run(self, need: Need) -> torch.Tensor | None:
        try:
            return self._fetch(need)
        except Exception:
            logger.exception("prefetch of %s failed", need.key)
            raise
