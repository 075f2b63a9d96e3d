"""The newest calls of a run in memory, as a packed array: adding to it takes a tenth of the time of an SQLite insert.

Queries do not see packed calls: `DataFile` moves them into the database before a query. Most calls are never queried,
and are folded into sums straight from here.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from shadowrun.store.groups import Group

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy.typing as npt

    Calls = npt.NDArray[np.float64]

__all__ = ["PackedRows", "plain_among", "sums_of"]

_WIDTH = 8
_SEQ, _STEP, _CONTEXT, _VERDICT, _REF_US, _TARGET_US, _DRIFT_ABS, _DRIFT_REL = range(_WIDTH)


class PackedRows:
    """Rows of calls, oldest first; 64 bytes each."""

    def __init__(self) -> None:
        self._numbers = array("d")  # whole numbers are exact up to 2^53

    def __len__(self) -> int:
        return len(self._numbers) // _WIDTH

    def add(self, rows: bytes) -> None:
        """Add rows, as `Rows.head` gives them."""
        self._numbers.frombytes(rows)

    def take(self, n: int) -> Calls:
        """Remove and return the `n` oldest rows: (n, 8)."""
        # The slice is a copy: an array over the buffer itself would forbid the `del` below (BufferError).
        oldest = np.array(self._numbers[: n * _WIDTH]).reshape(-1, _WIDTH)
        del self._numbers[: n * _WIDTH]
        return oldest

    def verdicts(self) -> list[float]:
        """Numbers of all verdicts in the rows, each once."""
        found: list[float] = np.unique(np.array(self._numbers[_VERDICT::_WIDTH])).tolist()
        return found


def sums_of(calls: Calls, outcomes: Mapping[int, int]) -> list[Group]:
    """Sums of calls that matched bit for bit, a group for each context and outcome.

    Args:
        calls: (n, 8), the columns of a row.
        outcomes: Verdict to outcome, for every verdict in `calls`.
    """
    # Sorted by key, each group is one slice, and `reduceat` sums all slices in one pass.
    order = np.lexsort((calls[:, _SEQ], calls[:, _VERDICT], calls[:, _CONTEXT]))
    calls = calls[order]
    keys = calls[:, (_CONTEXT, _VERDICT)]
    starts = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]).any(axis=1)]) if len(calls) else np.empty(0, np.intp)
    firsts = calls[starts][:, (_CONTEXT, _VERDICT, _SEQ, _STEP)].astype(np.int64).tolist()
    counts = np.diff(np.r_[starts, len(calls)]).tolist()
    times = [_times(calls[:, column], starts) for column in (_REF_US, _TARGET_US)] if len(calls) else [(), ()]
    groups = []
    for (context, verdict, seq, step), n, ref, target in zip(firsts, counts, *times, strict=True):
        (n_ref, ref_total, ref_min), (n_target, target_total, target_min) = ref, target
        groups.append(Group(
            context, outcomes[verdict], (0,), n, seq, step, n_ref, ref_total, ref_min, n_target, target_total,
            target_min, 0.0, 0.0, 0, -1, 0, 0, 0, -1.0, seq, -1.0, -1.0,
        ))  # fmt: skip
    return groups


def plain_among(calls: Calls, outcomes: Mapping[int, int], different: Collection[int]) -> npt.NDArray[np.bool_]:
    """Which calls matched bit for bit and have no accumulated error: (n,).

    Args:
        calls: (n, 8), the columns of a row.
        outcomes: Verdict to outcome, of the verdicts that stand for an exact match.
        different: Numbers of calls that have rows of ``diff`` although they match.
    """
    plain: npt.NDArray[np.bool_] = (calls[:, (_DRIFT_ABS, _DRIFT_REL)] == -1).all(axis=1)
    plain &= np.isin(calls[:, _VERDICT], list(outcomes))
    if different:
        plain &= ~np.isin(calls[:, _SEQ], list(different))
    return plain


def _times(us: npt.NDArray[np.float64], starts: npt.NDArray[np.intp]) -> list[tuple[int, float, float]]:
    """Number of measured times of each group, their sum and their minimum."""
    measured = us >= 0  # -1: not measured
    n = np.add.reduceat(measured, starts, dtype=np.int64)
    total = np.add.reduceat(np.where(measured, us, 0.0), starts)
    least = np.minimum.reduceat(np.where(measured, us, np.inf), starts)
    return list(zip(n.tolist(), total.tolist(), np.where(n > 0, least, -1.0).tolist(), strict=True))
