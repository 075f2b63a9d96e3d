"""Copies of a device's tensors on the host, made asynchronously in the order of the device's stream.

What one call returned is mostly what the next one takes. So a copy of some size is kept as long as it is the content
of its storage: the version is the same, no call that we saw has written there, and the device's own sum over the
memory is what it was when the copy was made. That sum detects kernels that no dispatcher sees (Triton's,
those of an extension): it is read with the copies, and a call whose copy turns out to be stale is not judged. Small
tensors are copied each time: that costs less than the sum.

What lies on the CPU already is copied at once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torchapi
from shadowrun.replay.copies import OverBudget, move, storage_groups, tensors_in
from shadowrun.strided import span
from shadowrun.torch_private import is_zero_tensor, negated_view, version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.platforms.streams import AsyncCopies, Event
    from shadowrun.replay.copies import Arguments

__all__ = ["Copies", "NotCopyable", "Snapshot", "Snapshots", "StaleCopy"]

# Below this, a new copy costs less than the checksum that a shared one needs.
_SHARED_FROM_BYTES = 1 << 20
# Freed storages would hold their page-locked copies until the memory bound is reached.
_LOOK_FOR_DEAD = 64
_CPU = torch.device("cpu")
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class NotCopyable(Exception):  # noqa: N818 - a reason, caught inside
    """A tensor that is no plain piece of memory: sparse, nested, quantized, a subclass."""


class StaleCopy(Exception):  # noqa: N818 - a reason, caught inside
    """A copy that was kept is not what the device had when the call began."""


class _ByteBudget:
    """Bytes that copies hold; snapshots are freed on any thread."""

    def __init__(self) -> None:
        self.held = 0
        # A snapshot is freed by whichever thread drops it last, also inside the garbage collector.
        self._lock = threading.Lock()

    def add(self, n_bytes: int) -> None:
        with self._lock:
            self.held += n_bytes


class Snapshot:
    """The copy of a piece of a storage.

    Attributes:
        host: Its elements, one after another.
        offset: Where it begins in the storage, in elements.
        mark: When it is there; None until the call that made it is over.
        digest: The device's sum over it, on the host; None for one that is not kept.
    """

    __slots__ = ("_budget", "_n_bytes", "digest", "host", "mark", "offset")

    def __init__(self, host: torch.Tensor, offset: int, budget: _ByteBudget) -> None:
        self.host = host
        self.offset = offset
        self.mark: Event | None = None
        self.digest: torch.Tensor | None = None
        self._budget, self._n_bytes = budget, host.nbytes
        budget.add(self._n_bytes)

    def __del__(self) -> None:
        self._budget.add(-self._n_bytes)

    def copy_of(self, t: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that lies in this piece."""
        # Layout for layout: a compacted copy would send the reference's kernel down another path.
        laid = self.host.as_strided(t.shape, t.stride(), t.storage_offset() - self.offset)
        if t.is_conj():
            laid = laid.conj()
        return negated_view(laid) if t.is_neg() else laid


@dataclass(slots=True)
class _Kept:
    """A copy that still is the content of its storage, as far as we know.

    Attributes:
        storage: Knows whether the storage was freed.
        versions: That its tensors may have by now.
        snapshot: The copy.
    """

    storage: torchapi.StorageWatch
    versions: tuple[int, ...]
    snapshot: Snapshot


@dataclass(slots=True)
class Copies:
    """The copies of one call.

    Attributes:
        snapshots: All of them, shared ones included.
        sums: For those that were there before: the device's sum at this call.
        devices: Where copies were ordered since the last mark.
        marks: When they are there.
        ran: Whether the call has run.
    """

    snapshots: list[Snapshot] = field(default_factory=list)
    sums: list[tuple[Snapshot, torch.Tensor]] = field(default_factory=list)
    devices: dict[torch.device, list[Snapshot]] = field(default_factory=dict)
    marks: list[Event] = field(default_factory=list)
    ran: bool = False
    _memo: dict[int, torch.Tensor] = field(default_factory=dict)

    def wait(self) -> None:
        """Wait until all are there.

        Raises:
            StaleCopy: One that was kept is not what the device had.
        """
        for snapshot in self.snapshots:
            if snapshot.mark is not None:
                snapshot.mark.synchronize()
        for mark in self.marks:
            mark.synchronize()
        for snapshot, now in self.sums:
            # Both sums are the device's: its sum may be wrong, but it is wrong in the same way.
            if snapshot.digest is None or not bool(torch.equal(snapshot.digest, now)):
                # An unseen write would make a false mismatch: such a call is unverified.
                raise StaleCopy


