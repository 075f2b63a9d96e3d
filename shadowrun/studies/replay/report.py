"""Report of a replay as a `Document`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from shadowrun.analysis.wording import shell_command
from shadowrun.recording.model import NONE
from shadowrun.report.document import Block, Column, Document, Fact, Facts, Limits, Note, Records, Section, Span, Table
from shadowrun.report.sanitize import clip
from shadowrun.studies.replay.outcomes import NOT_RUN, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from shadowrun.report.document import Cell
    from shadowrun.studies.replay.outcomes import OperatorReplays, Replay, ReplayedCall
    from shadowrun.studies.replay.propagated import PropagatedError

__all__ = ["replay_document"]

FORMAT: Final = 1
"""Version of the JSON's form."""
_LIMITS: Final = Limits(30, 100, 400)
_MAX_WHY: Final = 100
_MAX_REASONS: Final = 8
_TONES: Final = {
    Outcome.EQUAL: "good",
    Outcome.ROUNDING: "good",
    Outcome.UNDECIDED: "dim",
    Outcome.BEYOND: "bad",
    Outcome.FORM: "bad",
    Outcome.RAISED: "bad",
    Outcome.NO_DIGEST: "dim",
    Outcome.NOT_RUN: "warn",
}
_ARBITRATION: Final = {
    "here": "this machine is off: its result is no correct one by the reference",
    "recorded": "the recorded machine is off: the result here is right by the reference",
}


def replay_document(found: Replay, path: Path, limit: int, given: Sequence[str] = ()) -> Document:
    """The report.

    Args:
        found: What was found.
        path: The recording, for commands.
        limit: Rows of each list at most.
        given: Options that chose the platforms, for commands.
    """
    operators = found.by_operator()
    blocks: list[Block] = [Note(text, "warn") for text in found.warnings]
    blocks += [Note(line) for line in _summary(found)]
    if operators:
        lead = "Isolated error: each call got the recorded inputs."
        if found.propagated is not None:
            lead += " Propagated error: the program ran here, and each call got what the calls before it gave."
        blocks.append(Section("Operators", (_operators(found, operators),), lead, count=len(operators)))
    flagged = found.flagged
    if flagged:
        lead = "More than rounding parts them from the recording, or they are faults by the reference here."
        blocks.append(Section("Calls to look at", (_calls(flagged, limit),), lead, count=len(flagged)))
        call = flagged[0].call
        again = shell_command("replay", path, "--call", str(call), *given)
        blocks.append(Facts((Fact("one call again", again, command=True),)))
    outputs = [call for call in found.calls if call.is_output and call.judgement is not None]
    if outputs:
        lead = "Exact where it says so: the recording has all elements of these results."
        table = _outputs(outputs, limit)
        blocks.append(Section("Results of each step's last call", (table,), lead, count=len(outputs)))
    not_run = [call for call in found.calls if call.outcome in NOT_RUN]
    if not_run:
        blocks.append(Section("Captured, and not compared", (_reasons(not_run),), count=len(not_run)))
    return Document(f"{found.name} on {found.target}", tuple(blocks), _data(found, operators, limit), _records(found))


def _summary(found: Replay) -> Iterator[str]:
    yield f"recorded on {found.recorded_on}; replayed on {found.target}" + (
        f", judged by {found.ref} too" if found.ref else ""
    )
    n_run = len(found.calls) - found.count(*NOT_RUN)
    parts = [f"{found.count(o):,} {o.value}" for o in Outcome if o not in NOT_RUN and found.count(o)]
    yield f"{n_run:,} calls replayed" + (f": {', '.join(parts)}" if parts else "")
    n_missing = sum(found.n_missing.values())
    # Each call that was not replayed is counted under a reason: what was not run was not passed.
    left = {
        "without captured inputs": n_missing,
        "captured and not compared": len(found.calls) - n_run,
        "not reached before Ctrl-C": found.n_left,
        "draw random numbers": found.n_random,
        "views and others without values of their own": found.n_without_values,
        "not selected": found.n_unselected,
    }
    said = ", ".join(f"{n:,} {text}" for text, n in left.items() if n)
    if said:
        yield f"not replayed: {said}"
    if found.not_captured:
        reasons = sorted(found.not_captured.items(), key=lambda item: -item[1])[:_MAX_REASONS]
        yield f"inputs not kept, by reason: {'; '.join(f'{reason}: {n:,}' for reason, n in reasons)}"
    flagged = {call.context.op for call in found.flagged}
    if flagged:
        yield f"to look at: {', '.join(sorted(flagged))}"


