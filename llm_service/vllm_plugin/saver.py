"""Stores encoder outputs in Redis behind the engine's back: the step only hands over a reference."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from shared.cache import EmbeddingCache
from shared.record_values import Encoding
from shared.records import MAX_SIDE, RecordError, encode_record
from shared.sizing import Grid

logger = logging.getLogger(__name__)

#: writers at once; more would only crowd the wire
THREADS = 2


class Saver:
    """Saves in the background, within a bound on memory.

    Args:
        cache: where to.
        budget: bytes of embeddings on their way, at most; more are dropped and counted.
        encoding: of new records.
    """

    def __init__(self, cache: EmbeddingCache, budget: int, encoding: Encoding = Encoding.RAW) -> None:
        self._cache = cache
        self._encoding = encoding
        self._budget = budget
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="lookonce-save")
        self._lock = threading.Lock()
        self._pending = 0
        self._counts: Counter[str] = Counter()
        self._copies: torch.cuda.Stream | None = None

    def save(self, key: str, output: torch.Tensor) -> None:
        """Takes an encoder output ``[tokens, width]`` on any device; returns at once."""
        if output.ndim != 2 or not 1 <= output.shape[0] <= MAX_SIDE or not output.is_floating_point():
            self._count("save_unsupported")
            return
        with self._lock:
            if self._pending + output.nbytes > self._budget:
                self._counts["save_dropped"] += 1
                return
            self._pending += output.nbytes
        fetched = self._to_host(output.detach())
        self._pool.submit(self._store, key, fetched, output.nbytes)

    def take_counts(self) -> dict[str, int]:
        """What happened since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Ends the threads; what has not begun is not saved."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _to_host(self, output: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins the copy; the returned function waits for it, in another thread."""
        if not output.is_cuda:
            return lambda: output
        self._copies = self._copies or torch.cuda.Stream(output.device)  # type: ignore[no-untyped-call]
        self._copies.wait_stream(torch.cuda.current_stream(output.device))
        with torch.cuda.stream(self._copies):
            host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
            host.copy_(output, non_blocking=True)
            # the encoder cache may drop the output before the copy is done
            output.record_stream(self._copies)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._copies)

        def wait() -> torch.Tensor:
            done.synchronize()
            return host

        return wait

    def _store(self, key: str, fetched: Callable[[], torch.Tensor], nbytes: int) -> None:
        try:
            if self._cache.describe(key) is not None:
                self._count("saved_before")
                return
            embedding = fetched()
            record = encode_record(key, embedding, Grid(1, len(embedding)), 1, self._encoding)
            if self._cache.put(key, record):
                self._count("saved")
                self._count("bytes_saved", nbytes)
            else:
                self._count("save_failed")
        except RecordError as error:
            logger.warning("an encoder output cannot be saved: %s", error)
            self._count("save_unsupported")
        except Exception:
            logger.exception("saving %s failed", key)
            self._count("save_failed")
        finally:
            with self._lock:
                self._pending -= nbytes

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number
