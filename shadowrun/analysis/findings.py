"""Findings: failing calls grouped by kind, operator, cause and explanation."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.analysis.advice import next_step, worst_call
from shadowrun.analysis.min_tolerance import NOTHING, MinTolerance, least_tolerance, min_tolerances
from shadowrun.analysis.summary import unique
from shadowrun.analysis.wording import shell_command
from shadowrun.settings import KINDS
from shadowrun.store.captured_inputs import captured_calls
from shadowrun.store.codec import decode_float
from shadowrun.store.combine.combined_runs import name_runs
from shadowrun.store.groups import greatest
from shadowrun.store.records import read_diffs
from shadowrun.types import Cause, Status
from shadowrun.visible_text import MAX_WHOLE, clip

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.analysis.call_groups import CallGroups, Row
    from shadowrun.analysis.known_issues import KnownIssues
    from shadowrun.settings import KnownLine
    from shadowrun.store.datafile import DataFile
    from shadowrun.types import OpRecord, TensorDiff

__all__ = [
    "KINDS",
    "KIND_OF",
    "Finding",
    "Note",
    "collect_findings",
    "collect_internal_failures",
    "collect_notes",
    "finding_key",
    "without_numbers",
    "worst_diff",
]


# One slow call may have waited for a processor or woken the thread pool: 12 ms were seen for a call of 0.4 ms.
MIN_TIMED_CALLS = 3
# A ratio alone says nothing of a call of some microseconds: the launch of a kernel takes as long.
MIN_SLOWER_US = 1000.0
# Reports name the first ones: a loop over layers gives one fault hundreds of modules.
MAX_LISTED = 5
# Not the digits of a name such as bf16 or tf32, which are no figures.
_NUMBER = re.compile(r"(?<![A-Za-z])-?\d[\d.]*(?:e[+-]?\d+)?")

KIND_OF = {
    Status.UNSUPPORTED: "unsupported",
    Status.ERROR: "error",
    Status.MISMATCH: "mismatch",
    Status.FALLBACK: "fallback",
}
"""Status of calls to the kind of their finding."""
# No tolerance helps against these, so they are before any difference of values.
_FORM_CAUSES = (Cause.METADATA, Cause.EXCEPTIONAL_VALUES)
# Last: work on the target does not change these.
_NOT_THE_TARGET = (Cause.PROPAGATED, Cause.REFERENCE, Cause.RANDOMNESS, Cause.NON_DETERMINISM)


@dataclass(frozen=True, slots=True, repr=False)
class Finding:
    """Calls of one operator with one fault.

    Attributes:
        kind: One of `KINDS`; the gate selects by it.
        op: ``aten::add.Tensor``.
        cause, explanation: Cause, and its explanation.
        evidence, confidence: Those of the worst call.
        missing_kernels: Kernels that the target lacked.
        modules: The first module paths, of `n_modules`.
        phases: Parts of the training step.
        sites: The first source lines, of `n_sites`.
        inputs: The first inputs, of `n_inputs`.
        first_seq, first_step: Number and step of the first call.
        n_calls: Calls affected, of `n_calls_of_op`.
        worst: Worst difference; None if no tensors were compared.
        worst_seq: Number of its call.
        severity: Rank among mismatches, the greatest first.
        next_step: Recommended action.
        ref_min_us, target_min_us: Shortest time of these calls in microseconds; -1 if not measured.
        min_tolerance: Tolerance with which all these calls would pass; None for other kinds than mismatches.
        known: The known issue that excuses these calls; None for a new finding.
        runs: Numbers of the runs that have it, in a combined file.
        seen_on: The runs in words, ``ranks 0-63`` or ``rank 17 only``; empty for a single run.
        everywhere: Whether all runs of the file have it.
        captured: Number of one of these calls whose inputs were stored; -1 if there is none.
        kept: Numbers of all such calls.
        number: Place among all findings of the run, known issues included, from 1.
        commands: Commands that write a stand-alone script; empty without stored inputs or a data file.
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

    def __repr__(self) -> str:
        """One line: ten findings fit on a screen."""
        where = self.sites[0] if self.sites else "line unknown"
        what = f"{clip(self.what)}, {self.n_calls:,} of {self.n_calls_of_op:,} calls"
        return f"<Finding {self.number}: {what}, {clip(where)}>"

    def __str__(self) -> str:
        """What, where, the evidence, and what to do next."""
        n_more = self.n_modules - len(self.modules)
        modules = ", ".join(self.modules) + (f" and {n_more} more" if n_more > 0 else "")
        facts = {
            "where": self.sites[0] if self.sites else "line unknown",
            "module": modules or "outside of any",
            "evidence": self.evidence,
            "next": self.next_step,
        }
        title = f"{self.number}. {clip(self.what)}: {self.n_calls:,} of {self.n_calls_of_op:,} calls"
        # As in a report: the texts may be those of a file.
        return "\n   ".join((title, *(f"{name:9} {clip(text, MAX_WHOLE)}" for name, text in facts.items() if text)))

    @property
    def what(self) -> str:
        """``mismatch of aten::mm (reduced precision: products in bf16)``."""
        return f"{self.kind} of {self.op}" + (f" ({self.cause_text})" if self.cause_text else "")

    @property
    def cause_text(self) -> str:
        """Cause and explanation in one text."""
        return ": ".join(text for text in (str(self.cause or ""), self.explanation) if text)