class Snapshots:
    """Makes copies, and keeps the last ones.

    Args:
        transfers: How to copy.
        max_bytes: What all copies may take together.
        make_room: Waits until some copies are used; False where there are none.

    Attributes:
        shares: Whether a copy may serve more than one call.
    """

    def __init__(self, transfers: AsyncCopies, max_bytes: int, make_room: Callable[[], bool]) -> None:
        self._transfers = transfers
        self._max_bytes = max_bytes
        self._make_room = make_room
        self._budget = _ByteBudget()
        # By storage: views of one storage share its copy. The order is that of use.
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._n_calls = 0
        self.shares = True

    def arguments(
        self, copies: Copies, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor]
    ) -> Arguments:
        """Copies of a call's inputs, to be used once `Copies.wait` has returned; a ``device`` keyword follows.

        Args:
            copies: Of this call.
            args: Positional arguments.
            kwargs: Arguments by name.
            written: The tensors that the call writes to: copies of what shares their memory share it too.

        Raises:
            NotCopyable: One is no plain piece of memory.
            OverBudget: They exceed the budget.
        """
        for t in tensors_in((*args, *kwargs.values())):
            _check(t)
        # A write to one tensor of a group must show in the copies of the others.
        for group in storage_groups(written, args, kwargs) if written else ():
            self._together(copies, group)
        moved = {k: self.value(copies, v) for k, v in kwargs.items()}
        if moved.get("device") is not None:
            moved["device"] = _CPU
        if moved.get("pin_memory"):
            moved["pin_memory"] = False
        return tuple([self.value(copies, a) for a in args]), moved

    def value(self, copies: Copies, value: Any) -> Any:
        """Copies of all tensors in a value; anything else stays as it is."""
        if isinstance(value, torch.Tensor):
            # One tensor in two arguments stays one: the operator may behave differently for aliases.
            known = copies._memo.get(id(value))
            if known is None:
                _check(value)
                known = copies._memo[id(value)] = self._tensor(copies, value)
            return known
        if isinstance(value, (list, tuple)):
            return [self.value(copies, v) for v in value]
        return value

    def copy_again(self, copies: Copies, value: Any) -> Any:
        """The same after the call: what it wrote to is copied anew."""
        for t in tensors_in((value,)):
            copies._memo.pop(id(t), None)
            self.forget(t)
        return self.value(copies, value)

    def mark_ordered(self, copies: Copies) -> None:
        """All copies of a call that were needed so far have been ordered."""
        for device, snapshots in copies.devices.items():
            # One event for all copies of a call: an event for each would cost the calling thread more.
            mark = self._transfers.record_event(device)
            copies.marks.append(mark)
            for snapshot in snapshots:
                snapshot.mark = mark
        copies.devices.clear()
        self._n_calls += 1
        if not self._n_calls % _LOOK_FOR_DEAD:
            for key in [key for key, kept in self._kept.items() if kept.storage.freed]:
                del self._kept[key]
        copies._memo.clear()  # it knows tensors by their id, which is another's soon

    def forget(self, t: torch.Tensor) -> None:
        """Keep no copy of this tensor's storage: it is written to."""
        # A sparse tensor has no storage to ask for.
        if self._kept and t.layout is torch.strided and t.device.type != "cpu":
            self._kept.pop(torchapi.storage_key(t), None)

    def forget_all(self) -> None:
        """Keep no copies: any of the tensors may be written to."""
        self._kept.clear()

    def _tensor(self, copies: Copies, t: torch.Tensor) -> torch.Tensor:
        if t.device.type == "cpu":
            return move(t, _CPU)
        if t.numel() == 0:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=_CPU)
        # This short way is for the many small tensors of a step.
        if t.is_contiguous() and t.nbytes < _SHARED_FROM_BYTES and not (t.is_conj() or t.is_neg()):
            return self._small(copies, t)
        begin, end = _range(t)
        return self._piece(copies, t, begin, end - begin).copy_of(t)

    def _small(self, copies: Copies, t: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor that is one piece, and serves one call only: most are."""
        self._reserve(t.nbytes)
        host = self._transfers.host(t.shape, t.dtype)
        self._transfers.copy(host, t)
        snapshot = Snapshot(host, 0, self._budget)
        copies.snapshots.append(snapshot)
        copies.devices.setdefault(t.device, []).append(snapshot)
        return host

    def _together(self, copies: Copies, group: list[torch.Tensor]) -> None:
        """Lay the copies of tensors that share memory over one copy of it."""
        first = group[0]
        # One dtype for the group, since the piece is addressed in elements.
        if first.device.type == "cpu" or any(t.dtype is not first.dtype or t.numel() == 0 for t in group):
            raise NotCopyable
        begin, end = min(_range(t)[0] for t in group), max(_range(t)[1] for t in group)
        piece = self._piece(copies, first, begin, end - begin)
        for t in group:
            copies._memo[id(t)] = piece.copy_of(t)

    def _piece(self, copies: Copies, t: torch.Tensor, begin: int, span: int) -> Snapshot:
        # The memory is copied as it lies: resolving the conjugation would be a kernel of the device under test.
        plain = t.conj() if t.is_conj() else t
        plain = negated_view(plain) if plain.is_neg() else plain
        flat = plain.as_strided((span,), (1,), begin)
        large = self.shares and flat.nbytes >= _SHARED_FROM_BYTES
        if large:
            found = self._find(t, begin, span)
            if found is not None:
                whole = plain.as_strided((found.host.numel(),), (1,), found.offset)
                # The sum is enqueued at this call, so it covers the memory as this call finds it.
                copies.sums.append((found, self._sum(copies, whole)))
                copies.snapshots.append(found)
                return found
        self._reserve(flat.nbytes)
        snapshot = Snapshot(self._transfers.host(span, t.dtype), begin, self._budget)
        self._transfers.copy(snapshot.host, flat)
        copies.snapshots.append(snapshot)
        copies.devices.setdefault(t.device, []).append(snapshot)
        if large:
            snapshot.digest = self._sum(copies, flat)
            version = _version(t)
            # Torch counts a call's own write once the call is over for us.
            versions = (version, version + 1) if copies.ran else (version,)
            self._kept[torchapi.storage_key(t)] = _Kept(torchapi.StorageWatch(t), versions, snapshot)
        return snapshot

    def _find(self, t: torch.Tensor, begin: int, span: int) -> Snapshot | None:
        key = torchapi.storage_key(t)
        kept = self._kept.get(key)
        if kept is None:
            return None
        snapshot = kept.snapshot
        # A freed storage's address may belong to another tensor by now.
        if kept.storage.freed or _version(t) not in kept.versions:
            del self._kept[key]
            return None
        fits = snapshot.offset <= begin and begin + span <= snapshot.offset + snapshot.host.numel()
        # A view of another dtype could be laid over it, but offsets count elements.
        if snapshot.host.dtype is not t.dtype or not fits:
            return None
        self._kept.move_to_end(key)
        return snapshot

    def _sum(self, copies: Copies, flat: torch.Tensor) -> torch.Tensor:
        """The device's sum over a piece of memory, on its way to the host."""
        # As integers: a float sum rounds, and NaN would hide every change.
        words = _words(flat)
        host = self._transfers.host(1, torch.int64)
        self._transfers.copy(host, words.sum(dtype=torch.int64).reshape(1))
        copies.devices.setdefault(flat.device, [])
        return host

    def _reserve(self, n_bytes: int) -> None:
        budget, max_bytes = self._budget, self._max_bytes
        while budget.held + n_bytes > max_bytes:
            # Kept copies are a saving and go first; pending jobs need theirs.
            if self._kept:
                self._kept.popitem(last=False)
            elif not self._make_room():
                if budget.held + n_bytes > max_bytes:
                    raise OverBudget
                return


def _range(t: torch.Tensor) -> tuple[int, int]:
    """The piece of its storage that a tensor covers, in elements."""
    begin = int(t.storage_offset())
    return begin, begin + span(t.shape, t.stride())


def _words(flat: torch.Tensor) -> torch.Tensor:
    """Memory as integers, the widest that fit."""
    size = flat.element_size()
    if flat.dtype is torch.int32 or (size >= 4 and not size % 4):
        return flat.view(torch.int32)
    if (flat.storage_offset() * size) % 4 == 0 and flat.nbytes % 4 == 0:
        return flat.view(torch.int32)
    return flat.view(torch.uint8)


def _check(t: torch.Tensor) -> None:
    if type(t) not in _PLAIN or t.layout is not torch.strided or t.is_nested or t.is_quantized or is_zero_tensor(t):
        raise NotCopyable


def _version(t: torch.Tensor) -> int:
    # Inference tensors have no version counter, so only the checksum guards them.
    return -1 if t.is_inference() else version_of(t)
