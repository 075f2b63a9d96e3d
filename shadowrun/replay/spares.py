"""Memory for copies of the small tensors that calls write to, used again and again.

An allocation by torch takes a microsecond, as long as many of the operators themselves; moving a few bytes takes a
third of that. What is kept is ours alone, and no more than `_MOST` bytes. Larger tensors get memory of their own each
time: beside moving them, allocating takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shadowrun.intercept.torchapi import unheard

__all__ = ["Spare", "Spares"]

Form = tuple[torch.dtype, torch.Size] | tuple[torch.dtype, torch.Size, int]

_CPU = torch.device("cpu")
_MOST_EACH = 256 << 10
_MOST = 4 << 20
_MOST_FORMS = 1000
# Their bytes are not all that there is to them, or equal bits are not what is asked.
_NOT_PLAIN = frozenset(
    {
        *(torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4),
        *(torch.complex32, torch.complex64, torch.complex128),
    }
)


@dataclass(slots=True, eq=False)
class Spare:
    """Two contiguous tensors of one form.

    Attributes:
        before: For the values before the call.
        before_at: Their address.
        work: For the replay to write to.
        work_at: Its address.
        n_bytes: Of each.
        form: What it is kept by.
    """

    before: torch.Tensor
    before_at: int
    work: torch.Tensor
    work_at: int
    n_bytes: int
    form: Form


class Spares:
    """Spares by dtype and shape; a call that writes to several tensors has numbers for those after the first.

    Args:
        max_bytes: Bound of the copies of one call.

    Attributes:
        by_form: Those that there are.
    """

    def __init__(self, max_bytes: int) -> None:
        self.by_form: dict[Form, Spare] = {}
        self._max_bytes = max_bytes
        self._held = 0

    def make(self, t: torch.Tensor, number: int = 0) -> Spare | None:
        """A spare for a tensor on the CPU, a small one kept for the next; None where it is too large or not plain."""
        form: Form = (t.dtype, t.shape, number) if number else (t.dtype, t.shape)
        n_bytes = t.nbytes
        if not 0 < n_bytes <= self._max_bytes or t.dtype in _NOT_PLAIN:
            return None
        if n_bytes > _MOST_EACH:
            return unheard(_make, (), (t, form))  # type: ignore[no-any-return]
        if self._held + 2 * n_bytes > _MOST or len(self.by_form) >= _MOST_FORMS:
            self.clear()
        spare: Spare = unheard(_make, (), (t, form))
        self.by_form[form] = spare
        self._held += 2 * n_bytes
        return spare

    def drop(self, spare: Spare) -> None:
        """Give a spare away: the next call of its form gets another."""
        if self.by_form.get(spare.form) is spare:
            del self.by_form[spare.form]
            self._held -= 2 * spare.n_bytes

    def clear(self) -> None:
        """Let go of all."""
        self.by_form.clear()
        self._held = 0


def _make(t: torch.Tensor, form: Form) -> Spare:
    before, work = _two_like(t)
    return Spare(before, before.data_ptr(), work, work.data_ptr(), t.nbytes, form)


def _two_like(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_inference_mode_enabled():  # a tensor made outside of it may be written to in either mode
        with torch.inference_mode(False):
            return _two_like(t)
    shape, dtype = t.shape, t.dtype
    return torch.empty(shape, dtype=dtype, device=_CPU), torch.empty(shape, dtype=dtype, device=_CPU)
