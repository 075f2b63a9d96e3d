"""What `campaign reproduce` prints: the variant, its outcome on each target, and whether it is the recorded one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from shadowrun.report.document import (
    Column,
    Document,
    Entries,
    Entry,
    Fact,
    Facts,
    GateLine,
    Limits,
    Note,
    Records,
    Section,
    Span,
    Table,
)
from shadowrun.report.sanitize import MAX_NAME, clip
from shadowrun.studies.campaign.causes.reproduce import difference, hex_of, oracle_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.studies.campaign.causes.reproduce import Rerun, WantedVariant
    from shadowrun.studies.campaign.tables import FindingRow, ResultRow
    from shadowrun.studies.zoo.program import Program

__all__ = ["reproduce_document"]

_ALL: Final = Limits(100, 1000, 1000)


def reproduce_document(
    wanted: WantedVariant, again: Rerun, targets: Sequence[str], program: Program | None, calls: Sequence[str] = ()
) -> Document:
    """A variant that was run again.

    Args:
        wanted: What the campaign says of it.
        again: What became of it now.
        targets: Names of the targets.
        program: The program that it was made of; None if it is not known.
        calls: Its operator calls, one a line.
    """
    before = {r.target: r for r in wanted.results}
    after = {r.target: r for r in again.results}
    differences = _differences(wanted, again, before, after)
    blocks: list[Any] = [Facts(tuple(_facts(wanted, again, program)))]
    for t, name in enumerate(targets):
        if (now := after.get(t)) is not None:
            blocks.append(_target(name, now, before.get(t), differences))
    if again.variant.invalid:
        blocks.append(Note(f"invalid: {again.variant.invalid}", "warn"))
    if calls:
        rows = tuple((str(k), text) for k, text in enumerate(calls))
        columns = (Column("call", "number"), Column("operator and arguments", "name"))
        blocks.append(Section("Calls", (Table(columns, rows, noun="calls", limits=_ALL),), count=len(rows)))
    records = Records(
        ("target", "status", "findings", "oracles", "same"),
        tuple((targets[t], r.status, len(r.findings), r.oracles, t not in differences) for t, r in after.items()),
    )
    return Document(
        f"variant {wanted.number if wanted.number >= 0 else 'of a recipe'}",
        tuple(blocks),
        _data(wanted, again, targets, differences),
        records,
        _gate(wanted, differences),
    )


def _facts(wanted: WantedVariant, again: Rerun, program: Program | None) -> list[Fact]:
    facts = []
    if program is not None:
        facts.append(
            Fact("program", f"{program.name} ({program.source}, {program.id}), {len(program.graph.nodes)} calls")
        )
    if again.recipe:
        _, mutations, seed = json.loads(again.recipe)
        steps = ", ".join(f"{name} {json.dumps(params)}" if params else name for name, *params in mutations)
        facts.append(Fact("mutations", steps or "none"))
        facts.append(Fact("seed", str(seed)))
        facts.append(Fact("recipe", again.recipe, "action", command=True))
    if again.variant.identity is not None:
        facts.append(Fact("identity", hex_of(again.variant.identity)))
    if wanted.variant is not None and wanted.variant.duplicate_of >= 0:
        facts.append(Fact("equal to", f"number {wanted.variant.duplicate_of}, whose outcome counts for both"))
    return facts


def _target(name: str, now: ResultRow, then: ResultRow | None, differences: dict[int, str]) -> Section:
    tone = {"ok": "good", "finding": "bad"}.get(now.status, "warn")
    facts = [Fact("status", f"{now.status}{f': {now.reason}' if now.reason else ''}", "strong")]
    facts.append(Fact("operators", f"{len(now.ops)} in {now.n_calls} calls that were judged"))
    if then is None:
        facts.append(Fact("recorded", "nothing: the campaign has no result of it on this target"))
    elif now.target in differences:
        facts.append(Fact("recorded", f"another result: {differences[now.target]}", "strong"))
    else:
        facts.append(Fact("recorded", "the same result"))
    blocks: list[Any] = [Facts(tuple(facts))]
    if verdicts := oracle_words(now.oracles):
        rows = tuple((o, (Span(v, "bad" if v == "differs" else "good"),)) for o, v in verdicts.items())
        blocks.append(Table((Column("oracle", "name"), Column("results")), rows, noun="oracles", limits=_ALL))
    if now.findings:
        blocks.append(Entries(tuple(map(_entry, now.findings)), noun="findings"))
    return Section(clip(name, MAX_NAME), tuple(blocks), tone="" if tone == "good" else tone)


def _entry(f: FindingRow) -> Entry:
    facts = [Fact("why", ", ".join(filter(None, (f.cause, f.explanation))) or "not known", "strong")]
    if f.message:
        facts.append(Fact("evidence", f.message))
    return Entry(f.op or "the program as a whole", tuple(facts), f"{f.kind} {f.dtype} {f.phase}".replace("  ", " "))


def _differences(
    wanted: WantedVariant, again: Rerun, before: dict[int, ResultRow], after: dict[int, ResultRow]
) -> dict[int, str]:
    """What is not as it was recorded, by target; -1 for the variant itself."""
    found = {t: text for t, then in before.items() if t in after and (text := difference(then, after[t]))}
    if wanted.variant is not None and (wanted.variant.invalid or "") != (again.variant.invalid or ""):
        was, now = wanted.variant.invalid or "valid", again.variant.invalid or "valid"
        found[-1] = f"it was {was}, and is {now}"
    return found


def _gate(wanted: WantedVariant, differences: dict[int, str]) -> GateLine | None:
    if wanted.variant is None:
        return None
    if differences:
        return GateLine("DIFFERS from the recorded result", passed=False)
    return GateLine("the same as the recorded result", passed=True)


def _finding_data(f: FindingRow) -> dict[str, str]:
    return {
        "op": f.op,
        "dtype": f.dtype,
        "kind": f.kind,
        "cause": f.cause,
        "explanation": f.explanation,
        "message": f.message,
        "phase": f.phase,
    }


def _data(wanted: WantedVariant, again: Rerun, targets: Sequence[str], differences: dict[int, str]) -> dict[str, Any]:
    return {
        "format": 1,
        "number": wanted.number,
        "recipe": json.loads(again.recipe) if again.recipe else None,
        "identity": None if again.variant.identity is None else hex_of(again.variant.identity),
        "invalid": again.variant.invalid,
        "is_recorded": wanted.variant is not None,
        "results": [
            {
                "target": targets[r.target],
                "status": r.status,
                "reason": r.reason,
                "oracles": oracle_words(r.oracles),
                "ops": dict(r.ops),
                "findings": list(map(_finding_data, r.findings)),
                "difference": differences.get(r.target),
            }
            for r in again.results
        ],
    }
