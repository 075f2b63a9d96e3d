"""Calls grouped by (context, outcome): the one grouping from which every table is made.

A `Group` is either computed from the rows of ``call`` and ``diff`` or read from ``folded``, where a
run in memory keeps the sums of matches that it let go. Both look alike, so that analyses stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shadowrun.store.codec import encode_float, encode_int
from shadowrun.store.schema import SEVERITY

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from shadowrun.store.datafile import DataFile

__all__ = ["Group", "fold", "merge", "read_groups"]

_FROM_FOLDED = """
select context_id, outcome_id, n, first_seq, first_step, n_ref, ref_us_total, ref_us_min,
    n_target, target_us_total, target_us_min, max_abs, max_rel, max_ulp, remaining_bits, n_mismatched,
    n_nan, n_inf, severity, worst_seq, drift_abs, drift_rel
from folded
"""

_INSERT = "insert into folded values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

_FROM_CALLS = f"""
with worst_diff as (
    select seq, max(max_abs) as max_abs, max(max_rel) as max_rel, max(max_ulp) as max_ulp,
        min(case when remaining_bits >= 0 then remaining_bits end) as bits,
        sum(n_mismatched) as n_mismatched, sum(n_nan) as n_nan, sum(n_inf) as n_inf,
        max{SEVERITY} as severity
    from diff group by seq
), ranked as (
    select call.seq, step, context_id, outcome_id, ref_us, target_us, drift_abs, drift_rel,
        max_abs, max_rel, max_ulp, bits, n_mismatched, n_nan, n_inf, severity, row_number() over (
        partition by context_id, outcome_id order by coalesce(severity, -1) desc, call.seq) as place
    from call join verdict on verdict.id = verdict_id left join worst_diff on worst_diff.seq = call.seq
    where {{where}}
)
select context_id, outcome_id, count(*), min(seq), min(step),
    count(case when ref_us >= 0 then 1 end), coalesce(sum(case when ref_us >= 0 then ref_us end), 0),
    coalesce(min(case when ref_us >= 0 then ref_us end), -1),
    count(case when target_us >= 0 then 1 end), coalesce(sum(case when target_us >= 0 then target_us end), 0),
    coalesce(min(case when target_us >= 0 then target_us end), -1),
    coalesce(max(max_abs), 0), coalesce(max(max_rel), 0), coalesce(max(max_ulp), 0), coalesce(min(bits), -1),
    coalesce(sum(n_mismatched), 0), coalesce(sum(n_nan), 0), coalesce(sum(n_inf), 0),
    coalesce(max(severity), -1), max(case when place = 1 then seq end),
    max(drift_abs), max(drift_rel)
from ranked group by context_id, outcome_id
"""  # noqa: S608 - no value from outside enters it


@dataclass(frozen=True, slots=True)
class Group:
    """Sums over the calls of one context that had one outcome; -1 where nothing was measured."""

    context_id: int
    outcome_id: int
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


def read_groups(data: DataFile) -> list[Group]:
    """All groups of a data file, in the order of their first call."""
    live = map(_group, data.query(_FROM_CALLS.format(where="1")))
    folded = map(_group, data.query(_FROM_FOLDED))
    return merge([*live, *folded])


def merge(groups: Iterable[Group]) -> list[Group]:
    """Join the groups of equal context and outcome."""
    merged: dict[tuple[int, int], Group] = {}
    for group in groups:
        key = group.context_id, group.outcome_id
        seen = merged.get(key)
        merged[key] = group if seen is None else _join(seen, group)
    return sorted(merged.values(), key=lambda g: g.first_seq)


def fold(connection: sqlite3.Connection, n: int) -> int:
    """Replace the `n` oldest matches by their sums; returns how many there were to replace.

    Runs within the caller's transaction.
    """
    connection.execute("create temp table if not exists leaving (seq integer primary key)")
    connection.execute("delete from leaving")
    connection.execute(
        "insert into leaving select call.seq from call join verdict on verdict.id = verdict_id "
        "join outcome on outcome.id = outcome_id where status = 'match' order by call.seq limit ?",
        (n,),
    )
    leaving = map(_group, connection.execute(_FROM_CALLS.format(where="call.seq in (select seq from leaving)")))
    folded = map(_group, connection.execute(_FROM_FOLDED))
    groups = merge([*leaving, *folded])
    connection.execute("delete from folded")
    connection.executemany(_INSERT, map(_row, groups))
    connection.execute("delete from diff where seq in (select seq from leaving)")
    return connection.execute("delete from call where seq in (select seq from leaving)").rowcount


def _group(row: tuple[Any, ...]) -> Group:
    # float() and int() also turn the text 'nan' and integers that were stored as floats back.
    i, f = int, float
    return Group(
        i(row[0]), i(row[1]), i(row[2]), i(row[3]), i(row[4]), i(row[5]), f(row[6]), f(row[7]), i(row[8]), f(row[9]),
        f(row[10]), f(row[11]), f(row[12]), i(row[13]), i(row[14]), i(row[15]), i(row[16]), i(row[17]), f(row[18]),
        i(row[19]), f(row[20]), f(row[21]),
    )  # fmt: skip


def _row(g: Group) -> tuple[int | float | str, ...]:
    e = encode_float
    return (
        g.context_id, g.outcome_id, g.n, g.first_seq, g.first_step, g.n_ref, e(g.ref_us_total), e(g.ref_us_min),
        g.n_target, e(g.target_us_total), e(g.target_us_min), e(g.max_abs), e(g.max_rel), encode_int(g.max_ulp),
        g.remaining_bits, g.n_mismatched, g.n_nan, g.n_inf, g.severity, g.worst_seq, e(g.drift_abs), e(g.drift_rel),
    )  # fmt: skip


def _join(a: Group, b: Group) -> Group:
    worse = max(a, b, key=lambda g: (g.severity, -g.worst_seq))
    return Group(
        context_id=a.context_id,
        outcome_id=a.outcome_id,
        n=a.n + b.n,
        first_seq=min(a.first_seq, b.first_seq),
        first_step=min(a.first_step, b.first_step),
        n_ref=a.n_ref + b.n_ref,
        ref_us_total=a.ref_us_total + b.ref_us_total,
        ref_us_min=_least(a.ref_us_min, b.ref_us_min),
        n_target=a.n_target + b.n_target,
        target_us_total=a.target_us_total + b.target_us_total,
        target_us_min=_least(a.target_us_min, b.target_us_min),
        max_abs=_greatest(a.max_abs, b.max_abs),
        max_rel=_greatest(a.max_rel, b.max_rel),
        max_ulp=max(a.max_ulp, b.max_ulp),
        remaining_bits=int(_least(a.remaining_bits, b.remaining_bits)),
        n_mismatched=a.n_mismatched + b.n_mismatched,
        n_nan=a.n_nan + b.n_nan,
        n_inf=a.n_inf + b.n_inf,
        severity=worse.severity,
        worst_seq=worse.worst_seq,
        drift_abs=_greatest(a.drift_abs, b.drift_abs),
        drift_rel=_greatest(a.drift_rel, b.drift_rel),
    )


def _least(a: float, b: float) -> float:
    """The smaller of two measured values; -1 stands for not measured."""
    return max(a, b) if a < 0 or b < 0 else min(a, b)


def _greatest(a: float, b: float) -> float:
    """The greater; NaN is greater than everything, as the text 'nan' is in SQLite."""
    return a if a != a or a > b else b  # noqa: PLR0124 - the fastest NaN test