@dataclass(frozen=True, slots=True)
class Note:
    """Calls that could not be verified, matches with a remarkable cause, or failures of shadowrun.

    Attributes:
        status: Status of the calls.
        op: Operator.
        cause, explanation, evidence: Reason; the evidence is that of the first call.
        n_calls: Number of calls.
        first_seq: Number of the first call.
    """

    status: Status
    op: str
    cause: Cause | None
    explanation: str
    evidence: str
    n_calls: int
    first_seq: int


def collect_findings(
    table: CallGroups, data: DataFile, *, slow_ratio: float, ledger: KnownIssues | None = None
) -> list[Finding]:
    """All findings, the most actionable first; calls that a ledger excuses form separate findings."""
    grouped: dict[FindingKey, list[Row]] = defaultdict(list)
    totals: Counter[str] = Counter()
    for row in table.rows:
        totals[row.context.op] += row.group.n
        key = finding_key(row, ledger)
        if key is not None:
            grouped[key].append(row)
    # The query reads every difference: only if a mismatch needs it.
    tolerances = min_tolerances(data) if any(kind == "mismatch" for kind, *_ in grouped) else {}
    # Once, and by group: a file may have as many findings as captured calls.
    captured = _captured(data)
    found = [
        dataclasses.replace(
            _finding(kind, cause, _worst(rows).outcome.explanation, rows, totals[op], data, captured),
            min_tolerance=_passes_with(rows, tolerances) if kind == "mismatch" else None,
            known=known,
        )
        for (kind, op, cause, _, known), rows in grouped.items()
    ]
    # Slowness is a property of the operator, not of single calls, so all its modules have to be excused.
    modules = _modules(table) if ledger else {}
    for slow in _slow(table, data, totals, slow_ratio, captured):
        known = ledger.excuse("slow", slow.op, tuple(modules[slow.op])) if ledger else None
        found.append(dataclasses.replace(slow, known=known))
    # By number of calls within a kind, but mismatches by severity: one wrong value weighs more than many roundings.
    found.sort(key=lambda f: (KINDS.index(f.kind), -f.severity, -_volume(f), f.first_seq))
    return [
        dataclasses.replace(finding, number=number, commands=_commands(finding, number, data))
        for number, finding in enumerate(found, start=1)
    ]


def finding_of_call(record: OpRecord) -> Finding:
    """A call as a finding of its own, while the run goes on: without a number, and without what other calls add."""
    call, verdict = record.call, record.verdict
    kind = KIND_OF[verdict.status]
    kernels = (record.missing_kernel,) if record.missing_kernel else ()
    worst = max(record.diffs, key=_badness, default=None)
    advice = next_step(
        kind, verdict.cause, op=call.op, why=verdict.explanation, kernel=record.missing_kernel, site=call.site,
        call=worst_call(call.seq, call.seq, 1), ratio=math.inf,
    )  # fmt: skip
    return Finding(
        kind=kind, op=call.op, cause=verdict.cause, explanation=verdict.explanation, evidence=verdict.evidence,
        confidence=verdict.confidence, missing_kernels=kernels, modules=(call.module,) if call.module else (),
        n_modules=int(bool(call.module)), phases=(str(call.phase),), sites=(call.site,) if call.site else (),
        n_sites=int(bool(call.site)), inputs=(call.inputs,), n_inputs=1, first_seq=call.seq, first_step=call.step,
        n_calls=1, n_calls_of_op=1, worst=worst, worst_seq=call.seq, severity=0.0, next_step=advice,
        ref_min_us=record.ref_time_us, target_min_us=record.target_time_us,
    )  # fmt: skip


