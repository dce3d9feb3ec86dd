"""Output rows as Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shared.durable import replacing
from shared.shards import Row

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_index", pa.int32()),
        ("prompt", pa.string()),
        ("caption", pa.string()),
        ("finish_reason", pa.string()),
        *((name, pa.int32()) for name in ("prompt_tokens", "completion_tokens", "image_tokens")),
        ("image_hash", pa.string()),
        *((name, pa.int64()) for name in ("width", "height", "bytes")),
        ("cached", pa.bool_()),
        *((name, pa.string()) for name in ("duplicate_of", "model", "model_fingerprint", "prompt_fingerprint")),
        *((name, pa.float32()) for name in ("read_seconds", "encode_seconds", "answer_seconds")),
    ]
)
#: rows of a part that are read at a time
BATCH = 1024


class Parquet:
    """:class:`~shared.shards.RowFormat` with the columns of :data:`SCHEMA`."""

    suffix = ".parquet"

    def write(self, path: Path, rows: Sequence[Row]) -> None:
        """See :class:`~shared.shards.RowFormat`."""
        with replacing(path) as file:
            pq.write_table(pa.Table.from_pylist([dict(row) for row in rows], SCHEMA), file)

    def read(self, path: Path) -> Iterator[dict[str, Any]]:
        """See :class:`~shared.shards.RowFormat`."""
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH):
                yield from batch.to_pylist()
