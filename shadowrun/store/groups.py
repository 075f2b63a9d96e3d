"""Calls grouped by (context, outcome): the one grouping from which every table is made.

A `Group` is either computed from the rows of ``call`` and ``diff`` or read from ``folded``, where a
run in memory keeps the sums of matches that it let go. Both look alike, so that analyses stay exact.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shadowrun.store.scanning import PIECE, scan
from shadowrun.store.schema import POSITIONS, SEVERITY, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shadowrun.store.datafile import DataFile
    from shadowrun.store.scanning import Key, Observe, Query

__all__ = ["Group", "compute", "merge", "read_folded", "read_groups"]

# A combined file has a block of numbers for each of its runs: dividing by its length tells the run.
_FROM_FOLDED = """
select context_id, outcome_id, first_seq / {block}, n, first_seq, first_step, n_ref, ref_us_total, ref_us_min,
    n_target, target_us_total, target_us_min, max_abs, max_rel, max_ulp, remaining_bits, n_mismatched,
    n_nan, n_inf, severity, worst_seq, drift_abs, drift_rel
from folded
"""

# Differences stand first: where few calls differ, only those are looked at.
_OF_CALLS = (
    f"from packed_diff cross join call on call.seq = packed_diff.id / {POSITIONS} "
    "join verdict on verdict.id = verdict_id"
)

_FROM_DIFFS = f"""
select context_id, outcome_id, call.seq / {{block}}, max({number("max_abs")}), max({number("max_rel")}), max(max_ulp),
    coalesce(min(case when remaining_bits >= 0 then remaining_bits end), -1),
    sum(n_mismatched), sum(n_nan), sum(n_inf)
{_OF_CALLS}
where {{where}} group by 1, 2, 3
"""

_DRIFT = """
select context_id, outcome_id, seq / {block}, coalesce(max(drift_abs), -1), coalesce(max(drift_rel), -1)
from call join verdict on verdict.id = verdict_id
where (drift_rel is not null or drift_abs is not null) and {where} group by 1, 2, 3
"""

_SEVERITIES = f"""
select context_id, outcome_id, call.seq / {{block}}, call.seq, packed_diff.id, {SEVERITY}
{_OF_CALLS}
where packed_diff.id > ? and {{where}} order by packed_diff.id limit {PIECE}
"""

_NO_DIFF = (0.0, 0.0, 0, -1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Group:
    """Sums over the calls of one context that had one outcome; -1 where nothing was measured.

    Attributes:
        sources: Numbers of the runs that they are from; (0,) in the file of one run.
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


def read_groups(data: DataFile, observe: Observe | None = None) -> list[Group]:
    """All groups of a data file, in the order of their first call.

    Args:
        data: Where from.
        observe: Called with a context and times of some of its calls; see `scan`.
    """
    live = compute(data.query, data.block, observe=observe)
    return merge([*live, *read_folded(data.query, data.block)])


def compute(query: Query, block: int, where: str = "1", observe: Observe | None = None) -> Iterator[Group]:
    """Groups of the calls that are kept one by one, each of one run; the arguments are those of `scan`."""
    diffs = {row[:3]: row[3:] for row in query(_FROM_DIFFS.format(block=block, where=where))}
    worst = _worst(query, _SEVERITIES.format(block=block, where=where)) if diffs else {}
    drift = {row[:3]: row[3:] for row in query(_DRIFT.format(block=block, where=where))}
    for key, s in scan(query, block, where, observe).items():
        context, outcome, source = key
        max_abs, max_rel, max_ulp, bits, n_mismatched, n_nan, n_inf = diffs.get(key, _NO_DIFF)
        drift_abs, drift_rel = drift.get(key, (-1.0, -1.0))
        severity, worst_seq = worst.get(key, (-1.0, s.first_seq))
        # float() and int() also turn the text 'nan' and integers that were stored as floats back.
        yield Group(
            context, outcome, (source,), s.n, s.first_seq, s.first_step, s.n_ref, s.ref_us_total, s.ref_us_min,
            s.n_target, s.target_us_total, s.target_us_min, float(max_abs), float(max_rel), int(max_ulp), int(bits),
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
    last = -1
    while rows := list(query(sql, (last,))):
        for context, outcome, source, seq, _, severity in rows:
            key = context, outcome, source
            seen = worst.get(key)
            if seen is None or severity > seen[0]:
                worst[key] = severity, seq
        last = rows[-1][4]
    return worst


def _group(row: tuple[Any, ...]) -> Group:
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
        max_abs=_greatest(g.max_abs for g in groups),
        max_rel=_greatest(g.max_rel for g in groups),
        max_ulp=max(g.max_ulp for g in groups),
        remaining_bits=int(_least(g.remaining_bits for g in groups)),
        n_mismatched=sum(g.n_mismatched for g in groups),
        n_nan=sum(g.n_nan for g in groups),
        n_inf=sum(g.n_inf for g in groups),
        drift_abs=_greatest(g.drift_abs for g in groups),
        drift_rel=_greatest(g.drift_rel for g in groups),
    )


def _least(values: Iterable[float]) -> float:
    """The smallest of what was measured; -1 stands for not measured."""
    return min((v for v in values if v >= 0), default=-1.0)


def _greatest(values: Iterable[float]) -> float:
    """The greatest; NaN is greater than everything, as the text 'nan' is in SQLite."""
    return max(values, key=lambda v: (v != v, v))  # noqa: PLR0124 - the fastest NaN test