FindingKey = tuple[str, str, "Cause | None", str, "KnownLine | None"]
"""Kind, operator, cause, explanation without figures, and the known issue that excuses the calls."""


def finding_key(row: Row, ledger: KnownIssues | None) -> FindingKey | None:
    """What the calls of one finding have in common; None for calls that are none."""
    kind = KIND_OF.get(row.outcome.status)
    if kind is None or row.outcome.is_own_failure:
        return None
    known = ledger.excuse(kind, row.context.op, (row.context.module,)) if ledger else None
    # Without figures: `scaled by 0.5` and `scaled by 0.7` are one fault, and one finding.
    return kind, row.context.op, row.outcome.cause, without_numbers(row.outcome.explanation), known


def collect_notes(table: CallGroups, data: DataFile) -> list[Note]:
    """Unverified calls, and matches with another cause than rounding, by number of calls."""
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


def collect_internal_failures(table: CallGroups, data: DataFile) -> list[Note]:
    """Calls that shadowrun itself failed to compare."""
    return _notes(table, data, lambda row: row.outcome.is_own_failure)


def _volume(finding: Finding) -> int:
    """Sort key: number of calls, except among mismatches, which are sorted by severity."""
    return 0 if finding.kind == "mismatch" else finding.n_calls


def _finding(
    kind: str,
    cause: Cause | None,
    explanation: str,
    rows: list[Row],
    n_calls_of_op: int,
    data: DataFile,
    captured: _Captured,
) -> Finding:
    worst_row = _worst(rows)
    worst_seq = worst_row.group.worst_seq
    evidence, confidence = _evidence(data, worst_seq)
    kernels, op = unique(row.outcome.missing_kernel for row in rows), rows[0].context.op
    modules = unique(row.context.module for row in rows)
    sites = unique(row.context.site for row in rows)
    inputs = unique(row.context.inputs for row in rows)
    first = min((row.group for row in rows), key=lambda g: (g.first_step, g.first_seq))
    runs = tuple(sorted({number for row in rows for number in row.group.sources})) if data.sources else ()
    ref_min, target_min = _shortest_us(rows)
    kept = _kept(kind, rows, captured)
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
        worst=worst_diff(data, worst_seq),
        worst_seq=worst_seq,
        severity=_severity(cause, worst_row.group.severity) if kind == "mismatch" else 0.0,
        next_step=next_step(
            kind,
            cause,
            op=op,
            why=explanation,
            kernel=" and ".join(kernels[:2]),
            site=sites[0] if sites else "",
            call=worst_call(worst_seq, first.first_seq, sum(row.group.n for row in rows)),
            ratio=target_min / ref_min if ref_min > 0 else math.inf,
        ),
        ref_min_us=ref_min,
        target_min_us=target_min,
        runs=runs,
        seen_on=name_runs(data.sources, runs),
        everywhere=len(runs) == len(data.sources),
        captured=kept[0] if kept else -1,
        kept=kept,
    )


def _shortest_us(rows: list[Row]) -> tuple[float, float]:
    """Time of the fastest call on the reference and on the target, in µs; -1 without any."""
    ref = min((row.group.ref_us_min for row in rows if row.group.n_ref), default=-1.0)
    target = min((row.group.target_us_min for row in rows if row.group.n_target), default=-1.0)
    return ref, target


def _commands(finding: Finding, number: int, data: DataFile) -> tuple[str, ...]:
    """By the number of the finding, and by the worst call if that is another one."""
    # One random call cannot show a wrong distribution.
    if finding.captured < 0 or finding.cause is Cause.RANDOMNESS or data.path is None:
        return ()
    shown = [shell_command("repro", data.path, "--finding", str(number))]
    if finding.worst_seq in finding.kept and finding.worst_seq != finding.captured:
        shown.append(shell_command("repro", data.path, "--call", str(finding.worst_seq)))
    return tuple(shown)


# Context and outcome to the numbers of the calls whose inputs were captured.
_Captured = dict[tuple[int, int], list[int]]


