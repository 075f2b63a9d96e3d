"""Calls as arrays: the newest of a run in memory, and those of a large file while they are summed.

Adding to the packed array of a run in memory takes a tenth of the time of an SQLite insert. Queries do not see packed
calls: `DataFile` moves them into the database before a query. Most of them are never queried, and are folded into sums
straight from here.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from shadowrun.store.groups import Group, Sums

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import numpy.typing as npt

    from shadowrun.store.groups import Calls, Key, Observe, ShowRows, SumOfTimes

__all__ = ["PackedRows", "have_drift", "plain_among", "scan_arrays", "sums_by", "sums_of"]

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


def scan_arrays(pieces: Iterable[Calls], block: int, observe: Observe | None, show: ShowRows | None) -> dict[Key, Sums]:
    """As `shadowrun.store.groups.scan`, of all calls of a file.

    Args:
        pieces: The calls in their order, (n, 8): the columns that `show` gets.
        block: Length of the block of numbers that each run of a combined file has.
        observe: As there.
        show: As there.
    """
    found: dict[Key, Sums] = {}
    for piece in pieces:
        if show is not None:
            show(piece)
        _add(found, piece, block, observe)
    return found


def _add(found: dict[Key, Sums], calls: Calls, block: int, observe: Observe | None) -> None:
    """Add some calls, which may be of several runs of a combined file."""
    calls, starts = _sorted(calls, ())
    sources = (calls[:, _SEQ] // block).astype(np.int64)
    several = bool((sources != sources[0]).any())
    at = 0
    for (seq, step, context, outcome), n, ref, target in _sums(calls, starts):
        sums = found.get((context, outcome))
        if sums is None:
            sums = found[context, outcome] = Sums(seq, step, seq // block)
        if several:
            # Sorted by number within a group: a run's first call is where the run changes.
            firsts = at + np.flatnonzero(np.diff(sources[at : at + n], prepend=-1))
            for first_seq, first_step in calls[firsts][:, (_SEQ, _STEP)].astype(np.int64).tolist():
                sums.begin_run(first_seq, first_step, first_seq // block)
        else:
            sums.begin_run(seq, step, seq // block)
        sums.add(n, ref, target)
        if observe is not None:
            refs, targets = calls[at : at + n, _REF_US], calls[at : at + n, _TARGET_US]
            observe(context, refs[refs >= 0], targets[targets >= 0])
        at += n


def sums_by(calls: Calls, columns: Calls) -> Iterator[tuple[list[int], int, SumOfTimes, SumOfTimes]]:
    """The calls by context, outcome and one further number of each.

    Yields:
        Number, step, context and outcome of the first call; number of the calls; sums of their times on both sides.
    """
    return _sums(*_sorted(calls, (columns,)))


def _sorted(calls: Calls, more: tuple[Calls, ...]) -> tuple[Calls, npt.NDArray[np.intp]]:
    """The calls sorted by context, outcome and further numbers, and where each group of them starts."""
    keys = np.zeros(len(calls), np.int64)
    for column in (calls[:, _CONTEXT], calls[:, _VERDICT], *more):
        numbers = (column - column.min()).astype(np.int64)
        keys = keys * (numbers.max() + 1) + numbers
    # Of 16 bits, numpy sorts in a tenth of the time.
    order = np.argsort(keys.astype(np.uint16) if keys.max() < 1 << 16 else keys, kind="stable")
    keys = keys[order]
    return calls[order], np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])


def _sums(calls: Calls, starts: npt.NDArray[np.intp]) -> Iterator[tuple[list[int], int, SumOfTimes, SumOfTimes]]:
    firsts = calls[starts][:, (_SEQ, _STEP, _CONTEXT, _VERDICT)].astype(np.int64).tolist()
    counts = np.diff(np.r_[starts, len(calls)]).tolist()
    return zip(firsts, counts, *(_times(calls[:, side], starts) for side in (_REF_US, _TARGET_US)), strict=True)


def have_drift(calls: Calls) -> bool:
    """Whether any of these calls has an accumulated error."""
    return bool((calls[:, (_DRIFT_ABS, _DRIFT_REL)] != -1).any())


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
