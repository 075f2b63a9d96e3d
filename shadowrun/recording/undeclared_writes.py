"""Writes that an operator's schema does not declare: what a call does to the memory of its arguments, and next to it.

Values of results do not show them, and torch does not count them: what reads the memory later would differ without a
cause. So the memory of a call's arguments is digested before and after the call, but for elements that the call may
write to, and `GUARD_BYTES` on either side with it. `Schedule` decides for which calls.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from shadowrun.intercept.plan import Action
from shadowrun.intercept.torchapi import StorageWatch, hidden_from_program, storage_key
from shadowrun.native import core
from shadowrun.native import tensors as native
from shadowrun.recording.digests.tensor_digest import digest_when_settled, pack
from shadowrun.recording.recorder import context_key
from shadowrun.replay.copies import tensors_in, written_to
from shadowrun.replay.memory_effects import GUARD_BYTES, bytes_of, is_plain, is_power
from shadowrun.strided import span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shadowrun.intercept.attribution import Origin
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.recording.digests.pending_digests import PendingDigest, PendingDigests
    from shadowrun.recording.digests.tensor_digest import Packed

__all__ = ["Overwritten", "Schedule", "UndeclaredWrites", "WatchSchedule", "Watched", "make_schedule", "may_watch"]

# Of one call: its other arguments are not watched.
_MAX_BYTES: Final = 64 << 20
_MAX_TENSORS: Final = 256
# Each watch keeps what is left of its storage; see `data_flow`.
_PURGE_AT: Final = 1024
_PLACE = tuple[int, tuple[int, ...], tuple[int, ...], int]


class Watched(NamedTuple):
    """Part of a storage that a call must leave as it is.

    Attributes:
        argument: Which of the call's tensors lies there or next to it.
        storage: Address and size of the storage.
        begin, end: In bytes from its start.
        written: Elements inside that the call may write to: offset, sizes and strides of tensors, in bytes, and the
            bytes of an element.
        before: All other bytes, before the call: their digest, or a copy on an accelerator.
    """

    argument: int
    storage: tuple[int, int]
    begin: int
    end: int
    written: tuple[_PLACE, ...]
    before: bytes | torch.Tensor


class Overwritten(NamedTuple):
    """What an undeclared write has left.

    Attributes:
        argument: Which of the call's tensors lies there or next to it.
        tensor: That tensor.
        memory: Tensor of what was written to: the argument itself where it is all that was watched, else bytes.
        digest: Of `memory`.
    """

    argument: int
    tensor: torch.Tensor
    memory: torch.Tensor
    digest: Packed | PendingDigest | None


class UndeclaredWrites:
    """Watches the memory of arguments in some calls. Not safe to use from several threads at once.

    Args:
        waiting: Has the digests of memory of accelerators.

    Attributes:
        schedule: Decides which calls; it outlasts a recording that is stopped and started again.
    """

    def __init__(self, waiting: PendingDigests) -> None:
        self._waiting = waiting
        self.schedule = make_schedule()
        self._n_running = self._n_begun = 0
        self._others: dict[int, StorageWatch] = {}

    # -- calls ---------------------------------------------------------------------------------------

    def begin_call(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], *, alone: bool = True
    ) -> tuple[int, list[Watched]]:
        """A call begins; each ends by one `end_call`.

        Args:
            plan: Its operator.
            args: Its arguments.
            kwargs: Likewise.
            alone: No call runs that does not come here.

        Returns:
            What `found` wants.
        """
        watched: list[Watched] = []
        # Not while another thread makes a call, which may write to the same memory with every right.
        if may_watch(plan) and self._is_due(plan, args, kwargs) and alone and not self._n_running:
            # No memory for copies, say: what is not watched counts as unchanged.
            with suppress(RuntimeError, NotImplementedError, TypeError):
                watched += self._watched(plan, args, kwargs)
        self._n_running += 1
        self._n_begun += 1
        return self._n_begun, watched

    def _is_due(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        try:
            return bool(self.schedule.is_due(plan.index, args, kwargs))
        except RuntimeError:  # a nested tensor has no sizes
            return False

    def end_call(self) -> None:
        """A call has ended, by itself or with an exception."""
        self._n_running -= 1

    def writes_of(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], watched: tuple[int, list[Watched]]
    ) -> list[Overwritten]:
        """What a call that has ended wrote and does not declare."""
        number, parts = watched
        if not parts or number != self._n_begun:  # another call has begun since
            return []
        tensors, left, found = list(_tensors(args, kwargs)), [], []
        for part in parts:
            t = tensors[part.argument]
            storage = t.untyped_storage()
            if (storage.data_ptr(), storage.nbytes()) == part.storage:  # else it was resized or exchanged
                left.append((part, t))
        for (part, t), changed in zip(left, hidden_from_program(_changed, left), strict=True):
            if changed:
                is_all = not part.written and bytes_of(t) == (part.begin, part.end) and t.is_contiguous()
                memory = t if is_all else _memory(t, part.begin, part.end)
                found.append(Overwritten(part.argument, t, memory, digest_when_settled(memory, 0, self._waiting)))
        if found:
            self.schedule.watch_always(plan.index)
        return found

    def leave_out(self, t: torch.Tensor) -> None:
        """Do not watch the memory of a tensor: a collective may write to it at any time."""
        self._others[storage_key(t)] = StorageWatch(t)
        if len(self._others) >= _PURGE_AT:
            self._others = {key: watch for key, watch in self._others.items() if not watch.freed}

    # -- what of a call ------------------------------------------------------------------------------

    def _watched(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Watched]:
        may_write = {id(t) for t in written_to(plan, args, kwargs)}
        by_storage: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for argument, t in enumerate(_tensors(args, kwargs)):
            if argument < _MAX_TENSORS and is_plain(t) and t.numel() and not _is_written_elsewhere(t):
                by_storage.setdefault(storage_key(t), []).append((argument, t))
        left = _MAX_BYTES
        for key, tensors in by_storage.items():
            watch = self._others.get(key)
            if watch is not None and not watch.freed:
                continue
            t = tensors[0][1]
            storage = t.untyped_storage()
            written = [_place(t) for _, t in tensors if id(t) in may_write]
            for begin, end, argument, inside in _parts(tensors, written, storage.nbytes()):
                left -= end - begin
                if left < 0:
                    return
                before = hidden_from_program(_state, t, begin, end, inside)
                yield Watched(argument, (storage.data_ptr(), storage.nbytes()), begin, end, inside, before)


def may_watch(plan: OpPlan) -> bool:
    """Whether calls of an operator may be watched: it computes values."""
    return plan.action is Action.REPLAY or plan.action is Action.RANDOM


def _parts(
    tensors: Sequence[tuple[int, torch.Tensor]], written: Sequence[_PLACE], n_bytes: int
) -> Iterator[tuple[int, int, int, tuple[_PLACE, ...]]]:
    """What to watch of a storage: begin, end, the argument there, and elements inside that may be written to."""
    merged: list[tuple[int, int, int]] = []
    for (first, last), argument in sorted((bytes_of(t), argument) for argument, t in tensors):
        begin, end = max(0, first - GUARD_BYTES), min(n_bytes, last + GUARD_BYTES)
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1]), merged[-1][2]
        else:
            merged.append((begin, end, argument))
    for begin, end, argument in merged:
        inside = sorted(place for place in written if begin <= place[0] < end)
        if all(_is_dense(place) for place in inside):
            # Without them: the memory of an optimizer's parameters need not be read.
            at = begin
            for place in inside:
                if at < place[0]:
                    yield at, place[0], argument, ()
                at = max(at, place[0] + _extent(place))
            if at < end:
                yield at, end, argument, ()
        else:
            yield begin, end, argument, tuple(inside)


def _state(t: torch.Tensor, begin: int, end: int, written: Sequence[_PLACE]) -> bytes | torch.Tensor:
    """The bytes of a tensor's storage but for elements that may be written to: digest, or a copy on an accelerator."""
    memory = _memory(t, begin, end)
    if not memory.is_cpu and not written:
        # No digest: that would be many more launches.
        return memory.clone()
    if written:
        # On the host: torch writes to no tensor whose elements overlap.
        host = np.array(memory.cpu().numpy())
        for offset, shape, strides, size in written:
            elements = np.lib.stride_tricks.as_strided(host[offset - begin :], (*shape, size), (*strides, 1))
            # What the call writes here must make no difference.
            elements[...] = 0
        memory = torch.from_numpy(host)
    packed = pack(memory)
    return b"" if packed is None else packed[1]


