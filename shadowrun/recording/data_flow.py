"""Which row of a recording has the values of a tensor: the data-flow parents of a call.

Rows are found by storage, the number of writes to it (``Tensor._version``) and the tensor's place in it. A storage is
held by a weak reference while its rows are known, so that no other storage gets its identity. What stays unseen is a
write that neither a recorded call made nor torch counts: by numpy or another process through shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shadowrun.intercept.torchapi import StorageWatch, storage_key
from shadowrun.recording.model import NONE
from shadowrun.torch_private import version_of

if TYPE_CHECKING:
    import torch

__all__ = ["DataFlow", "Leaf"]

_UNCOUNTED: Final = -1
"""Version of tensors that were made in inference mode: torch counts no writes to them."""

_PURGE_AT: Final = 1024


class Leaf:
    """A tensor that no recorded call made, on its way into the recording.

    Attributes:
        row: Its row; NONE until the call that uses it first has been recorded.
    """

    __slots__ = ("row",)

    def __init__(self) -> None:
        self.row = NONE


class _Memory:
    """What is known of a storage.

    Attributes:
        watch: Keeps its identity from being given to another.
        version: Number of writes after the last recorded one.
        counts: torch has not counted the last recorded write yet: it does so after the call.
        last: Row from which, with its bases, all of the storage is known; None where only parts are.
        rows: Rows of the tensors in it, by place.
    """

    __slots__ = ("counts", "last", "rows", "version", "watch")

    def __init__(self, watch: StorageWatch, version: int) -> None:
        self.watch = watch
        self.version = version
        self.counts = False
        self.last: int | Leaf | None = None
        self.rows: dict[tuple[Any, ...], int | Leaf] = {}


class DataFlow:
    """The rows of all tensors that are alive. Not safe to use from several threads at once."""

    def __init__(self) -> None:
        self._memories: dict[int, _Memory] = {}
        self._purge_at = _PURGE_AT

    def row_of(self, t: torch.Tensor) -> int | Leaf | None:
        """The row with a tensor's values; None for one that no recorded call made, which is to become a leaf."""
        memory = self._memories.get(storage_key(t))
        if memory is None or not _is_current(memory, t):
            return None
        row = memory.rows.get(_place(t))
        return memory.last if row is None else row

    def leaf(self, t: torch.Tensor) -> Leaf:
        """Note a leaf."""
        key = storage_key(t)
        memory = self._memories.get(key)
        if memory is None or not _is_current(memory, t):
            memory = self._memory(key, t)
        found = memory.rows[_place(t)] = Leaf()
        if memory.last is None and _covers_storage(t):
            memory.last = found
        return found

    def made(self, t: torch.Tensor, row: int) -> None:
        """A call made a tensor on memory of its own."""
        memory = self._memory(storage_key(t), t)
        memory.last = memory.rows[_place(t)] = row

    def viewed(self, t: torch.Tensor, row: int, *, counts: bool) -> bool:
        """A call returned a tensor that may be a view of one of its inputs, which were looked up before.

        Args:
            t: The view. Its version means nothing yet: it joins its base's after the mode's handler.
            row: Its row, if it is one.
            counts: torch counts the call as a write, as it does for ``t_``.

        Returns:
            Whether it lies on known memory.
        """
        memory = self._memories.get(storage_key(t))
        if memory is None:
            return False
        memory.rows[_place(t)] = row
        memory.counts = memory.counts or counts
        return True

    def written(self, t: torch.Tensor, row: int) -> int:
        """A call wrote to a tensor.

        Returns:
            The row that the rest of the storage comes from, NONE where all of it was written to or nothing is known.
        """
        key = storage_key(t)
        before = self._memories.get(key)
        memory = self._memory(key, t)
        memory.counts = True
        memory.rows[_place(t)] = row
        if _covers_storage(t):
            memory.last = row
            return NONE
        rest = None if before is None else before.last
        # Where the rest is not known, its tensors are to become leaves.
        memory.last = None if rest is None else row
        return NONE if rest is None else rest.row if isinstance(rest, Leaf) else rest

    def forget(self, t: torch.Tensor) -> None:
        """A call that is not recorded may have written to a tensor."""
        self._memories.pop(storage_key(t), None)

    def _memory(self, key: int, t: torch.Tensor) -> _Memory:
        """What is known of a storage, afresh."""
        memory = self._memories[key] = _Memory(StorageWatch(t), _version(t))
        if len(self._memories) >= self._purge_at:
            self._purge()
        return memory

    def _purge(self) -> None:
        self._memories = {key: memory for key, memory in self._memories.items() if not memory.watch.freed}
        # Twice what is alive: each storage is looked at a bounded number of times.
        self._purge_at = max(_PURGE_AT, 2 * len(self._memories))


def _version(t: torch.Tensor) -> int:
    return _UNCOUNTED if t.is_inference() else version_of(t)


def _is_current(memory: _Memory, t: torch.Tensor) -> bool:
    """Whether no write was missed since the last recorded one."""
    version = _version(t)
    # A mode's handler comes before torch counts the write. Some kernels write without being counted at all.
    if memory.counts and version == memory.version + 1:
        memory.version, memory.counts = version, False
    return version == memory.version


def _covers_storage(t: torch.Tensor) -> bool:
    return t.numel() * t.itemsize >= t.untyped_storage().nbytes()


def _place(t: torch.Tensor) -> tuple[Any, ...]:
    return t.storage_offset(), t.shape, t.stride(), t.dtype
