"""What became of the findings of a baseline, as a section of a report and as a table of `shadowrun diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shadowrun.analysis import Change
from shadowrun.report.document import Block, Column, Limits, Note, Section, Span, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.analysis import FindingChange, FindingInRun, SinceBaseline

__all__ = ["baseline_section", "change_counts", "change_table"]

MAX_ROWS: Final = 50
_TONES: Final = {Change.NEW: "bad", Change.WORSE: "bad", Change.GONE: "good", Change.SAME: "dim"}
_LIMITS: Final = Limits(40, 100, 1000)


def change_counts(changes: Sequence[FindingChange]) -> Note:
    """``2 new  0 worse  1 same  0 gone``."""
    counts = {change: sum(c.change is change for c in changes) for change in Change}
    return Note(tuple(Span(f"{n:,} {change}", _TONES[change] if n else "dim") for change, n in counts.items()))


def change_table(changes: Sequence[FindingChange], limit: int) -> Table:
    """One row for each finding of either run."""
    rows = tuple(
        (
            (Span(str(c.change), _TONES[c.change]),),
            *c.signature,
            _calls(c.before),
            _calls(c.after),
            c.after.known if c.after else "",
        )
        for c in changes[:limit]
    )
    columns = (
        *(Column("change"), Column("kind"), Column("operator", "name"), Column("module"), Column("phase", detail=1)),
        *(Column("cause"), Column("before", "number"), Column("after", "number"), Column("known issue", detail=2)),
    )
    return Table(columns, rows, len(changes) - len(rows), "findings", _LIMITS)


def baseline_section(since: SinceBaseline | None) -> Section | None:
    """Findings that are new, worse or gone since the baseline."""
    if since is None:
        return None
    blocks: list[Block] = [change_counts(since.changes)]
    if since.platforms:
        blocks.append(Note(f"the baseline is of other platforms: {since.platforms}", "warn"))
    changed = [c for c in since.changes if c.change is not Change.SAME]
    if changed:
        blocks.append(change_table(changed, MAX_ROWS))
    lead = "Calls affected, of all calls of the operator there." if changed else ""
    return Section(f"Since {since.name}", tuple(blocks), lead, anchor="baseline")


def _calls(seen: FindingInRun | None) -> str:
    return "" if seen is None else f"{seen.n_calls:,} of {seen.n_calls_of_op:,}"