def _changed(parts: Sequence[tuple[Watched, torch.Tensor]]) -> list[bool]:
    """Whether parts of storages are not as they were; for all that lie on an accelerator, with one host sync."""
    on_device, found = [], []
    for part, t in parts:
        if isinstance(part.before, torch.Tensor):
            on_device.append((part.before != _memory(t, part.begin, part.end)).any())
            found.append(False)
        else:
            found.append(_state(t, part.begin, part.end, part.written) != part.before)
    flags = iter(torch.stack(on_device).tolist() if on_device else ())
    return [next(flags) if isinstance(p.before, torch.Tensor) else f for (p, _), f in zip(parts, found, strict=True)]


def _memory(t: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Bytes of a tensor's storage, as a view."""
    raw = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())
    return raw[begin:end]


def _place(t: torch.Tensor) -> _PLACE:
    size = t.element_size()
    return bytes_of(t)[0], tuple(t.shape), tuple(stride * size for stride in t.stride()), size


def _extent(place: _PLACE) -> int:
    _, shape, strides, size = place
    n_bytes = span(shape, strides)  # of strides in bytes: up to the first byte of the last element
    return n_bytes - 1 + size if n_bytes else 0


def _is_dense(place: _PLACE) -> bool:
    """Whether its elements leave no byte out, from the first to the last."""
    _, shape, strides, size = place
    for stride, n in sorted((stride, n) for stride, n in zip(strides, shape, strict=True) if n > 1):
        if stride > size:
            return False
        size = max(size, stride * n)
    return True


