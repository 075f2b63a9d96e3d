"""Keeps the results of each step's last call in a recording: there, two machines are compared in every element.

No tensor is held for it, which would change when the program's memory is freed. At the end of a step the results of its
last call are looked up among the tensors that are alive; if none of them is, those of the last call whose first result
is. Results of less than 64 elements need no place of their own: all their elements are samples. After a step of which
nothing could be kept, one step is not looked at, then two, four, and so on until one has something.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.torchapi import hidden_from_program, live_storage
from shadowrun.recording.digests.number_formats import NUMBER_FORMATS
from shadowrun.recording.digests.pending_digests import is_capturing
from shadowrun.recording.digests.tensor_digest import pack
from shadowrun.recording.model import N_SAMPLES, NONE, OUTPUTS_BYTES, Kind, output_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shadowrun.recording.data_flow import DataFlow
    from shadowrun.recording.file_format.block_buffer import BlockBuffer, LastRow

__all__ = ["StepOutputs", "content_of"]

_STEP_BYTES: Final = OUTPUTS_BYTES // 4
# A step counts as so many bytes at least: to find a tensor takes some 0.1 ms, and there may be a million steps.
_LEAST: Final = OUTPUTS_BYTES // 256
_MAX_FAILURES: Final = 3
_AT_ONCE: Final = (4, 16, 64)
_MADE: Final = (Kind.RESULT, Kind.WRITTEN)


class StepOutputs:
    """Keeps results. Not safe to use from several threads at once.

    Args:
        budget: Bytes in all; with 0, none are kept.

    Attributes:
        wanted: Whether there is room for more.
        n_steps: Steps of which results are kept.
        n_bytes: What they take.
    """

    def __init__(self, budget: int) -> None:
        self.wanted = budget > 0
        self.n_steps = self.n_bytes = 0
        self._left = budget
        self._n_failures = 0
        # Steps whose end is not looked at, after one that had nothing: twice as many each time.
        self._n_resting, self._rest = 0, 1
        self._known: set[str] = set()

    def end_step(self, buffer: BlockBuffer, flow: DataFlow) -> None:
        """Keep what the last call of a step made, as far as it is there; raises no `Exception`."""
        if self._n_resting:
            self._n_resting -= 1
            return
        try:
            last = buffer.last_call()
            if all(_is_sampled_whole(row) for row in last):
                return
            n_bytes = hidden_from_program(self._keep, buffer, flow, last)
        except Exception:  # an unknown kind of tensor: the recording continues without it
            self._n_failures += 1
            self.wanted = self._n_failures < _MAX_FAILURES
            return
        if n_bytes:
            self.n_steps += 1
            self.n_bytes += n_bytes
            self._left -= max(n_bytes, _LEAST)
            self.wanted = self._left > 0
            self._rest = 1
        else:  # a step like the others: to look for tensors in vain may take longer than the step
            self._n_resting, self._rest = self._rest, 2 * self._rest

    def _keep(self, buffer: BlockBuffer, flow: DataFlow, last: list[LastRow]) -> int:
        places = flow.places({row.number for row in last if row.kind != Kind.LEAF})
        views = {row.number for row in last if row.kind == Kind.VIEW} & places.keys()
        # Of a view, what it is a view of has the values.
        places |= flow.places({flow.base(places[row][0]) for row in views} - {NONE})
        places = {row: place for row, place in places.items() if row not in views}
        if any(live_storage(key) is not None for key, _, _ in places.values()):
            return self._write(buffer, places)
        return self._keep_former(buffer, flow)

    def _keep_former(self, buffer: BlockBuffer, flow: DataFlow) -> int:
        """Keep what the last call made whose first result was not freed."""
        calls = ([row for row in rows if row.kind in _MADE and row.n_rungs] for rows in buffer.waiting_calls())
        # Some at a time: mostly one of the last few is there, and each look goes over all storages.
        sizes = itertools.chain(_AT_ONCE, itertools.repeat(_AT_ONCE[-1]))
        while some := list(itertools.islice(calls, next(sizes))):
            places = flow.places({rows[0].number for rows in some if rows})
            for rows in some:
                if rows and rows[0].number in places and live_storage(places[rows[0].number][0]) is not None:
                    return self._write(buffer, flow.places({row.number for row in rows if row.n_samples >= N_SAMPLES}))
        return 0

    def _write(self, buffer: BlockBuffer, places: Mapping[int, tuple[int, int, int]]) -> int:
        n_bytes, kept = 0, {}
        for row in sorted(places):
            key, offset, form = places[row]
            storage, found = live_storage(key), buffer.form_key(form)
            if storage is None or found is None:
                continue
            t = _tensor(storage, offset, *found)
            known = t.dtype in NUMBER_FORMATS or t.is_complex()
            if known and 0 < t.nbytes <= min(_STEP_BYTES - n_bytes, self._left) and not (t.is_cuda and is_capturing()):
                kept[row] = t
                n_bytes += t.numel() * t.itemsize
        n_bytes = 0
        for row, t in zip(kept, _on_host(list(kept.values())), strict=True):
            packed = pack(t)
            if packed is None:
                continue
            name = output_name(int.from_bytes(packed[1][:8], "little"), t.numel() * t.itemsize)
            # By content: a loss or a mask that stays the same is in the file once.
            if name not in self._known:
                self._known.add(name)
                buffer.writer.content(name, str(t.dtype).removeprefix("torch."), t.shape, content_of(t))
            buffer.writer.output(row, name)
            n_bytes += t.numel() * t.itemsize
        return n_bytes


def _on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors with their values on the CPU; those of an accelerator are fetched with one host sync."""
    there = [t for t in tensors if not t.is_cpu]
    if not there:
        return tensors
    raw = [_ints(t).view(-1).view(torch.uint8) for t in there]
    fetched = torch.cat([t.to(raw[0].device) for t in raw]).cpu()
    pieces = iter(torch.split(fetched, [len(t) for t in raw]))
    # A copy of each: a piece may begin where no number of its dtype can.
    return [t if t.is_cpu else next(pieces).clone().view(t.dtype).view(t.shape) for t in tensors]


def _ints(t: torch.Tensor) -> torch.Tensor:
    """The bits of a strided tensor, contiguous; any bit pattern is copied as it is."""
    t = t.detach().resolve_conj().resolve_neg()
    real = torch.view_as_real(t) if t.is_complex() else t
    return real.view(NUMBER_FORMATS[real.dtype].ints).contiguous()


def _is_sampled_whole(row: LastRow) -> bool:
    if row.kind == Kind.VIEW:
        return False
    return row.kind == Kind.LEAF or not row.n_rungs or row.n_samples < N_SAMPLES


def _tensor(storage: Any, offset: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


def content_of(t: torch.Tensor) -> bytes:
    """The elements of a strided tensor, in the order of the contiguous one."""
    there = _ints(t).cpu()
    return ctypes.string_at(there.data_ptr(), there.numel() * there.itemsize)