def _operators(found: Replay, operators: Sequence[OperatorReplays]) -> Table:
    has_ref, is_free = bool(found.ref), found.propagated is not None
    columns = [
        *(Column("operator", "name"), Column("calls", "number"), Column("run", "number"), Column("isolated")),
        *(Column("bits left", "number"), Column("ULP", "number", 1)),
    ]
    columns += [Column("by the reference")] if has_ref else []
    columns += [Column("propagated")] if is_free else []
    rows = []
    for row in operators:
        cells: list[Cell] = [row.op, f"{row.n_calls:,}", f"{sum(row.outcomes.values()):,}", _outcomes(row)]
        cells += [_bits(row.remaining), _ulps(row.min_ulp, row.max_ulp)]
        cells += [_verdicts(row)] if has_ref else []
        cells += [_propagated(row.propagated)] if is_free else []
        rows.append(tuple(cells))
    return Table(tuple(columns), tuple(rows), noun="operators: -f csv lists all", limits=_LIMITS)


def _propagated(found: PropagatedError | None) -> Cell:
    if found is None:
        return "not called"
    if not found.n_differ:
        return (Span(f"{found.n_pairs:,} equal", "good"),)
    bits = "" if found.remaining == NONE else f", {found.remaining} bits left"
    return f"{found.n_differ:,} of {found.n_pairs:,} differ{bits}"


def _outcomes(row: OperatorReplays) -> Cell:
    spans = [Span(f"{row.outcomes[o]:,} {o.value}", _TONES[o]) for o in Outcome if row.outcomes[o]]
    return tuple(spans) or (Span("no inputs", "dim"),)


def _verdicts(row: OperatorReplays) -> Cell:
    tones = {"match": "good", "unverified": "dim"}
    spans = [Span(f"{n:,} {status.value}", tones.get(status.value, "bad")) for status, n in row.verdicts.items()]
    return tuple(spans)


def _calls(calls: Sequence[ReplayedCall], limit: int) -> Table:
    columns = (
        *(Column("call", "number"), Column("operator", "name"), Column("module", detail=1), Column("isolated")),
        *(Column("bits left", "number"), Column("by the reference"), Column("off"), Column("why")),
        Column("line", detail=2),
    )
    rows = tuple(
        (
            *(str(c.call), c.context.op, c.context.module, (Span(c.outcome.value, _TONES[c.outcome]),)),
            *(_bits(c.remaining), _verdict(c), c.arbitration, clip(c.why, _MAX_WHY), c.context.site),
        )
        for c in calls[:limit]
    )
    return Table(columns, rows, max(0, len(calls) - limit), "calls: -f csv lists all", _LIMITS)


def _outputs(calls: Sequence[ReplayedCall], limit: int) -> Table:
    columns = (
        *(Column("step", "number"), Column("call", "number"), Column("operator", "name"), Column("module", detail=1)),
        *(Column("isolated"), Column("ULP", "number"), Column("relative", "number"), Column("exact")),
    )
    rows = tuple(
        (
            *(str(c.step), str(c.call), c.context.op, c.context.module, (Span(c.outcome.value, _TONES[c.outcome]),)),
            *(_ulps(judged.min_ulp, judged.max_ulp), "" if math.isnan(judged.relative) else f"{judged.relative:.3g}"),
            "yes" if judged.is_exact else "no",
        )
        for c in calls[:limit]
        if (judged := c.judgement) is not None
    )
    return Table(columns, rows, max(0, len(calls) - limit), "calls: -f json lists all", _LIMITS)


def _verdict(call: ReplayedCall) -> str:
    verdict = call.verdict
    if verdict is None:
        return ""
    return clip(": ".join(text for text in (verdict.status.value, verdict.explanation) if text), _MAX_WHY)


