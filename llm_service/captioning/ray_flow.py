"""The stream of rows through Ray Data: fragments → rows → outcomes, with bounded memory from end to end.

Reading tasks turn fragments into small blocks of rows. A pool of workers captions them; in each worker an event loop
has many rows in work at once, some being read, some encoded, some answered, so that both pools stay busy. Ray Data
starts no more reading than its budget of the object store allows, and the consumer of outcomes holds back the rest.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.exceptions import RayActorError, RayError

from llm_service.captioning.captioner import Captioner
from llm_service.captioning.duplicates import DiskIndex, Index, Lines
from llm_service.captioning.patience import JobStopped
from llm_service.captioning.rows import Fragment, Outcome, Row
from shared.config import JobSettings
from shared.errors import LookonceError
from shared.idset import IdSet

#: size of a block of rows, bytes; a larger single row is a block of its own
BLOCK_BYTES = 4 << 20
#: rows that a reading task holds before it hands them on
ROWS_AT_ONCE = 16
#: blocks that one worker has open, so that the end of one does not leave it idle
OPEN_BLOCKS = 8
#: outcomes that go back together
OUTCOMES_AT_ONCE = 16
SCHEMA = pa.schema([("row", pa.string()), ("data", pa.large_binary())])

#: makes the captioner of one worker, given the index of duplicates
Connect = Callable[[Index | None], AbstractAsyncContextManager[Captioner]]


class _Fragments(Datasource):  # type: ignore[misc]
    """Rows of fragments as blocks; those that are done are left out."""

    def __init__(self, fragments: Sequence[Fragment], done: Any) -> None:
        self._fragments = fragments
        self._done = done

    def get_name(self) -> str:
        """Shown by Ray."""
        return "Captions"

    def estimate_inmemory_data_size(self) -> int | None:
        """Nobody knows."""
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        """One per fragment: they are small, and few are read at a time."""
        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(_Reading(fragment, self._done), metadata, schema=SCHEMA) for fragment in self._fragments]


@dataclass(frozen=True)
class _Reading:
    """Reads one fragment."""

    fragment: Fragment
    done: Any

    def __call__(self) -> Iterator[pa.Table]:
        done: IdSet = ray.get(self.done)
        rows: list[tuple[str, bytes | None]] = []
        size = 0
        for row in self.fragment.rows():
            if row.id in done:
                continue
            rows.append(row.pack())
            size += len(rows[-1][1] or b"")
            if len(rows) >= ROWS_AT_ONCE or size >= BLOCK_BYTES:
                yield _table(rows)
                rows, size = [], 0
        yield _table(rows)


def _table(packed: Sequence[tuple[str, bytes | None]]) -> pa.Table:
    columns = [[text for text, _ in packed], [data for _, data in packed]]
    return pa.table([pa.array(c, t.type) for c, t in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


class CaptionWorker:
    """One actor of the pool: an event loop of its own, shared by all the blocks that it has open.

    Args:
        connect: makes the captioner.
        in_flight: rows in work at once.
        index: the actor with the captions by content; None without.
    """

    def __init__(self, connect: Connect, in_flight: int, index: Any) -> None:
        self._connect = connect
        self._in_flight = in_flight
        self._index = None if index is None else RemoteIndex(index)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="captions", daemon=True).start()
        self._captioner, self._gate = asyncio.run_coroutine_threadsafe(self._open(), self._loop).result()

    async def _open(self) -> tuple[Captioner, asyncio.Semaphore]:
        self._context = self._connect(self._index)  # kept: a generator that nobody holds closes what it opened
        return await self._context.__aenter__(), asyncio.Semaphore(self._in_flight)

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        """Captions a block. Outcomes come in the order of its rows, so that a retry of the block repeats them.

        Raises:
            JobStopped: nothing answers any more.
        """
        if not block.num_rows:
            yield _table([])
            return
        texts, datas = block["row"].to_pylist(), block["data"].to_pylist()
        rows = [Row.unpack(text, data) for text, data in zip(texts, datas, strict=True)]
        futures = [asyncio.run_coroutine_threadsafe(self._one(row), self._loop) for row in rows]
        try:
            for start in range(0, len(futures), OUTCOMES_AT_ONCE):
                yield _table([(future.result().pack(), None) for future in futures[start : start + OUTCOMES_AT_ONCE]])
        finally:
            for future in futures:
                future.cancel()

    async def _one(self, row: Row) -> Outcome:
        async with self._gate:
            return await self._captioner.caption(row)


class IndexActor:
    """The captions by content, in one process for all workers."""

    def __init__(self, path: Path) -> None:
        self._index = DiskIndex(path)

    async def claim(self, content: str) -> Lines | None:
        """See :class:`Index`."""
        return await self._index.claim(content)

    async def settle(self, content: str, lines: Lines | None) -> None:
        """See :class:`Index`."""
        await self._index.settle(content, lines)


class RemoteIndex:
    """:class:`Index` over the actor. Without it, which comes back by itself, a row is just asked about again."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def claim(self, content: str) -> Lines | None:
        """See :class:`Index`."""
        try:
            return await self._actor.claim.remote(content)
        except RayActorError:
            return None

    async def settle(self, content: str, lines: Lines | None) -> None:
        """See :class:`Index`."""
        try:
            await self._actor.settle.remote(content, lines)
        except RayActorError:
            return


def start_index(path: Path) -> Any:
    """The actor for ``--dedupe``, on this node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": 10_000, "scheduling_strategy": here}
    return ray.remote(IndexActor).options(**options).remote(path)


def outcomes(
    fragments: Sequence[Fragment], done: IdSet, connect: Connect, settings: JobSettings, index: Any = None
) -> Iterator[Outcome]:
    """Captions every row that is not done, and yields what became of each, as they come.

    A row may come twice when a worker died under it.

    Args:
        fragments: of the source.
        done: ids to leave out.
        connect: makes a worker's captioner; travels to the workers.
        settings: sizes of the flow.
        index: of :func:`start_index`.

    Raises:
        JobStopped: the pools do not answer, or Ray ended the flow.
    """
    if not fragments:
        return
    _quiet()
    flow = ray.data.read_datasource(
        _Fragments(fragments, ray.put(done)),
        override_num_blocks=len(fragments),
        concurrency=settings.readers,
        num_cpus=0,
    ).map_batches(
        CaptionWorker,
        fn_constructor_args=(connect, settings.in_flight, index),
        batch_format="pyarrow",
        batch_size=None,
        zero_copy_batch=True,
        compute=ActorPoolStrategy(
            min_size=settings.min_workers,
            max_size=settings.max_workers,
            max_tasks_in_flight_per_actor=2 * OPEN_BLOCKS,
            max_concurrent_calls_per_actor=OPEN_BLOCKS,
            enable_true_multi_threading=True,
        ),
        num_cpus=0,
    )
    try:
        for table in flow.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
            for text in table["row"].to_pylist():
                yield Outcome.unpack(text)
    except RayError as error:
        raise _translated(error) from error


def _translated(error: BaseException) -> LookonceError:
    """Our error inside one of Ray's."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, LookonceError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return JobStopped(f"the flow of rows broke ({lines[-1][:300]}); run the same command again to go on")


def _quiet() -> None:
    """Ray Data's own bars and logs would stand between ours."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = BLOCK_BYTES
    context.execution_options.preserve_order = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="ray.data")
