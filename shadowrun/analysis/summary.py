"""Operator summaries (outcomes, differences, times), and the accumulated error of each step."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.store.codec import decode_float
from shadowrun.store.groups import greatest
from shadowrun.store.records import REGION
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.analysis.call_groups import CallGroups, Row
    from shadowrun.store.datafile import DataFile

__all__ = ["DriftStep", "OperatorSummary", "count_statuses", "summarise", "trace_drift", "unique"]


@dataclass(frozen=True, slots=True)
class DriftStep:
    """Greatest accumulated error within a step.

    Attributes:
        step: Training step.
        drift_abs: Greatest absolute difference between the two chains of results.
        drift_rel: Greatest RMSE relative to the RMS of the reference.
        op, module, seq: The call with the greatest `drift_rel`.
    """

    step: int
    drift_abs: float
    drift_rel: float
    op: str
    module: str
    seq: int


# The greatest difference and the worst call of a step may be of two calls: a window function gives both in one pass.
_DRIFT = """
with ranked as (
    select *, row_number() over (partition by step order by drift_rel desc, drift_abs desc, seq) as place,
        coalesce(max(drift_abs) over (partition by step), -1) as greatest
    from call where drift_rel >= 0
)
select step, greatest, drift_rel, name, module, seq
from ranked join context on context.id = context_id join op on op.id = op_id
where place = 1 order by step
"""


def trace_drift(data: DataFile) -> list[DriftStep]:
    """The worst accumulated error of each step; empty without ``drift=True``."""
    return [
        DriftStep(step, decode_float(greatest), decode_float(rel), op, module, seq)
        for step, greatest, rel, op, module, seq in data.query(_DRIFT)
    ]


MAX_SHAPES = 5


@dataclass(frozen=True, slots=True)
class OperatorSummary:
    """All calls of one operator; figures are -1 if not measured.

    Attributes:
        op: ``aten::add.Tensor``.
        n_calls: Calls recorded; those skipped on purpose are in `n_skipped` only.
        n_match, n_mismatch, n_unsupported, n_fallback, n_error, n_unverified, n_skipped: Calls by status.
        n_own_failures: Calls that shadowrun failed to compare (ERROR with cause HARNESS); not in `n_error`.
        worst_seq: Number of the worst call; -1 if all calls were bit-identical.
        max_abs, max_rel, max_ulp: Greatest differences over all calls.
        remaining_bits: Least number of identical leading mantissa bits.
        n_mismatched: Elements beyond rounding, over all calls.
        n_nan, n_inf: Elements that are NaN, or infinite, on one side only.
        missing_kernels: Kernels that the target lacked.
        causes: Causes, the most frequent first.
        dtypes: Input dtypes seen, in order of appearance.
        shapes: The first input shapes seen.
        n_more_shapes: Number of further shapes.
        ref_total_us, ref_median_us, ref_min_us: Time on the reference; the median is that of the calls
            kept one by one.
        target_total_us, target_median_us, target_min_us: Time on the target.
        severity: Rank of the worst difference; only the order of ranks has a meaning.
    """

    op: str
    n_calls: int
    n_match: int
    n_mismatch: int
    n_unsupported: int
    n_fallback: int
    n_error: int
    n_unverified: int
    n_skipped: int
    n_own_failures: int
    worst_seq: int
    max_abs: float
    max_rel: float
    max_ulp: int
    remaining_bits: int
    n_mismatched: int
    n_nan: int
    n_inf: int
    missing_kernels: tuple[str, ...]
    causes: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    n_more_shapes: int
    ref_total_us: float
    ref_median_us: float
    ref_min_us: float
    target_total_us: float
    target_median_us: float
    target_min_us: float
    severity: float


def summarise(table: CallGroups) -> list[OperatorSummary]:
    """Summaries of all recorded operators, sorted by the work they need: unsupported first, matching last.

    Compiled regions are in `summarise_regions`.
    """
    by_op: dict[str, list[Row]] = defaultdict(list)
    for row in table.rows:
        if not row.context.op.startswith(REGION):
            by_op[row.context.op].append(row)
    skipped: Counter[str] = Counter()
    for skip in table.skipped:
        skipped[skip.op] += skip.n
    rows = [_summary(op, rows, skipped[op], table.medians.get(op, (-1.0, -1.0))) for op, rows in by_op.items()]
    return sorted(rows, key=_work)


def count_statuses(table: CallGroups) -> dict[Status, int]:
    """Calls of each status, skipped ones included."""
    counts = dict.fromkeys(Status, 0)
    for row in table.rows:
        counts[row.outcome.status] += row.group.n
    counts[Status.SKIPPED] += sum(skip.n for skip in table.skipped)
    return counts


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """Each non-empty text once, in order of appearance."""
    return tuple(dict.fromkeys(filter(None, texts)))


def _work(s: OperatorSummary) -> tuple[float, ...]:
    # What stops the program, then what makes it wrong, then what makes it slow or unknown.
    broken = (s.n_unsupported > 0, s.n_error > 0, s.n_mismatch > 0)
    rest = (s.n_fallback > 0, s.n_own_failures > 0, s.n_unverified > 0)
    # Rows come in the order of their first call, which breaks ties.
    return tuple(-float(key) for key in (*broken, s.severity if s.n_mismatch else 0, *rest, s.n_calls))


def _summary(op: str, rows: list[Row], n_skipped: int, medians: tuple[float, float]) -> OperatorSummary:
    counts: Counter[Status] = Counter()
    causes: Counter[str] = Counter()
    own = 0
    for row in rows:
        counts[row.outcome.status] += row.group.n
        causes[row.outcome.cause or ""] += row.group.n  # `unique` drops the empty one
        own += row.group.n if row.outcome.is_own_failure else 0
    groups = [row.group for row in rows]
    # Of equals the earliest, as in `findings._worst`: table and findings must name one call.
    worst = max(groups, key=lambda g: (g.severity, -g.worst_seq))
    shapes = unique(row.context.shapes for row in rows)
    return OperatorSummary(
        op=op,
        n_calls=sum(g.n for g in groups),
        n_match=counts[Status.MATCH],
        n_mismatch=counts[Status.MISMATCH],
        n_unsupported=counts[Status.UNSUPPORTED],
        n_fallback=counts[Status.FALLBACK],
        n_error=sum(r.group.n for r in rows if r.outcome.status is Status.ERROR and not r.outcome.is_own_failure),
        n_unverified=counts[Status.UNVERIFIED],
        n_skipped=counts[Status.SKIPPED] + n_skipped,
        n_own_failures=own,
        worst_seq=worst.worst_seq if worst.severity >= 0 else -1,
        max_abs=greatest((g.max_abs for g in groups), 0.0),
        max_rel=greatest((g.max_rel for g in groups), 0.0),
        max_ulp=max(g.max_ulp for g in groups),
        remaining_bits=min((g.remaining_bits for g in groups if g.remaining_bits >= 0), default=-1),
        n_mismatched=sum(g.n_mismatched for g in groups),
        n_nan=sum(g.n_nan for g in groups),
        n_inf=sum(g.n_inf for g in groups),
        missing_kernels=unique(row.outcome.missing_kernel for row in rows),
        causes=unique(cause for cause, _ in causes.most_common()),
        dtypes=unique(dtype for row in rows for dtype in row.context.dtypes),
        shapes=shapes[:MAX_SHAPES],
        n_more_shapes=max(0, len(shapes) - MAX_SHAPES),
        ref_total_us=sum(g.ref_us_total for g in groups if g.n_ref),
        ref_median_us=_median(medians[0], sum(g.ref_us_total for g in groups), sum(g.n_ref for g in groups)),
        ref_min_us=min((g.ref_us_min for g in groups if g.n_ref), default=-1.0),
        target_total_us=sum(g.target_us_total for g in groups if g.n_target),
        target_median_us=_median(medians[1], sum(g.target_us_total for g in groups), sum(g.n_target for g in groups)),
        target_min_us=min((g.target_us_min for g in groups if g.n_target), default=-1.0),
        severity=worst.severity,
    )


def _median(median: float, total: float, n: int) -> float:
    """The median, or the mean if no call was recorded one by one."""
    # Calls that are only counted have sums of times, and no time of their own.
    return median if median >= 0 or n == 0 else total / n