def _reasons(calls: Sequence[ReplayedCall]) -> Table:
    counts: dict[tuple[str, str], int] = {}
    for call in calls:
        key = call.context.op, clip(call.why, _MAX_WHY)
        counts[key] = counts.get(key, 0) + 1
    rows = tuple((op, f"{n:,}", why) for (op, why), n in counts.items())
    return Table((Column("operator", "name"), Column("calls", "number"), Column("why")), rows, limits=_LIMITS)


def _bits(remaining: int) -> str:
    return "" if remaining == NONE else str(remaining)


def _ulps(least: float, most: float) -> str:
    low = "" if math.isnan(least) else f"{least:.4g}"
    high = "" if math.isnan(most) else f"{most:.4g}"
    # Digests give bounds, and samples a lower one: a single number only where both agree.
    return low if low == high else f"{low or '?'} to {high or '?'}"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _data(found: Replay, operators: Sequence[OperatorReplays], limit: int) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "recording": found.name,
        "recorded_on": found.recorded_on,
        "target": found.target,
        "ref": found.ref or None,
        "warnings": list(found.warnings),
        "n_by_outcome": {o.value: found.count(o) for o in Outcome},
        "n_missing": sum(found.n_missing.values()),
        "n_random": found.n_random,
        "n_without_values": found.n_without_values,
        "n_unselected": found.n_unselected,
        "n_left": found.n_left,
        "not_captured": dict(found.not_captured),
        "operators": [_operator_data(row) for row in operators],
        "flagged": [_call_data(call) for call in found.flagged[:limit]],
        "outputs": [_call_data(call) for call in found.calls if call.is_output][:limit],
        "not_compared": [_call_data(call) for call in found.calls if call.outcome in NOT_RUN][:limit],
        "arbitration": dict(_ARBITRATION),
    }


def _operator_data(row: OperatorReplays) -> dict[str, Any]:
    spread = row.propagated
    return {
        "op": row.op,
        "n_calls": row.n_calls,
        "n_missing": row.n_missing,
        "outcomes": {o.value: n for o, n in row.outcomes.items()},
        "verdicts": {status.value: n for status, n in row.verdicts.items()},
        "off": dict(row.arbitration),
        "remaining": None if row.remaining == NONE else row.remaining,
        "min_ulp": _number(row.min_ulp),
        "max_ulp": _number(row.max_ulp),
        "propagated": None
        if spread is None
        else {
            "n_pairs": spread.n_pairs,
            "n_differ": spread.n_differ,
            "remaining": None if spread.remaining == NONE else spread.remaining,
        },
    }


def _call_data(call: ReplayedCall) -> dict[str, Any]:
    judged, verdict = call.judgement, call.verdict
    return {
        "call": call.call,
        "step": call.step,
        "op": call.context.op,
        "module": call.context.module,
        "phase": str(call.context.phase),
        "site": call.context.site,
        "outcome": call.outcome.value,
        "why": call.why,
        "remaining": None if call.remaining == NONE else call.remaining,
        "min_ulp": None if judged is None else _number(judged.min_ulp),
        "max_ulp": None if judged is None else _number(judged.max_ulp),
        "relative": None if judged is None else _number(judged.relative),
        "is_exact": judged is not None and judged.is_exact,
        "verdict": None
        if verdict is None
        else {
            "status": verdict.status.value,
            "cause": None if verdict.cause is None else verdict.cause.value,
            "explanation": verdict.explanation,
            "evidence": verdict.evidence,
        },
        "off": call.arbitration or None,
    }


def _records(found: Replay) -> Records:
    head = (
        *("call", "step", "operator", "module", "phase", "line", "outcome", "why", "bits_left", "min_ulp", "max_ulp"),
        *("verdict", "cause", "explanation", "off"),
    )
    rows = []
    for call in found.calls:
        data = _call_data(call)
        verdict = data["verdict"] or {"status": "", "cause": "", "explanation": ""}
        names = ("call", "step", "op", "module", "phase", "site", "outcome", "why", "remaining", "min_ulp", "max_ulp")
        rows.append(
            (
                *(_cell(data[name]) for name in names),
                *(_cell(verdict[name]) for name in ("status", "cause", "explanation")),
                call.arbitration,
            )
        )
    return Records(head, tuple(rows))


def _cell(value: Any) -> Any:
    return "" if value is None else value
