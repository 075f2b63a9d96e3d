"""One row for each operator: what became of its calls, how far off they were, how long they took."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.store.records import REGION
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.analysis.table import Row, Table

__all__ = ["OperatorSummary", "count_statuses", "greatest", "summarise", "unique"]

MAX_SHAPES = 5


@dataclass(frozen=True, slots=True)
class OperatorSummary:
    """All calls of one operator; -1 where nothing was measured.

    Attributes:
        op: ``aten::add.Tensor``.
        n_calls: Calls recorded; those skipped on purpose are in `n_skipped` only.
        n_match, n_mismatch, n_unsupported, n_fallback, n_error, n_unverified, n_skipped: Calls by status.
        n_own_failures: Calls that shadowrun failed to compare (ERROR with cause HARNESS); not in `n_error`.
        worst_seq: Number of the worst call; -1 where all calls were bit-identical.
        max_abs, max_rel, max_ulp: Greatest differences over all calls.
        remaining_bits: Least number of identical leading mantissa bits.
        n_mismatched: Elements beyond rounding, over all calls.
        n_nan, n_inf: Elements that are NaN, or infinite, on one side only.
        missing_kernels: Kernels that the target lacked.
        causes: Causes, the most frequent first.
        dtypes: Input dtypes seen, in order of appearance.
        shapes: The first input shapes seen.
        n_more_shapes: How many more there were.
        ref_total_us, ref_median_us, ref_min_us: Time on the reference; the median is that of the calls
            kept one by one.
        target_total_us, target_median_us, target_min_us: Time on the target.
        severity: How bad the worst difference is; only its order has a meaning.
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


def summarise(table: Table) -> list[OperatorSummary]:
    """Summaries of all recorded operators, sorted by the work they need: unsupported first, matching last.

    Compiled regions are no operators: `summarise_regions` has them.
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


def count_statuses(table: Table) -> dict[Status, int]:
    """Calls of each status, skipped ones included."""
    counts = dict.fromkeys(Status, 0)
    for row in table.rows:
        counts[row.outcome.status] += row.group.n
    counts[Status.SKIPPED] += sum(skip.n for skip in table.skipped)
    return counts


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """Each non-empty text once, in order of appearance."""
    return tuple(dict.fromkeys(filter(None, texts)))


def greatest(values: Iterable[float], default: float) -> float:
    """The greatest; NaN, which no comparison finds, counts as greater than everything."""
    return max(values, key=lambda v: (v != v, v), default=default)  # noqa: PLR0124 - the fastest NaN test


def _work(s: OperatorSummary) -> tuple[float, ...]:
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
        causes[row.outcome.cause or ""] += row.group.n
        own += row.group.n if row.outcome.is_own_failure else 0
    groups = [row.group for row in rows]
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
    """The mean stands in where every call was folded."""
    return median if median >= 0 or n == 0 else total / n
