"""A process that stores records in a node's tier without end, for the tests that kill it.

python -m tests.shared.tier_worker FOLDER LIMIT_BYTES FIRST
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

from shared.cache.local import Folder
from tests.shared.redis_kit import LARGE, key, record

#: other records for every process, the same ones again and again
RECORDS = 12


def main() -> None:
    path, limit, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder = Folder(path, limit)
    made = [(key(name), record(name, **LARGE)) for name in range(first, first + RECORDS)]
    print("ready", flush=True)
    for name, value in itertools.cycle(made):
        folder.drop(name)
        folder.put(name, value, time.time())


if __name__ == "__main__":
    main()
