"""Which variants the workers of a campaign have met: a table in shared memory, so that each is run once.

It says for an identity the lowest number that was met. What it misses is decided when the stores are combined: it saves
time, and no result depends on it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SeenVariants"]

# Identity and number + 1; a number of 0 is a free slot.
_SLOT: Final = struct.Struct("<qq")
# Slots that are looked at. In a table that is too full, variants are run twice, and nothing else happens.
_PROBES: Final = 64


# Slots of a GiB, of which only those that are written take memory. The number of variants may come from a file.
_MAX_BITS: Final = 26


class SeenVariants:
    """The table, in a file.

    Args:
        path: The file; made if it is missing.
        n: Variants that are expected; every process names the same number.
    """

    def __init__(self, path: Path, n: int) -> None:
        # At most half full: with linear probing, `_PROBES` slots nearly always reach a free one.
        self._n_slots = 1 << max(12, min(_MAX_BITS, (2 * n).bit_length()))
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        size = self._n_slots * _SLOT.size
        if os.fstat(self._descriptor).st_size < size:
            os.ftruncate(self._descriptor, size)  # of holes: blocks are taken as they are written
        self._table = mmap.mmap(self._descriptor, size)

    def mark_seen(self, identity: int, number: int) -> int:
        """Say that a variant was met; gives the lowest number that met one of this identity."""
        # Released by the system if the process is killed in between.
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            for probe in range(_PROBES):
                # An identity is a hash, so that its lowest bits are as good as another hash of it.
                at = (identity + probe) % self._n_slots * _SLOT.size
                found, before = _SLOT.unpack_from(self._table, at)
                if before and found != identity:
                    continue
                if not before or number < before - 1:
                    _SLOT.pack_into(self._table, at, identity, number + 1)
                return min(number, before - 1) if before else number
            return number
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Free it; the file stays."""
        self._table.close()
        os.close(self._descriptor)