def _is_written_elsewhere(t: torch.Tensor) -> bool:
    """Whether another process, or a copy that an accelerator has not ended, may write to a tensor's memory."""
    if not t.is_cpu:
        return False
    return bool(t.is_shared()) or (bool(torch.cuda.is_initialized()) and t.is_pinned())  # type: ignore[no-untyped-call]


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    return tensors_in((*args, *kwargs.values()))


# -- which calls -----------------------------------------------------------------------------------

FIRST: Final = 2
"""Calls of one signature that are watched; later, those whose number is a power of `RARER`."""
RARER: Final = 8
FREE: Final = 64
"""Calls of an operator that may be watched at once; later, at most one in `SHARE` of its calls.

A program whose shapes change makes new signatures for ever.
"""
SHARE: Final = 64
# Beyond it all are forgotten, and watched from their first call on again: more work, and nothing is missed.
_MAX_SIGNATURES: Final = 50_000
_ANYWHERE: Final[Origin] = ("", "", "")  # type: ignore[assignment]
_CPU: Final = torch.device("cpu")


class Schedule(Protocol):
    """Which calls have the memory of their arguments watched. Not safe to use from several threads at once.

    The first calls of each signature (operator, shapes, dtypes, small numbers) are watched, and later ones ever more
    seldom; an operator that made an undeclared write is watched in each call. Only counts decide, so that two
    recordings of one program watch the same calls.
    """

    def is_due(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> bool:
        """Count a call of the operator with number `index`, and decide whether it is watched."""

    def watch_always(self, index: int, /) -> None:
        """An operator has made an undeclared write."""

    def is_always(self, index: int, /) -> bool:
        """Whether it has."""


class _Counts:
    """Calls of one operator."""

    __slots__ = ("always", "n_calls", "n_watched")

    def __init__(self) -> None:
        self.n_calls = self.n_watched = 0
        self.always = False


class WatchSchedule:
    """See `Schedule`. `native/record_rows.c` is the same in C.

    The fast path of a recording asks that one for each of its calls, and leaves those that are due to Python.
    """

    def __init__(self) -> None:
        self._operators: dict[int, _Counts] = {}
        self._signatures: dict[Any, int] = {}

    def is_due(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> bool:
        """See `Schedule`."""
        counts = self._of(index)
        counts.n_calls += 1
        try:
            key = context_key(index, _CPU, _ANYWHERE, args, kwargs)
        except RuntimeError:  # a nested tensor has no sizes
            return False
        n = self._signatures[key] = self._signatures.get(key, 0) + 1
        if len(self._signatures) > _MAX_SIGNATURES:
            self._signatures.clear()
        if counts.always:
            return True
        if (n > FIRST and not is_power(n, RARER)) or counts.n_watched >= FREE + counts.n_calls // SHARE:
            return False
        counts.n_watched += 1
        return True

    def watch_always(self, index: int, /) -> None:
        """See `Schedule`."""
        self._of(index).always = True

    def is_always(self, index: int, /) -> bool:
        """See `Schedule`."""
        return self._of(index).always

    def _of(self, index: int) -> _Counts:
        counts = self._operators.get(index)
        if counts is None:
            counts = self._operators[index] = _Counts()
        return counts


def make_schedule() -> Schedule:
    """A schedule in C where there is the extension."""
    if core is None or native.context_key is None:
        return WatchSchedule()
    return core.WatchSchedule(FIRST, RARER, FREE, SHARE)  # type: ignore[no-any-return]
