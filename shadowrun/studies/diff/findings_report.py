"""Report of what became of the findings of a run as a `Document`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shadowrun.analysis import Change
from shadowrun.report.baseline import change_counts, change_table
from shadowrun.report.document import Block, Document, Note, Records, Section

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.analysis import FindingChange
    from shadowrun.report.issues import Issues
    from shadowrun.types import RunInfo

__all__ = ["changes_document", "failures"]

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
