"""Calls grouped by (context, outcome): the one grouping from which every table is made.

A `Group` is computed from the rows of ``call`` and ``diff``, or read from ``folded``, where a run in memory keeps the
sums of the matches that it dropped. Both kinds are merged into one list, so that analyses stay exact.

`scan` is the one pass over all calls; the medians of the analyses come from it too. Of a large file it takes arrays
(`call_pages`) instead of rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shadowrun.store.schema import SEVERITY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from shadowrun.store.datafile import DataFile

    Query = Callable[..., Iterable[tuple[Any, ...]]]
    Key = tuple[int, int]
    import numpy as np
    import numpy.typing as npt

    Calls = npt.NDArray[np.float64]
    Times = list[float] | npt.NDArray[np.float64]
    SumOfTimes = tuple[int, float, float]
    Observe = Callable[[int, Times, Times], None]
    ShowRows = Callable[[list[tuple[Any, ...]] | Calls], None]

__all__ = [
    "PIECE",
    "Calls",
    "Group",
    "SumOfTimes",
    "Sums",
    "Times",
    "compute",
    "greatest",
    "merge",
    "read_folded",
    "read_groups",
    "scan",
]


PIECE = 20_000
"""Rows fetched at once: neither memory nor the lock on the file is held for a whole pass."""

_CALLS = f"""
select seq, step, context_id, outcome_id, ref_ns, target_ns{{more}}
from call join verdict on verdict.id = verdict_id
where seq > ? and seq < ? and {{where}} order by seq limit {PIECE}
"""  # noqa: S608 - no value from outside enters it


class Sums:
    """Number of calls and sums of their times in nanoseconds, which are exact; unmeasured times are left out.

    A combined file of a thousand runs has as many of these as the file of one run.
    """

    __slots__ = (
        "first_seq",
        "first_step",
        "n",
        "n_ref",
        "n_target",
        "ref",
        "ref_min",
        "sources",
        "target",
        "target_min",
    )

    def __init__(self, first_seq: int, first_step: int, source: int) -> None:
        self.first_seq = first_seq
        self.first_step = first_step
        self.sources = [source]
        self.n = self.n_ref = self.n_target = 0
        self.ref = self.target = 0.0
        self.ref_min = self.target_min = -1.0

    def begin_run(self, first_seq: int, first_step: int, source: int) -> None:
        """Note that calls of a run follow, which begin with this one; runs follow one another."""
        if self.sources[-1] == source:
            return
        self.sources.append(source)
        # Runs that were combined have numbers of their own: the first call is that of the earliest step.
        self.first_step, self.first_seq = min((self.first_step, self.first_seq), (first_step, first_seq))

    def add(self, n: int, ref: SumOfTimes, target: SumOfTimes) -> None:
        """Add `n` calls, with the number of times measured on each side, their sum and their minimum."""
        self.n += n
        if ref[0]:
            self.ref_min = ref[2] if self.n_ref == 0 else min(self.ref_min, ref[2])
            self.n_ref += ref[0]
            self.ref += ref[1]
        if target[0]:
            self.target_min = target[2] if self.n_target == 0 else min(self.target_min, target[2])
            self.n_target += target[0]
            self.target += target[1]


def scan(
    query: Query, block: int, where: str = "1", observe: Observe | None = None, show: ShowRows | None = None
) -> dict[Key, Sums]:
    """Sums over the calls of each context and outcome.

    Args:
        query: Runs SQL.
        block: Length of the block of numbers that each run of a combined file has.
        where: Condition on calls.
        observe: Called with a context and times of some of its calls, on reference and target; in nanoseconds.
        show: Called with the calls, some at a time: number, step, context, outcome, nanoseconds on both sides,
            accumulated error, absolute and relative. In an array, -1 stands for None.
    """
    # Summed in Python: `group by` in SQL would sort all calls first, and takes three times as long.
    found: dict[Key, Sums] = {}
    last = -1
    sql = _CALLS.format(where=where, more="" if show is None else ", drift_abs, drift_rel")
    # Never across two runs: a piece has one `source`.
    while rows := list(query(sql, (last, (last + 1) // block * block + block))):
        last = rows[-1][0]
        if show is not None:
            show(rows)
            rows = [row[:6] for row in rows]
        _add_piece(found, rows, last // block, observe)
        if len(rows) < PIECE:
            # The next call may belong to another run: skip the gap between their blocks of numbers.
            following = next(iter(query("select min(seq) from call where seq > ?", (last,))))[0]
            if following is None:
                break
            last = following - 1
    return found


def _add_piece(found: dict[Key, Sums], rows: list[tuple[Any, ...]], source: int, observe: Observe | None) -> None:
    pieces: dict[tuple[int, int], tuple[list[float | None], list[float | None]]] = {}
    for seq, step, context, outcome, ref_ns, target_ns in rows:
        piece = pieces.get((context, outcome))
        if piece is None:
            piece = pieces[context, outcome] = ([], [])
            sums = found.get((context, outcome))
            if sums is None:
                found[context, outcome] = Sums(seq, step, source)
            else:
                sums.begin_run(seq, step, source)
        piece[0].append(ref_ns)
        piece[1].append(target_ns)
    for (context, outcome), (refs, targets) in pieces.items():
        measured = _measured(refs), _measured(targets)
        found[context, outcome].add(len(refs), *map(_sum, measured))
        if observe is not None:
            observe(context, *measured)


def _measured(times: list[float | None]) -> list[float]:
    return [ns for ns in times if ns is not None]


def _sum(times: list[float]) -> SumOfTimes:
    return len(times), sum(times), min(times, default=-1.0)


def _us(ns: float) -> float:
    """Microseconds; -1 stays: not measured."""
    return ns / 1e3 if ns >= 0 else -1.0


# A combined file has a block of call numbers for each run: `seq / block` is the number of the run.
_FROM_FOLDED = """
select context_id, outcome_id, first_seq / {block}, n, first_seq, first_step, n_ref, ref_us_total, ref_us_min,
    n_target, target_us_total, target_us_min, max_abs, max_rel, max_ulp, remaining_bits, n_mismatched,
    n_nan, n_inf, severity, worst_seq, drift_abs, drift_rel
