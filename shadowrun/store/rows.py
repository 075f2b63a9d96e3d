"""Calls that wait to be written, packed as they come: an object for each number takes longer than all else of a row."""

from __future__ import annotations

import itertools
import struct
from operator import index
from typing import TYPE_CHECKING

from shadowrun.native import core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Row = tuple[int, int, int, int, float, float, float, float]
    Numbers = tuple[float, float, float, float, float, float, float, float]

__all__ = ["MOST", "PythonRows", "Rows", "unpacked"]

_ROW = struct.Struct("8d")  # whole numbers are exact up to 2^53
_pack = _ROW.pack

MOST = 2**52
"""Greatest number that a row may begin from: as many more are exact."""


class PythonRows:
    """Rows of eight numbers (float64, 64 bytes) each; native/waiting.c has the same in C.

    Several threads may add at once: a row is there as a whole or not at all. One at a time may `drop`, and what `head`
    gave stays at the front until then.

    A row: (seq, step, context_id, verdict_id, ref_us, target_us, drift_abs, drift_rel); times in microseconds, -1 for
    what was not measured.

    Attributes:
        last_step: That of the row that `add` added last; -1 before the first.
        next_seq: Gives the next number of a call, each to one caller only.
    """

    __slots__ = ("_add", "_rows", "_step", "last_step", "next_seq")

    next_seq: Callable[[], int]

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        self._add = self._rows.append
        self.start(0, 0)

    def start(self, seq: int, step: int) -> None:
        """Say where the numbers of calls and of steps begin."""
        first, self.step = index(seq), step
        self.last_step = -1
        self.next_seq = itertools.count(first).__next__

    @property
    def step(self) -> int:
        """That of rows that are added from now on."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = index(step)

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        seq: int,
        context: int,
        verdict: int,
        ref_us: float,
        target_us: float,
        drift_abs: float = -1.0,
        drift_rel: float = -1.0,
        /,
    ) -> None:
        """Add a row of the current step.

        Raises:
            TypeError, OverflowError: Something is no number, or too large for a float.
        """
        step = self._step
        try:
            self._add(_pack(seq, step, context, verdict, ref_us, target_us, drift_abs, drift_rel))
        except struct.error as error:
            raise TypeError(f"rows hold numbers: {error}") from None
        self.last_step = step

    def append(self, row: Iterable[float], /) -> None:
        """Add a row of any step.

        Raises:
            TypeError, OverflowError: It has other than eight items, or one is no number or too large for a float.
        """
        try:
            self._add(_pack(*row))
        except struct.error as error:
            raise TypeError(f"a row has eight numbers: {error}") from None

    def head(self, n: int, /) -> bytes:
        """The `n` oldest rows, or all if there are fewer; see `unpacked`."""
        return b"".join(self._rows[: max(n, 0)])

    def drop(self, n: int, /) -> None:
        """Forget the `n` oldest rows, or all if there are fewer."""
        del self._rows[: max(n, 0)]

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()


if TYPE_CHECKING:
    Rows = PythonRows
else:
    Rows = PythonRows if core is None else core.Rows


def unpacked(rows: bytes) -> Iterator[Numbers]:
    """Rows as numbers, of what `Rows.head` gave."""
    return _ROW.iter_unpack(rows)
