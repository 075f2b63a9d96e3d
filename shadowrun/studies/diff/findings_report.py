"""Report of what became of the findings of a run, as a `Document` and as `Issues`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shadowrun.analysis import Change
from shadowrun.report.document import Block, Document, Note, Records, Section
from shadowrun.report.issues import Issue, Issues
from shadowrun.report.run_sections import change_counts, change_table
from shadowrun.report.sanitize import clip

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shadowrun.analysis import FindingChange
    from shadowrun.types import RunInfo

__all__ = ["change_issues", "changes_document", "failures"]

FORMAT: Final = 1
"""Version of the JSON's form."""


def changes_document(
    changes: Sequence[FindingChange],
    infos: tuple[RunInfo, RunInfo],
    labels: tuple[str, str],
    limit: int,
    issues: Issues | None = None,
) -> Document:
    """Report of two runs.

    Args:
        changes: Their findings.
        infos: Of the two runs.
        labels: What the report calls them.
        limit: Rows of each list.
        issues: The findings for CI services.
    """
    counts = {change: sum(c.change is change for c in changes) for change in Change}
    platforms = [f"{info.target} against {info.ref}" for info in infos]
    blocks: list[Block] = []
    # Allowed: one may ask what another device does, but new findings are then not those of a change in between.
    if platforms[0] != platforms[1]:
        blocks.append(Note(f"the runs are of different platforms: {platforms[0]}, and {platforms[1]}", "warn"))
    blocks.append(change_counts(changes))
    if changes:
        table = change_table(changes, limit)
        blocks.append(Section("Findings", (table,), "Calls affected, of all calls of the operator there."))
    title = f"findings of {labels[1]} since {labels[0]}"
    data = {
        "format": FORMAT,
        "of": title,
        "runs": [{"name": label, "target": i.target, "ref": i.ref} for label, i in zip(labels, infos, strict=True)],
        "n_by_change": {str(change): n for change, n in counts.items()},
        "findings": [_data(c) for c in changes[:limit]],
    }
    head = ("change", "kind", "operator", "module", "phase", "cause", "calls_before", "calls_after", "known")
    records = tuple(
        (
            str(c.change), *c.signature, c.before.n_calls if c.before else None,
            c.after.n_calls if c.after else None, c.after.known if c.after else "",
        )
        for c in changes[:limit]
    )  # fmt: skip
    return Document(title, tuple(blocks), data, Records(head, records), issues=issues)


def failures(changes: Sequence[FindingChange], kinds: frozenset[str]) -> list[str]:
    """Why the gate fails; known issues fail nothing.

    Args:
        changes: Findings of two runs.
        kinds: Of ``any``, ``new``, ``worse``.
    """
    found = []
    for change in (Change.NEW, Change.WORSE, Change.GONE):
        wanted = str(change) in kinds or "any" in kinds
        n = sum(c.change is change and not c.is_known for c in changes)
        found += [f"{n:,} findings are {change}"] if n and wanted else []
    return found


def _data(change: FindingChange) -> dict[str, Any]:
    sides = {
        name: None if seen is None else {field: getattr(seen, field) for field in seen.__slots__}
        for name, seen in (("before", change.before), ("after", change.after))
    }
    named = {name: getattr(change.signature, name) for name in ("kind", "op", "module", "phase", "cause")}
    return {"change": str(change.change), **named, **sides}


def change_issues(changes: Sequence[FindingChange], suite: str, fail_on: Collection[str], file: str) -> Issues:
    """One issue for each finding of either run, with what became of it.

    Args:
        changes: Findings of two runs.
        suite: Target of the second.
        fail_on: Of ``any``, ``new``, ``worse``.
        file: Name of the second data file.
    """
    return Issues(suite, tuple(_change(c, suite, fail_on) for c in changes), file=file)


def _change(c: FindingChange, suite: str, fail_on: Collection[str]) -> Issue:
    s = c.signature
    wanted = "any" in fail_on or str(c.change) in fail_on
    serious = c.change in (Change.NEW, Change.WORSE)
    # CI services show notes without failing: what is known or gone must not look like a new fault.
    level = "note" if c.is_known or not serious else "error" if wanted else "warning"
    seen = c.after or c.before
    assert seen is not None
    where = ", ".join(filter(None, (s.module, s.phase)))
    return Issue(
        kind=s.kind,
        cause=s.cause,
        name=s.op,
        message=clip(f"{s.op} on {suite}: {s.kind}{f', {s.cause}' if s.cause else ''} is {c.change}"),
        level=level,
        key=tuple(s),
        lines=(("where", where), ("calls", f"{seen.n_calls:,} of {seen.n_calls_of_op:,}")),
        sites=(seen.site,) if seen.site else (),
        known=c.after.known if c.after else "",
        change=str(c.change),
    )
