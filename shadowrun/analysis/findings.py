"""Findings: calls that need work, grouped by kind, operator, cause and explanation."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.analysis.advice import next_step, worst_call
from shadowrun.analysis.mintolerance import NOTHING, MinTolerance, least, min_tolerances
from shadowrun.analysis.summary import greatest, unique
from shadowrun.analysis.words import command
from shadowrun.store.codec import decode_float
from shadowrun.store.records import read_diffs
from shadowrun.store.sources import name_runs
from shadowrun.store.tensors import captured_calls
from shadowrun.types import Cause, Status, TensorDiff

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.analysis.known import Ledger
    from shadowrun.analysis.table import Row, Table
    from shadowrun.settings import KnownLine
    from shadowrun.store.datafile import DataFile

__all__ = ["KINDS", "Finding", "Note", "find", "note", "own_failures", "without_numbers", "worst_diff"]

KINDS = ("unsupported", "error", "mismatch", "fallback", "slow")
"""Kinds of findings, the most actionable first."""

MIN_TIMED_CALLS = 3
MIN_SLOWER_US = 1000.0
MAX_LISTED = 5
_NUMBER = re.compile(r"(?<![A-Za-z])-?\d[\d.]*(?:e[+-]?\d+)?")

_KIND_OF = {
    Status.UNSUPPORTED: "unsupported",
    Status.ERROR: "error",
    Status.MISMATCH: "mismatch",
    Status.FALLBACK: "fallback",
}
_FORM_CAUSES = (Cause.METADATA, Cause.EXCEPTIONAL_VALUES)
_NOT_THE_TARGET = (Cause.PROPAGATED, Cause.REFERENCE, Cause.RANDOMNESS, Cause.NON_DETERMINISM)


@dataclass(frozen=True, slots=True)
class Finding:
    """Calls of one operator with one fault.

    Attributes:
        kind: One of `KINDS`; gates select on it.
        op: ``aten::add.Tensor``.
        cause, explanation: Why.
        evidence, confidence: Of the worst call.
        missing_kernels: Kernels that the target lacked.
        modules: The first module paths, of `n_modules`.
        phases: Parts of the training step.
        sites: The first source lines, of `n_sites`.
        inputs: The first inputs, of `n_inputs`.
        first_seq, first_step: Of the first call.
        n_calls: Calls affected, of `n_calls_of_op`.
        worst: Worst difference; None where no tensors were compared.
        worst_seq: Number of the call that it is from.
        severity: Order among mismatches, greatest first.
        next_step: What to do.
        ref_min_us, target_min_us: Shortest time of these calls; -1 where not measured.
        min_tolerance: With which all these calls would pass; None for other kinds than mismatches.
        known: The line of the ledger that excuses these calls; None where none does.
        runs: Numbers of the runs that have it, in a combined file.
        seen_on: The same in words, ``ranks 0-63`` or ``rank 17 only``; empty in the file of one run.
        everywhere: Whether all runs of the file have it.
        captured: Number of a call of these whose inputs were kept; -1 where there is none.
        kept: Numbers of all such calls.
        number: Place among all findings of the run, known ones included, from 1.
        commands: Write a script that shows it alone; none where no inputs were kept, or the run has no file.
    """

    kind: str
    op: str
    cause: Cause | None
    explanation: str
    evidence: str
    confidence: float
    missing_kernels: tuple[str, ...]
    modules: tuple[str, ...]
    n_modules: int
    phases: tuple[str, ...]
    sites: tuple[str, ...]
    n_sites: int
    inputs: tuple[str, ...]
    n_inputs: int
    first_seq: int
    first_step: int
    n_calls: int
    n_calls_of_op: int
    worst: TensorDiff | None
    worst_seq: int
    severity: float
    next_step: str
    ref_min_us: float
    target_min_us: float
    runs: tuple[int, ...] = ()
    seen_on: str = ""
    everywhere: bool = True
    min_tolerance: MinTolerance | None = None
    known: KnownLine | None = None
    captured: int = -1
    number: int = 0
    commands: tuple[str, ...] = ()
    kept: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Note:
    """Calls that are no fault but were not plainly verified either, or that shadowrun failed on.

    Attributes:
        status: Theirs.
        op: Operator.
        cause, explanation, evidence: Why; the evidence of the first call.
        n_calls: How many.
        first_seq: Number of the first.
    """

    status: Status
    op: str
    cause: Cause | None
    explanation: str
    evidence: str
    n_calls: int
    first_seq: int


def find(table: Table, data: DataFile, *, slow_ratio: float, ledger: Ledger | None = None) -> list[Finding]:
    """All findings, the most actionable first; those that a ledger excuses are findings of their own."""
    grouped: dict[tuple[str, str, Cause | None, str, KnownLine | None], list[Row]] = defaultdict(list)
    totals: Counter[str] = Counter()
    for row in table.rows:
        totals[row.context.op] += row.group.n
        kind = _KIND_OF.get(row.outcome.status)
        if kind is not None and not row.outcome.is_own_failure:
            known = ledger.excuse(kind, row.context.op, (row.context.module,)) if ledger else None
            key = kind, row.context.op, row.outcome.cause, without_numbers(row.outcome.explanation), known
            grouped[key].append(row)
    tolerances = min_tolerances(data) if any(kind == "mismatch" for kind, *_ in grouped) else {}
    found = [
        dataclasses.replace(
            _finding(kind, cause, _worst(rows).outcome.explanation, rows, n_calls_of_op=totals[op], data=data),
            min_tolerance=_passes_with(rows, tolerances) if kind == "mismatch" else None,
            known=known,
        )
        for (kind, op, cause, _, known), rows in grouped.items()
    ]
    for slow in _slow(table, data, totals, slow_ratio):
        modules = unique(row.context.module for row in table.rows if row.context.op == slow.op)
        known = ledger.excuse("slow", slow.op, modules) if ledger else None
        found.append(dataclasses.replace(slow, known=known))
    found.sort(key=lambda f: (KINDS.index(f.kind), -f.severity, -_volume(f), f.first_seq))
    return [
        dataclasses.replace(finding, number=number, commands=_commands(finding, number, data))
        for number, finding in enumerate(found, start=1)
    ]


def note(table: Table, data: DataFile) -> list[Note]:
    """What was not verified, and matches with a cause that a reader should know of, by number of calls."""
    return _notes(
        table,
        data,
        lambda row: (
            (
                row.outcome.status is Status.UNVERIFIED
                or (row.outcome.status is Status.MATCH and row.outcome.cause not in (None, Cause.ROUNDING))
            )
            and not row.outcome.is_own_failure
        ),
    )


def own_failures(table: Table, data: DataFile) -> list[Note]:
    """Calls on which shadowrun itself failed; never the target's fault."""
    return _notes(table, data, lambda row: row.outcome.is_own_failure)


