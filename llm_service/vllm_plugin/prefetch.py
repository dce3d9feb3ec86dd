"""Fetches embeddings ahead of the engine's step loop and holds them while requests need them.

Plain Python, without vLLM. All methods are called by one thread, the engine's scheduler, and return at once; only
the fetch function runs elsewhere. "Held" means that the validated bytes are in this process: an entry may vanish from
the cache the moment after, which then no longer matters.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        grid: merged grid (height, width) that the prompt's positions assume; None where they come from elsewhere.
        nbytes: memory that it will take.
    """

    key: str
    tokens: int
    grid: tuple[int, int] | None
    nbytes: int


#: blocking; the embeddings in the order of the needs, None for what cannot be had
Fetch = Callable[[Sequence[Need]], Sequence[torch.Tensor | None]]

#: needs that are fetched together, at most: one round trip, but no deadline of one for too many bytes
BATCH_BYTES = 16 << 20


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
        fetch: see :data:`Fetch`; what it gives is checked against the needs.
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
        entries = self._entries_for(owner, needs)
        if lost := tuple(key for key, entry in entries.items() if entry.lost):
            raise Lost(lost)
        return bool(entries or not needs) and all(entry.future.done() for entry in entries.values())

    def settled(self, owner: str, needs: Sequence[Need]) -> bool:
        """As :meth:`ready`, but what cannot be had is let go: the owner makes it, and the next one asks again."""
        entries = self._entries_for(owner, needs)
        if not (entries or not needs) or not all(entry.future.done() for entry in entries.values()):
            return False
        for key, entry in entries.items():
            if entry.lost:
                self._disown(owner, key)
        return True

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
        for key in tuple(self._owned.get(owner, ())):
            self._disown(owner, key)

    def close(self) -> None:
        """Stops fetching."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _entries_for(self, owner: str, needs: Sequence[Need]) -> dict[str, _Entry]:
        """The entries of all needs; none while there is no room for them."""
        mine = self._owned.get(owner, set())
        missing = [need for need in needs if need.key not in mine]
        if missing and not self._admit(owner, missing):
            return {}
        return {need.key: self._entries[need.key] for need in needs}

    def _disown(self, owner: str, key: str) -> None:
        entry = self._entries[key]
        entry.owners.discard(owner)
        mine = self._owned[owner]
        mine.discard(key)
        if not mine:
            del self._owned[owner]
        if not entry.owners:
            if entry.lost:
                del self._entries[key]
            else:
                self._entries.move_to_end(key)

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
        for batch in _batches(fresh):
            futures: list[Future[torch.Tensor | None]] = [Future() for _ in batch]
            self._pool.submit(self._run, batch, futures)
            for need, future in zip(batch, futures, strict=True):
                self._entries[need.key] = _Entry(future, need.nbytes)
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

    def _run(self, batch: list[Need], futures: list[Future[torch.Tensor | None]]) -> None:
        # an entry whose requests have all left may have been dropped before its turn
        wanted = [pair for pair in zip(batch, futures, strict=True) if pair[1].set_running_or_notify_cancel()]
        if not wanted:
            return
        try:
            found = self._fetch([need for need, _ in wanted])
        except Exception as error:
            logger.exception("prefetch of %s failed", ", ".join(need.key for need, _ in wanted))
            for _, future in wanted:
                future.set_exception(error)
            return
        for (_, future), tensor in zip(wanted, found, strict=True):
            future.set_result(tensor)


def _batches(needs: Sequence[Need]) -> Iterator[list[Need]]:
    """Cuts needs into runs of at most :data:`BATCH_BYTES`; a larger one runs alone."""
    batch: list[Need] = []
    held = 0
    for need in needs:
        if batch and held + need.nbytes > BATCH_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(need)
        held += need.nbytes
    if batch:
        yield batch
