"""Reads `OpRecord` objects from a data file, in call order."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Any

from shadowrun.store.codec import STORED_DIFF, decode_float, diff_from_row
from shadowrun.types import Cause, OpCall, OpRecord, Phase, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from shadowrun.store.datafile import DataFile

__all__ = ["REGION", "distinct_calls", "first_mismatch", "read_diffs", "read_records"]

REGION = "compiled::"
"""Namespace of compiled regions, which are recorded like operators."""

# A slow consumer holds neither memory nor the lock on the file.
PIECE = 1000

_RECORDS = """
select call.seq, call.step, op.name, inputs, module, phase, site.text, context.device,
    status, cause, explanation, evidence, confidence, missing_kernel,
    coalesce(ref_ns / 1000.0, -1), coalesce(target_ns / 1000.0, -1), coalesce(drift_abs, -1), coalesce(drift_rel, -1)
from call
join context on context.id = context_id join op on op.id = op_id join site on site.id = site_id
join verdict on verdict.id = verdict_id join outcome on outcome.id = outcome_id
where call.seq > ? {conditions} order by call.seq limit ?
"""

# Ranks run at the same time: `seq % block`, the number of a call in its own run, orders calls of different runs.
_FIRST_MISMATCH = """
select call.seq from call join verdict on verdict.id = verdict_id join outcome on outcome.id = outcome_id
where status = 'mismatch' and context_id not in ({excused}) order by step, call.seq % ?, call.seq limit 1
"""

# By number: with its name in each row, SQLite would write a name of a megabyte to the disk as often as it was called.
_DISTINCT = "select distinct op_id, inputs, dtypes from context order by op_id, inputs"

# `cross join` fixes the join order: the few calls that are asked for come first.
_DIFFS = f"""
with wanted (seq) as (values {{numbers}})
select wanted.seq, name,
    a.dtype, a.shape, a.stride, a.device, a.layout, e.dtype, e.shape, e.stride, e.device, e.layout,
    n_elements, {STORED_DIFF}
from wanted
cross join diff on diff.seq = wanted.seq
join tensor on tensor.id = tensor_id join form a on a.id = actual_id join form e on e.id = expected_id
order by wanted.seq, position
"""  # noqa: S608 - no value from outside enters it


def read_records(
    data: DataFile,
    *,
    op: str | None = None,
    status: Status | str | Collection[Status | str] | None = None,
    step: int | None = None,
    module: str | None = None,
    seq: int | None = None,
    since: int = 0,
    piece: int = PIECE,
) -> Iterator[OpRecord]:
    """Records in call order; in a combined file, run after run.

    Args:
        data: Data file to read.
        op: Glob pattern of operators.
        status: One status or several.
        step: Training step.
        module: Glob pattern of module paths.
        seq: Number of a single call.
        since: Number of the first call.
        piece: How many are read at a time.
    """
    conditions, values = _conditions(data, op, status, step, module, seq)
    ranks = [source.info.rank for source in data.sources] or [data.info.rank]
    block = data.block
    last = since - 1
    # In pieces: a slow consumer of this generator holds neither memory nor the lock on the file.
    while rows := list(data.query(_RECORDS.format(conditions=conditions), (last, *values, piece))):
        diffs = read_diffs(data, [row[0] for row in rows])
        for row in rows:
            yield _record(row, ranks[row[0] // block], tuple(diffs.get(row[0], ())))
        last = rows[-1][0]


def first_mismatch(data: DataFile, excused: Collection[int] = ()) -> OpRecord | None:
    """The first call that mismatched; in a combined file, the earliest of all runs, by step and call.

    Args:
        data: Data file to read.
        excused: Numbers of contexts whose mismatches are known issues.
    """
    if not data.sources and not excused:
        # One at a time: all calls would be read for a thousand mismatches.
        return next(read_records(data, status=Status.MISMATCH, piece=1), None)
    sql = _FIRST_MISMATCH.format(excused=", ".join(map(str, excused)))
    found = next(data.query(sql, (data.block,)), None)
    return None if found is None else next(read_records(data, seq=found[0]))


def distinct_calls(data: DataFile) -> list[tuple[str, str, str]]:
    """Operator, inputs and dtypes of all different calls, by name and inputs.

    Raises:
        DataFileError: The file is damaged.
    """
    names = dict(data.query("select id, name from op"))
    calls = [(names[op], inputs, dtypes) for op, inputs, dtypes in data.query(_DISTINCT)]
    return sorted(calls, key=lambda call: call[0])


def read_diffs(data: DataFile, numbers: Iterable[int]) -> dict[int, list[TensorDiff]]:
    """Differences of the calls with these numbers."""
    wanted = ", ".join(f"({number})" for number in numbers)
    found: dict[int, list[TensorDiff]] = {}
    for seq, *rest in data.query(_DIFFS.format(numbers=wanted)) if wanted else ():
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
            # Numbers in the text, not placeholders: SQLite allows 32,766 of these.
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
