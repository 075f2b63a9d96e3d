"""`OpRecord` objects from a data file, in call order and a piece at a time."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Any

from shadowrun.store.codec import decode_float, diff_from_row
from shadowrun.types import Cause, OpCall, OpRecord, Phase, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from shadowrun.store.datafile import DataFile

__all__ = ["read_diffs", "read_records"]

PIECE = 1000

_RECORDS = """
select call.seq, call.step, op.name, inputs, module, phase, site.text, context.device,
    status, cause, explanation, evidence, confidence, missing_kernel,
    ref_us, target_us, drift_abs, drift_rel
from call
join context on context.id = context_id join op on op.id = op_id join site on site.id = site_id
join verdict on verdict.id = verdict_id join outcome on outcome.id = outcome_id
where call.seq > ? {conditions} order by call.seq limit ?
"""

_DIFFS = """
select diff.seq, name,
    a.dtype, a.shape, a.stride, a.device, a.layout, e.dtype, e.shape, e.stride, e.device, e.layout,
    n_elements, n_different, n_mismatched, max_abs, max_rel, rmse, max_ulp, remaining_bits, n_nan, n_inf,
    n_zero_sign, n_subnormal, worst_index, worst_actual, worst_expected, excess_actual, excess_expected, detail
from diff join form a on a.id = actual_id join form e on e.id = expected_id
where diff.seq between ? and ? order by diff.seq, position
"""


def read_records(
    data: DataFile,
    *,
    op: str | None = None,
    status: Status | str | Collection[Status | str] | None = None,
    step: int | None = None,
    module: str | None = None,
    seq: int | None = None,
) -> Iterator[OpRecord]:
    """Records in call order.

    Fetched a thousand at a time, so that a slow reader holds neither memory nor the file's lock.

    Args:
        data: Where from.
        op: Glob pattern of operators.
        status: One status or several.
        step: Training step.
        module: Glob pattern of module paths.
        seq: Number of the one call wanted.
    """
    conditions, values = _conditions(data, op, status, step, module, seq)
    rank = data.info.rank
    last = -1
    while rows := list(data.query(_RECORDS.format(conditions=conditions), (last, *values, PIECE))):
        diffs = read_diffs(data, rows[0][0], rows[-1][0])
        for row in rows:
            yield _record(row, rank, tuple(diffs.get(row[0], ())))
        last = rows[-1][0]


def read_diffs(data: DataFile, first: int, last: int) -> dict[int, list[TensorDiff]]:
    """Diffs of the calls numbered `first` to `last`."""
    found: dict[int, list[TensorDiff]] = {}
    for seq, *rest in data.query(_DIFFS, (first, last)):
        found.setdefault(seq, []).append(diff_from_row(tuple(rest)))
    return found


def _conditions(
    data: DataFile,
    op: str | None,
    status: Status | str | Collection[Status | str] | None,
    step: int | None,
    module: str | None,
    seq: int | None,
) -> tuple[str, list[Any]]:
    conditions = ""
    values: list[Any] = []
    if seq is not None:
        conditions += " and call.seq = ?"
        values.append(seq)
    if step is not None:
        conditions += " and call.step = ?"
        values.append(step)
    if status is not None:
        names = [status] if isinstance(status, str) else list(status)
        conditions += f" and status in ({', '.join('?' * len(names))})"
        values.extend(str(Status(name)) for name in names)
    # fnmatch and not SQLite's glob, whose [^...] differs from the patterns of Config.
    for pattern, sql, column in (
        (op, "select id, name from op", "op_id"),
        (module, "select id, module from context", "context_id"),
    ):
        if pattern is not None:
            match = re.compile(fnmatch.translate(pattern)).match
            ids = ", ".join(str(number) for number, text in data.query(sql) if match(text))
            conditions += f" and {column} in ({ids})"
    return conditions, values


def _record(row: tuple[Any, ...], rank: int, diffs: tuple[TensorDiff, ...]) -> OpRecord:
    (
        seq,
        step,
        op,
        inputs,
        module,
        phase,
        site,
        device,
        status,
        cause,
        explanation,
        evidence,
        confidence,
        missing,
        *figures,
    ) = row
    return OpRecord(
        OpCall(seq, step, rank, op, inputs, module, Phase(phase), site, device),
        Verdict(Status(status), Cause(cause) if cause else None, explanation, evidence, decode_float(confidence)),
        diffs,
        missing,
        *map(decode_float, figures),
    )