def _captured(data: DataFile) -> _Captured:
    found: _Captured = defaultdict(list)
    for seq, (context, outcome, _) in captured_calls(data).items():
        found[context, outcome].append(seq)
    return found


def _modules(table: CallGroups) -> dict[str, dict[str, None]]:
    """Operator to its modules, each once and in order."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for row in table.rows:
        if row.context.module:
            found[row.context.op][row.context.module] = None
    return found


def _kept(kind: str, rows: list[Row], captured: _Captured) -> tuple[int, ...]:
    """Numbers of the calls whose inputs were captured, for a slow operator a matching one first.

    Inputs are captured for some calls only, which need not include the worst.
    """
    of = {(row.group.context_id, row.group.outcome_id): row.outcome.status for row in rows}
    found = sorted((seq, status) for key, status in of.items() for seq in captured.get(key, ()))
    if kind == "slow":
        found.sort(key=lambda call: call[1] is not Status.MATCH)
    return tuple(seq for seq, _ in found)


def without_numbers(explanation: str) -> str:
    """An explanation without its figures: ``scaled by 0.5`` and ``scaled by 0.7`` are one fault."""
    return _NUMBER.sub("#", explanation)


def _passes_with(rows: list[Row], tolerances: dict[tuple[int, int], MinTolerance]) -> MinTolerance:
    return least_tolerance(tolerances.get((row.group.context_id, row.group.outcome_id), NOTHING) for row in rows)


def _worst(rows: list[Row]) -> Row:
    # Of equals the earliest, as in a second report on the same file.
    return max(rows, key=lambda row: (row.group.severity, -row.group.worst_seq))


def _severity(cause: Cause | None, worst: float) -> float:
    """Exceptional values and metadata rank first; causes outside of the target last."""
    if cause in _NOT_THE_TARGET:
        # Beyond all other severities, which end at 6.1 million (`SEVERITY`, and 2 million below).
        return worst - 1e7
    return worst + (2e6 if cause in _FORM_CAUSES else 0.0)


def _slow(
    table: CallGroups, data: DataFile, totals: Counter[str], slow_ratio: float, captured: _Captured
) -> list[Finding]:
    """Operators whose fastest call on the target is far slower than on the reference."""
    by_op: dict[str, list[Row]] = defaultdict(list)
    for row in table.rows:
        # A fallback is a finding already, and its time is that of the CPU.
        ran = row.outcome.status in (Status.MATCH, Status.MISMATCH, Status.UNVERIFIED)
        if ran and row.group.n_ref and row.group.n_target:
            by_op[row.context.op].append(row)
    found = []
    for op, rows in by_op.items():
        ref = min(row.group.ref_us_min for row in rows)
        # The fastest call: any other may have waited for a processor.
        target = min(row.group.target_us_min for row in rows)
        n = sum(min(row.group.n_ref, row.group.n_target) for row in rows)
        if n >= MIN_TIMED_CALLS and target >= slow_ratio * ref and target - ref >= MIN_SLOWER_US:
            explanation = f"{target / ref:.3g} times as long as on the reference" if ref > 0 else "far slower"
            slow = _finding("slow", Cause.SLOW, explanation, rows, totals[op], data, captured)
            evidence = (
                f"fastest of {n} calls: {target / 1000:.3g} ms on the target, {ref / 1000:.3g} ms on the reference"
            )
            found.append(dataclasses.replace(slow, evidence=evidence, confidence=1.0, worst=None))
    return found


def _notes(table: CallGroups, data: DataFile, wanted: Callable[[Row], bool]) -> list[Note]:
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
    """The worst difference of a call; None if it had none."""
    return max(read_diffs(data, [seq]).get(seq, []), key=_badness, default=None)


def _badness(diff: TensorDiff) -> tuple[bool, bool, bool, float, float]:
    is_exceptional, is_wrong = diff.n_nan + diff.n_inf > 0, diff.n_mismatched > 0
    return is_exceptional, bool(diff.detail), is_wrong, diff.excess_actual, greatest([diff.max_rel], 0)


def _evidence(data: DataFile, seq: int) -> tuple[str, float]:
    """Evidence and confidence of a call; defaults for a call that was only counted."""
    sql = "select evidence, confidence from call join verdict on verdict.id = verdict_id where seq = ?"
    row = next(data.query(sql, (seq,)), ("", 1.0))
    return row[0], decode_float(row[1])
