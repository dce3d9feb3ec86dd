"""The node's own level in front of Redis: records in shared memory. See ``docs/decisions/0005-local-tier.md``.

``tier`` is what the cache talks to and ``writer`` its thread; ``folder`` is the folder of one Redis, ``mappings`` how
its files are read, ``writes`` how they come and go, ``files`` what there is, and ``users`` who is there.
"""

from shared.cache.local.files import Usage, usage_of
from shared.cache.local.folder import LEAST_BYTES, Folder
from shared.cache.local.tier import LocalTier
from shared.cache.local.users import SHARED_MEMORY, Unusable, folder_of, remove_unused

__all__ = [
    "LEAST_BYTES",
    "SHARED_MEMORY",
    "Folder",
    "LocalTier",
    "Unusable",
    "Usage",
    "folder_of",
    "remove_unused",
    "usage_of",
]
