"""One image's way through the encoder: read, look up, claim, cut, encode, store. Shared by all who want the picture."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from functools import partial

from encoder_service.batcher import Batcher, Entry
from encoder_service.batching import Priority, WaitingRoom
from encoder_service.company import Company
from encoder_service.pictures import Picture, PictureReader
from encoder_service.stats import EncoderStats
from encoder_service.store import Store
from shared import tracing
from shared.errors import LookonceError, RequestError, Unavailable
from shared.flights import FollowedFailure, SingleFlight
from shared.items import VisionItem
from shared.keys import Namespace, bytes_digest
from shared.records import RecordError

#: waits for another encoder's work on one image, at most; then it is encoded here whatever the lease says
MAX_WAITS = 3


@dataclass(frozen=True)
class Outcome:
    """What one run found or made.

    Attributes:
        item: without a record.
        record: of a new embedding; None of one that lies in the cache.
        stored: whether the cache holds it.
    """

    item: VisionItem
    record: bytes | None = None
    stored: bool = True

    def for_joiner(self) -> Outcome:
        """The same for a caller whose request made no encoder work."""
        return dataclasses.replace(self, item=dataclasses.replace(self.item, cached=True, timings={}))


@dataclass(frozen=True)
class Job:
    """One image file that somebody wants encoded.

    Attributes:
        data: the file.
        digest: of the file and the salt.
        salt: of the tenant.
        priority: of the caller.
        fresh: encode even if the cache claims to have it.
        request: that wants it among other images; None when it is by itself.
        timings: seconds per stage, filled on the way.
    """

    data: bytes
    digest: str
    salt: str | None
    priority: Priority
    fresh: bool
    request: str | None = None
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def flight(self) -> str:
        """Callers with equal names share one run."""
        return f"{self.digest}:{self.priority}:{self.fresh}"


class Pipeline:
    """Runs jobs.

    Args:
        namespace: of this tower's cache keys.
        reader: host threads and preprocessing.
        batcher: the tower.
        room: the batcher's queue, whose places bound the images in work.
        store: the cache.
        stats: counters to write.
    """

    def __init__(
        self,
        namespace: Namespace,
        reader: PictureReader,
        batcher: Batcher,
        room: WaitingRoom[Entry],
        store: Store,
        stats: EncoderStats,
    ) -> None:
        self.namespace = namespace
        self.reader = reader
        self.batcher = batcher
        self.store = store
        self._room = room
        self._stats = stats
        self._files: SingleFlight[Outcome] = SingleFlight()
        self._pictures: SingleFlight[Outcome] = SingleFlight()
        self._urgent: set[str] = set()
        self._company = Company()
        self._stopped = False

    async def run(
        self, data: bytes, salt: str | None, priority: Priority, *, fresh: bool, request: str | None = None
    ) -> Outcome:
        """One run for all callers with the same bytes; a caller that only joined a run that failed starts one more."""
        digest = await self.reader.in_pool(lambda: bytes_digest(data, salt))
        if self._stopped:
            raise Unavailable("the encoder is stopping; try again")
        try:
            return await self._run_shared(Job(data, digest, salt, priority, fresh, request))
        except FollowedFailure as failure:
            if isinstance(failure.error, RequestError):
                raise failure.error from failure
        try:
            return await self._run_shared(Job(data, digest, salt, priority, fresh))  # its company has gone on
        except FollowedFailure as failure:
            raise failure.error from failure

    async def stop(self) -> None:
        """Cancels everything; callers get :class:`Unavailable`."""
        self._stopped = True
        await self._files.cancel_all()
        await self._pictures.cancel_all()
        await self.batcher.stop()

    async def _run_shared(self, job: Job) -> Outcome:
        joined = job.flight in self._files
        self._stats.shared += joined
        outcome = await self._files.run(job.flight, lambda: self._from_file(job))
        return outcome.for_joiner() if joined else outcome

    async def _from_file(self, job: Job) -> Outcome:
        """Decodes the file, then joins or starts the run for its picture."""
        with self._room.place():
            with tracing.span("decode"):
                picture = await self._read(job)
            key = self.namespace.embedding_key(picture.digest)
            flight = f"{key}:{job.fresh}"
            joined = flight in self._pictures
            try:
                if joined:
                    picture.drop()
                if job.priority is Priority.INTERACTIVE:
                    self._urgent.add(key)
                    self._room.promote(flight)
                outcome = await self._pictures.run(flight, lambda: self._from_picture(job, picture, key))
            finally:
                picture.drop()
                self._urgent.discard(key)
            if not joined:
                return outcome
            self._stats.shared += 1
            if outcome.stored:
                await self.store.add_alias(job.digest, picture.digest)
            return outcome.for_joiner()

    async def _read(self, job: Job) -> Picture:
        if job.request is None:
            return await self.reader.read(job.data, job.salt, job.timings)
        with self._company.reading(job.request):
            held_up = partial(self._company.held_up, job.request)
            picture = await self.reader.read(job.data, job.salt, job.timings, held_up)
        try:
            await self._company.gather(job.request)
        except BaseException:
            picture.drop()
            raise
        return picture

    async def _from_picture(self, job: Job, picture: Picture, key: str) -> Outcome:
        """Takes the embedding from the cache if it is there or comes there, else makes it."""
        if job.fresh:
            return await self._encode(job, picture, key)
        if (found := await self.store.find(key)) is not None:
            return await self._known(job, picture, found)
        for _ in range(MAX_WAITS):
            async with self.store.lease(key) as mine:
                if mine:
                    return await self._encode(job, picture, key)
            picture.drop()  # another encoder works on it: hold nothing meanwhile
            if (found := await self.store.wait(key)) is not None:
                return await self._known(job, picture, found)
            self._stats.takeovers += 1
        return await self._encode(job, picture, key)

    async def _known(self, job: Job, picture: Picture, found: VisionItem) -> Outcome:
        """The picture came in another file before, or another encoder was faster."""
        picture.drop()
        self._stats.cache_hits += 1
        await self.store.add_alias(job.digest, picture.digest)
        return Outcome(dataclasses.replace(found, timings=job.timings))

    async def _encode(self, job: Job, picture: Picture, key: str) -> Outcome:
        again = None
        try:
            if picture.pixels is None:
                again = await self.reader.read(job.data, job.salt, job.timings)
            with tracing.span("preprocess"):
                patches = await self.reader.cut(again or picture, job.timings)
        finally:
            picture.drop()
            if again is not None:
                again.drop()
        flight = f"{key}:{job.fresh}"
        priority = Priority.INTERACTIVE if key in self._urgent else job.priority
        with tracing.span("batch", patches=len(patches.values)) as work:
            embedding = await self.batcher.submit(flight, patches, priority)
            until = time.time()
            work.past("forward", embedding.encode_seconds, until)
            work.past("queue", embedding.queue_seconds, until - embedding.encode_seconds)
        job.timings["queue"], job.timings["encode"] = embedding.queue_seconds, embedding.encode_seconds
        begin = time.perf_counter()
        grid, merge = self.store.shape(patches.grid)
        try:
            record = await self.reader.in_pool(lambda: self.store.record(key, embedding.values, patches.grid))
        except RecordError as error:
            self._stats.not_finite += error.reason == "values"
            raise LookonceError(f"the encoder's result for this image cannot be used: {error}") from error
        with tracing.span("cache.put", bytes=len(record)):
            stored = await self.store.put(key, record, job.digest, picture.digest)
        job.timings["put"] = time.perf_counter() - begin
        self._stats.stored += stored
        self._stats.not_stored += not stored
        item = VisionItem(key, grid, merge, len(embedding.values), timings=job.timings)
        return Outcome(item, record, stored)
