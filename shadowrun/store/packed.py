"""The newest calls of a run in memory, packed: a list of numbers takes a tenth of the time of a database.

Nothing reads them there: who asks has them put into the database first. Most are never asked for, and leave as sums.
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

__all__ = ["Packed", "plain_among", "sums_of"]

_WIDTH = 8
_SEQ, _STEP, _CONTEXT, _VERDICT, _REF_US, _TARGET_US, _DRIFT_ABS, _DRIFT_REL = range(_WIDTH)


class Packed:
    """Rows of calls, in the order in which they came. Each takes 64 bytes."""

    def __init__(self) -> None:
        self._numbers = array("d")  # whole numbers are exact up to 2^53

    def __len__(self) -> int:
        return len(self._numbers) // _WIDTH

    def add(self, rows: bytes) -> None:
        """Add rows, as `Rows.head` gives them."""
        self._numbers.frombytes(rows)

    def take(self, n: int) -> Calls:
        """Take the oldest out: (n, 8), the columns those of a row."""
        oldest = np.array(self._numbers[: n * _WIDTH]).reshape(-1, _WIDTH)
        del self._numbers[: n * _WIDTH]
        return oldest

    def verdicts(self) -> list[float]:
        """Numbers of the verdicts that they have, each once."""
        found: list[float] = np.unique(np.array(self._numbers[_VERDICT::_WIDTH])).tolist()
        return found


def sums_of(calls: Calls, outcomes: Mapping[int, int]) -> list[Group]:
    """Sums of calls that matched bit for bit, a group for each context and outcome.

    Args:
        calls: (n, 8), the columns those of a row.
        outcomes: Verdict to outcome, of all their verdicts.
    """
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
        calls: (n, 8), the columns those of a row.
        outcomes: Verdict to outcome, of the verdicts that say so.
        different: Numbers of calls of which differences were kept all the same.
    """
    plain: npt.NDArray[np.bool_] = (calls[:, (_DRIFT_ABS, _DRIFT_REL)] == -1).all(axis=1)
    plain &= np.isin(calls[:, _VERDICT], list(outcomes))
    if different:
        plain &= ~np.isin(calls[:, _SEQ], list(different))
    return plain


def _times(us: npt.NDArray[np.float64], starts: npt.NDArray[np.intp]) -> list[tuple[int, float, float]]:
    """How many of each group were measured, their sum and the least of them."""
    measured = us >= 0
    n = np.add.reduceat(measured, starts, dtype=np.int64)
    total = np.add.reduceat(np.where(measured, us, 0.0), starts)
    least = np.minimum.reduceat(np.where(measured, us, np.inf), starts)
    return list(zip(n.tolist(), total.tolist(), np.where(n > 0, least, -1.0).tolist(), strict=True))