def _volume(finding: Finding) -> int:
    """Among mismatches, severity decides and the order of calls breaks ties; elsewhere the number of calls."""
    return 0 if finding.kind == "mismatch" else finding.n_calls


def _finding(
    kind: str, cause: Cause | None, explanation: str, rows: list[Row], *, n_calls_of_op: int, data: DataFile
) -> Finding:
    worst_row = _worst(rows)
    worst_seq = worst_row.group.worst_seq
    worst = worst_diff(data, worst_seq)
    evidence, confidence = _evidence(data, worst_seq)
    kernels = unique(row.outcome.missing_kernel for row in rows)
    modules = unique(row.context.module for row in rows)
    sites = unique(row.context.site for row in rows)
    inputs = unique(row.context.inputs for row in rows)
    op = rows[0].context.op
    first = min((row.group for row in rows), key=lambda g: (g.first_step, g.first_seq))
    runs = tuple(sorted({number for row in rows for number in row.group.sources})) if data.sources else ()
    ref_min = min((row.group.ref_us_min for row in rows if row.group.n_ref), default=-1.0)
    target_min = min((row.group.target_us_min for row in rows if row.group.n_target), default=-1.0)
    kept = _kept(kind, rows, captured_calls(data))
    advice = next_step(
        kind,
        cause,
        op=op,
        why=explanation,
        kernel=" and ".join(kernels[:2]),
        site=sites[0] if sites else "",
        call=worst_call(worst_seq, first.first_seq, sum(row.group.n for row in rows)),
        ratio=target_min / ref_min if ref_min > 0 else math.inf,
    )
    return Finding(
        kind=kind,
        op=op,
        cause=cause,
        explanation=explanation,
        evidence=evidence,
        confidence=confidence,
        missing_kernels=kernels,
        modules=modules[:MAX_LISTED],
        n_modules=len(modules),
        phases=unique(row.context.phase for row in rows),
        sites=sites[:MAX_LISTED],
        n_sites=len(sites),
        inputs=inputs[:MAX_LISTED],
        n_inputs=len(inputs),
        first_seq=first.first_seq,
        first_step=first.first_step,
        n_calls=sum(row.group.n for row in rows),
        n_calls_of_op=n_calls_of_op,
        worst=worst,
        worst_seq=worst_seq,
        severity=_severity(cause, worst_row.group.severity) if kind == "mismatch" else 0.0,
        next_step=advice,
        ref_min_us=ref_min,
        target_min_us=target_min,
        runs=runs,
        seen_on=name_runs(data.sources, runs),
        everywhere=len(runs) == len(data.sources),
        captured=kept[0] if kept else -1,
        kept=kept,
    )


