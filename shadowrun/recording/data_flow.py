"""Which row of a recording has the values of a tensor: the data-flow parents of a call.

Rows are found by storage, the number of writes to it (``Tensor._version``) and the tensor's place in it. A storage is
held by a weak reference while its rows are known, so that no other storage gets its identity. What stays unseen is a
write that neither a recorded call made nor torch counts: by numpy or another process through shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shadowrun.intercept.torchapi import StorageWatch, storage_key
from shadowrun.native import core
from shadowrun.native.tensors import reads_places
from shadowrun.recording.model import NONE
from shadowrun.torch_private import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

__all__ = ["DataFlow", "Leaf"]

# Version of tensors that were made in inference mode: torch counts no writes to them.
_UNCOUNTED: Final = -1

# What is left of a freed storage lies between the program's tensors, and keeps the free memory on both sides of it
# from becoming one block: freed ones are forgotten early.
_PURGE_AFTER: Final = 8
# A storage that is alive is left out of the next looks: to ask torch takes longer than all else here.
_MOST_LOOKS: Final = 3
# Of a number that holds a place and a form: tuples would have the garbage collector run more often.
_FORM_BITS: Final = 32
_FORM_MASK: Final = (1 << _FORM_BITS) - 1
# Among the rows of a storage: some of its values may come from code that calls no operators. No place is negative.
_UNSEEN: Final = -1


class Leaf:
    """A tensor that no recorded call made, on its way into the recording.

    Attributes:
        row: Its row; NONE until the call that uses it first has been recorded.
    """

    __slots__ = ("row",)

    def __init__(self) -> None:
        self.row = NONE


class _StorageRows:
    """What is known of a storage. `native/record_rows.c` has the same.

    Attributes:
        version: Number of writes after the last recorded one.
        counts: torch has not counted the last recorded write yet: it does so after the call.
        last: Row from which, with its bases, all of the storage is known; None where only parts are.
        rows: Rows of the tensors in it, by place.
    """

    __slots__ = ("_n_resting", "_rest", "_watch", "counts", "last", "rows", "version")

    def __init__(self, t: torch.Tensor, version: int) -> None:
        self._watch = StorageWatch(t)  # keeps its identity from being given to another
        self._n_resting = self._rest = 0
        self.renew(version)

    def renew(self, version: int) -> None:
        """Forget all rows."""
        self.version = version
        self.counts = False
        self.last: int | Leaf | None = None
        self.rows: dict[int, int | Leaf] = {}

    def check_freed(self) -> bool:
        """Whether the storage was freed. If not, the next looks leave it out: 1, then 3 each time."""
        if self._n_resting:
            self._n_resting -= 1
            return False
        self._n_resting = self._rest = min(2 * self._rest + 1, _MOST_LOOKS)
        return self._watch.freed


def _forget_freed_in_python(storages: dict[int, _StorageRows]) -> None:
    for key in [key for key, known in storages.items() if known.check_freed()]:
        del storages[key]


_new_storage_rows: Callable[[torch.Tensor, int], _StorageRows] = _StorageRows
_forget_freed: Callable[[dict[int, _StorageRows]], None] = _forget_freed_in_python
if core is not None and reads_places:
    _new_storage_rows, _forget_freed = core.StorageRows, core.forget_freed


class DataFlow:
    """The rows of all tensors that are alive. Not safe to use from several threads at once.

    `form` is the number of a tensor's form: two tensors in one storage are the same where it and the offset are equal.

    Attributes:
        storages: What is known, by `storage_key`; `native/record_rows.c` reads and fills it too.
    """

    def __init__(self) -> None:
        self.storages: dict[int, _StorageRows] = {}
        self._touched: set[int] | None = None
        self._purge_at = _PURGE_AFTER

    def clear(self) -> None:
        """Forget everything."""
        self.storages.clear()
        self._touched = None if self._touched is None else set()
        self._purge_at = _PURGE_AFTER

    def row_of(self, t: torch.Tensor, form: int) -> int | Leaf | None:
        """The row with a tensor's values; None for one that no recorded call made, which is to become a leaf."""
        known = self.storages.get(storage_key(t))
        if known is None or not _is_current(known, t):
            return None
        # Without a row of its own, its values are those of the last write to the storage.
        row = known.rows.get(_place(t, form))
        return known.last if row is None else row

    def leaf(self, t: torch.Tensor, form: int) -> Leaf:
        """Note a leaf."""
        key = storage_key(t)
        known = self.storages.get(key)
        if known is None or not _is_current(known, t):
            known = self._renewed(t)
        elif self._touched is not None:
            self._touched.add(key)
        found = known.rows[_place(t, form)] = Leaf()
        # A part says nothing about the rest of its storage, which may have another origin.
        if known.last is None and _covers_storage(t):
            known.last = found
        return found

    def note_result(self, t: torch.Tensor, form: int, row: int) -> None:
        """A call made a tensor on memory of its own."""
        known = self._renewed(t)
        known.last = known.rows[_place(t, form)] = row

    def note_view(self, t: torch.Tensor, form: int, row: int, *, counts: bool) -> bool:
        """A call returned a tensor that may be a view of one of its inputs, which were looked up before.

        Args:
            t: The view. Its version means nothing yet: it joins its base's after the mode's handler.
            form: Its form.
            row: Its row, if it is one.
            counts: torch counts the call as a write, as it does for ``t_``.

        Returns:
            Whether it lies on known memory.
        """
        known = self.storages.get(storage_key(t))
        if known is None:
            return False
        known.rows[_place(t, form)] = row
        known.counts = known.counts or counts
        return True

    def note_write(self, t: torch.Tensor, form: int, row: int) -> int:
        """A call wrote to a tensor.

        Returns:
            The row that the rest of the storage comes from, NONE where all of it was written to or nothing is known.
        """
        before = self.storages.get(storage_key(t))
        rest = None if before is None else before.last
        known = self._renewed(t)
        known.counts = True
        known.rows[_place(t, form)] = row
        if _covers_storage(t):
            known.last = row
            return NONE
        # Where the rest is not known, its tensors are to become leaves.
        known.last = None if rest is None else row
        return NONE if rest is None else rest.row if isinstance(rest, Leaf) else rest

    def places(self, rows: Collection[int]) -> dict[int, tuple[int, int, int]]:
        """Where the tensors of rows lie, of which some may be freed: row to storage key, offset and form."""
        found = {}
        for key, known in self.storages.items():
            for place, row in known.rows.items():
                if row in rows and type(row) is int:
                    found[row] = key, place >> _FORM_BITS, place & _FORM_MASK
        return found

    def base(self, key: int) -> int:
        """The row that has all values of a storage; NONE where there is none, or a leaf."""
        row = self.storages[key].last
        return row if type(row) is int else NONE

    def forget(self, t: torch.Tensor) -> None:
        """A call that is not recorded may have written to a tensor."""
        # Forgotten, not marked: a later use makes a leaf, which claims no origin.
        self.storages.pop(storage_key(t), None)

    def note_unseen(self, t: torch.Tensor) -> None:
        """Code that calls no operators has made a tensor, or may have written to it: it is to become a leaf."""
        self._renewed(t).rows[_UNSEEN] = NONE

    def is_unseen(self, t: torch.Tensor) -> bool:
        """Whether a tensor's values may come from such code, and not from outside of the program."""
        known = self.storages.get(storage_key(t))
        return known is not None and _UNSEEN in known.rows

    def begin_unseen(self) -> None:
        """Code that calls no operators begins to run: what is recorded until `end_unseen` may be written to."""
        self._touched = set() if self._touched is None else self._touched

    def end_unseen(self) -> None:
        """It has ended."""
        for key in self._touched or ():
            known = self.storages.get(key)
            if known is not None:
                # Writes of generated code are not counted by torch, so versions do not show them.
                known.renew(known.version)
                known.rows[_UNSEEN] = NONE
        self._touched = None

    def purge(self) -> None:
        """Forget storages that were freed, if some may be; called now and then.

        Soon: what is left of a freed storage lies between the program's tensors, and the free memory there cannot
        become one block again. With up to 1,024 of them, a step of a transformer touched a third more memory.
        """
        if len(self.storages) < self._purge_at:
            return
        _forget_freed(self.storages)
        # More by a part of what is alive: each storage is looked at a bounded number of times.
        self._purge_at = len(self.storages) + max(_PURGE_AFTER, len(self.storages) // 16)

    def _renewed(self, t: torch.Tensor) -> _StorageRows:
        """What is known of a storage, afresh."""
        key, version = storage_key(t), _version(t)
        known = self.storages.get(key)
        if self._touched is not None:
            self._touched.add(key)
        if known is None:
            known = self.storages[key] = _new_storage_rows(t, version)
        else:
            known.renew(version)
        return known


def _version(t: torch.Tensor) -> int:
    # Inference tensors have no version counter, and reading it raises.
    return _UNCOUNTED if t.is_inference() else version_of(t)


def _is_current(known: _StorageRows, t: torch.Tensor) -> bool:
    """Whether no write was missed since the last recorded one."""
    version = _version(t)
    # A mode's handler comes before torch counts the write. Some kernels write without being counted at all.
    if known.counts and version == known.version + 1:
        known.version, known.counts = version, False
    return version == known.version


def _covers_storage(t: torch.Tensor) -> bool:
    # An expanded tensor may have more elements than its storage; it writes all of it too.
    return t.numel() * t.itemsize >= t.untyped_storage().nbytes()


def _place(t: torch.Tensor, form: int) -> int:
    """One number for both: a tuple for each tensor would have the garbage collector run more often."""
    return (int(t.storage_offset()) << _FORM_BITS) + form