from folded
"""

# `cross join` fixes the join order: `diff` first, since most files have few rows there and many in `call`.
_OF_CALLS = "from diff cross join call on call.seq = diff.seq join verdict on verdict.id = verdict_id"

_FROM_DIFFS = f"""
select context_id, outcome_id, max(max_abs), max(max_rel), max(max_ulp),
    coalesce(min(case when remaining_bits >= 0 then remaining_bits end), -1),
    sum(n_mismatched), sum(n_nan), sum(n_inf)
{_OF_CALLS}
where {{where}} group by 1, 2
"""

_DRIFT = """
select context_id, outcome_id, coalesce(max(drift_abs), -1), coalesce(max(drift_rel), -1)
from call join verdict on verdict.id = verdict_id
where (drift_rel is not null or drift_abs is not null) and {where} group by 1, 2
"""

_SEVERITIES = f"""
select context_id, outcome_id, call.seq, position, {SEVERITY}
{_OF_CALLS}
where (diff.seq, position) > (?, ?) and {{where}} order by diff.seq, position limit {PIECE}
"""

_NO_DIFF = (0.0, 0.0, 0, -1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Group:
    """Sums over the calls of one context that had one outcome; -1 stands for not measured.

    Attributes:
        sources: Numbers of the runs that the calls are from; (0,) in the file of one run.
    """

    context_id: int
    outcome_id: int
    sources: tuple[int, ...]
    n: int
    first_seq: int
    first_step: int
    n_ref: int
    ref_us_total: float
    ref_us_min: float
    n_target: int
    target_us_total: float
    target_us_min: float
    max_abs: float
    max_rel: float
    max_ulp: int
    remaining_bits: int
    n_mismatched: int
    n_nan: int
    n_inf: int
    severity: float
    worst_seq: int
    drift_abs: float
    drift_rel: float


def read_groups(data: DataFile, observe: Observe | None = None, show: ShowRows | None = None) -> list[Group]:
    """All groups of a data file, in the order of their first call.

    Args:
        data: Data file to read.
        observe: Called with a context and times of some of its calls; see `scan`.
        show: Called with the calls; see `scan`.
    """
    pieces, drift = data.call_arrays(), True
    if pieces is None:
        sums = scan(data.query, data.block, observe=observe, show=show)
    else:
        from shadowrun.store.packed_rows import have_drift, scan_arrays  # numpy, which small files do without

        drift = False

        def noted() -> Iterator[Calls]:
            nonlocal drift
            for piece in pieces:
                drift = drift or have_drift(piece)
                yield piece

        sums = scan_arrays(noted(), data.block, observe, show)
    live = _groups(data.query, "1", sums, drift=drift)
    return merge([*live, *read_folded(data.query, data.block)])


def compute(query: Query, block: int, where: str = "1") -> Iterator[Group]:
    """Groups of the calls that are kept one by one; the arguments are those of `scan`."""
    return _groups(query, where, scan(query, block, where))


def _groups(query: Query, where: str, sums: dict[Key, Sums], *, drift: bool = True) -> Iterator[Group]:
    # Most runs have no differences at all, and then no row has to be ranked.
    diffs = {row[:2]: row[2:] for row in query(_FROM_DIFFS.format(where=where))}
    worst = _worst(query, _SEVERITIES.format(where=where)) if diffs else {}
    # Without ``drift=True`` no call has any: a pass over all calls would find none.
    drifts = {row[:2]: row[2:] for row in query(_DRIFT.format(where=where))} if drift else {}
    for key, s in sums.items():
        max_abs, max_rel, max_ulp, bits, n_mismatched, n_nan, n_inf = diffs.get(key, _NO_DIFF)
        drift_abs, drift_rel = drifts.get(key, (-1.0, -1.0))
        severity, worst_seq = worst.get(key, (-1.0, s.first_seq))
        # float() and int() also turn the text 'nan' and integers that were stored as floats back.
        yield Group(
            *key, tuple(s.sources), s.n, s.first_seq, s.first_step, s.n_ref, s.ref / 1e3, _us(s.ref_min),
            s.n_target, s.target / 1e3, _us(s.target_min), float(max_abs), float(max_rel), int(max_ulp), int(bits),
            n_mismatched, n_nan, n_inf, float(severity), worst_seq, float(drift_abs), float(drift_rel),
        )  # fmt: skip


def read_folded(query: Query, block: int) -> Iterator[Group]:
    """Groups of calls of which only sums are kept."""
    return map(_group, query(_FROM_FOLDED.format(block=block)))


def merge(groups: Iterable[Group]) -> list[Group]:
    """Join the groups of equal context and outcome, whichever run they are from."""
    merged: dict[tuple[int, int], list[Group]] = {}
    for group in groups:
        merged.setdefault((group.context_id, group.outcome_id), []).append(group)
    joined = (same[0] if len(same) == 1 else _join(same) for same in merged.values())
    return sorted(joined, key=lambda g: g.first_seq)


def _worst(query: Query, sql: str) -> dict[Key, tuple[float, int]]:
    """Greatest severity of each group, and the first call that has it."""
    worst: dict[Key, tuple[float, int]] = {}
    last = (-1, 0)
    while rows := list(query(sql, last)):
        for context, outcome, seq, _, severity in rows:
            key = context, outcome
            seen = worst.get(key)
            if seen is None or severity > seen[0]:
                worst[key] = severity, seq
        last = rows[-1][2:4]
    return worst


def _group(row: tuple[Any, ...]) -> Group:
    # As in `compute`: a sum may be the text 'nan', and a distance in ULP past 63 bits is a float.
    i, f = int, float
    return Group(
        i(row[0]), i(row[1]), (i(row[2]),), i(row[3]), i(row[4]), i(row[5]), i(row[6]), f(row[7]), f(row[8]),
        i(row[9]), f(row[10]), f(row[11]), f(row[12]), f(row[13]), i(row[14]), i(row[15]), i(row[16]), i(row[17]),
        i(row[18]), f(row[19]), i(row[20]), f(row[21]), f(row[22]),
    )  # fmt: skip


def _join(groups: list[Group]) -> Group:
    # Runs that were combined have numbers of their own: the first call is that of the earliest step.
    first = min(groups, key=lambda g: (g.first_step, g.first_seq))
    worse = max(groups, key=lambda g: (g.severity, -g.worst_seq))
    # The severity and the worst call are those of one group: a report shows that call.
    return dataclasses.replace(
        worse,
        sources=tuple(sorted({number for g in groups for number in g.sources})),
        n=sum(g.n for g in groups),
        first_seq=first.first_seq,
        first_step=first.first_step,
        n_ref=sum(g.n_ref for g in groups),
        ref_us_total=sum(g.ref_us_total for g in groups),
        ref_us_min=_least(g.ref_us_min for g in groups),
        n_target=sum(g.n_target for g in groups),
        target_us_total=sum(g.target_us_total for g in groups),
        target_us_min=_least(g.target_us_min for g in groups),
        max_abs=greatest(g.max_abs for g in groups),
        max_rel=greatest(g.max_rel for g in groups),
        max_ulp=max(g.max_ulp for g in groups),
        remaining_bits=int(_least(g.remaining_bits for g in groups)),
        n_mismatched=sum(g.n_mismatched for g in groups),
        n_nan=sum(g.n_nan for g in groups),
        n_inf=sum(g.n_inf for g in groups),
        drift_abs=greatest(g.drift_abs for g in groups),
        drift_rel=greatest(g.drift_rel for g in groups),
    )


def _least(values: Iterable[float]) -> float:
    """The smallest of what was measured; -1 stands for not measured."""
    return min((v for v in values if v >= 0), default=-1.0)


def greatest(values: Iterable[float], default: float = 0.0) -> float:
    """The greatest value; NaN counts as greater than all others, as the text 'nan' is in SQLite."""
    # `max` alone returns NaN or not by the order of the values.
    return max(values, key=lambda v: (v != v, v), default=default)  # noqa: PLR0124 - the fastest NaN test