def _commands(finding: Finding, number: int, data: DataFile) -> tuple[str, ...]:
    """By the number, and, where that shows another call than the worst, by the worst call's."""
    if finding.captured < 0 or finding.cause is Cause.RANDOMNESS or data.path is None:
        return ()
    shown = [command("repro", data.path, "--finding", str(number))]
    if finding.worst_seq in finding.kept and finding.worst_seq != finding.captured:
        shown.append(command("repro", data.path, "--call", str(finding.worst_seq)))
    return tuple(shown)


def _kept(kind: str, rows: list[Row], kept: dict[int, tuple[int, int, str]]) -> tuple[int, ...]:
    """Those of these calls whose inputs were kept; of a slow operator, one that was right comes first."""
    of = {(row.group.context_id, row.group.outcome_id): row.outcome.status for row in rows}
    found = [(seq, of[context, outcome]) for seq, (context, outcome, _) in kept.items() if (context, outcome) in of]
    if kind == "slow":
        found.sort(key=lambda call: call[1] is not Status.MATCH)
    return tuple(seq for seq, _ in found)


def without_numbers(explanation: str) -> str:
    """An explanation's kind: ``scaled by 0.5`` and ``scaled by 0.7`` are one fault with two figures."""
    return _NUMBER.sub("#", explanation)


def _passes_with(rows: list[Row], tolerances: dict[tuple[int, int], MinTolerance]) -> MinTolerance:
    return least(tolerances.get((row.group.context_id, row.group.outcome_id), NOTHING) for row in rows)


def _worst(rows: list[Row]) -> Row:
    return max(rows, key=lambda row: (row.group.severity, -row.group.worst_seq))


def _severity(cause: Cause | None, worst: float) -> float:
    """Differences of class and form above all others; what is not the target's fault below."""
    if cause in _NOT_THE_TARGET:
        return worst - 1e7
    return worst + (2e6 if cause in _FORM_CAUSES else 0.0)


def _slow(table: Table, data: DataFile, totals: Counter[str], slow_ratio: float) -> list[Finding]:
    """Operators that run on the target, but whose quickest call is far slower than on the reference."""
    by_op: dict[str, list[Row]] = defaultdict(list)
    for row in table.rows:
        ran = row.outcome.status in (Status.MATCH, Status.MISMATCH, Status.UNVERIFIED)
        if ran and row.group.n_ref and row.group.n_target:
            by_op[row.context.op].append(row)
    found = []
    for op, rows in by_op.items():
        ref = min(row.group.ref_us_min for row in rows)
        target = min(row.group.target_us_min for row in rows)
        n = sum(min(row.group.n_ref, row.group.n_target) for row in rows)
        if n >= MIN_TIMED_CALLS and target >= slow_ratio * ref and target - ref >= MIN_SLOWER_US:
            explanation = f"{target / ref:.3g} times as long as on the reference" if ref > 0 else "far slower"
            slow = _finding("slow", Cause.SLOW, explanation, rows, n_calls_of_op=totals[op], data=data)
            evidence = (
                f"quickest of {n} calls: {target / 1000:.3g} ms on the target, {ref / 1000:.3g} ms on the reference"
            )
            found.append(dataclasses.replace(slow, evidence=evidence, confidence=1.0, worst=None))
    return found


def _notes(table: Table, data: DataFile, wanted: Callable[[Row], bool]) -> list[Note]:
    grouped: dict[tuple[Status, str, Cause | None, str], list[Row]] = defaultdict(list)
    for row in filter(wanted, table.rows):
        grouped[row.outcome.status, row.context.op, row.outcome.cause, row.outcome.explanation].append(row)
    notes = [
        Note(
            status,
            op,
            cause,
            explanation,
            _evidence(data, rows[0].group.first_seq)[0],
            sum(row.group.n for row in rows),
            rows[0].group.first_seq,
        )
        for (status, op, cause, explanation), rows in grouped.items()
    ]
    return sorted(notes, key=lambda n: (-n.n_calls, n.first_seq))


def worst_diff(data: DataFile, seq: int) -> TensorDiff | None:
    """The worst of a call's differences; None where it had none."""
    diffs = read_diffs(data, [seq]).get(seq, [])
    return max(
        diffs,
        key=lambda d: (
            d.n_nan + d.n_inf > 0,
            bool(d.detail),
            d.n_mismatched > 0,
            d.excess_actual,
            greatest([d.max_rel], 0),
        ),
        default=None,
    )


def _evidence(data: DataFile, seq: int) -> tuple[str, float]:
    """Evidence and confidence of a call; nothing for one that was folded."""
    sql = "select evidence, confidence from call join verdict on verdict.id = verdict_id where seq = ?"
    row = next(data.query(sql, (seq,)), ("", 1.0))
    return row[0], decode_float(row[1])
