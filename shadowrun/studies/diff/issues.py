"""What `shadowrun diff` found as `Issues`: findings of two runs, or calls of two recordings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shadowrun.analysis import Change
from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip
from shadowrun.studies.diff.compare import Outcome
from shadowrun.studies.diff.rounding import Rounding

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shadowrun.analysis import FindingChange
    from shadowrun.studies.diff.recordings import RecordingDiff

__all__ = ["change_issues", "recording_issues"]

_KINDS: Final = {Outcome.KERNEL: "kernel", Outcome.ALGORITHM: "algorithm"}


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


def recording_issues(found: RecordingDiff, fail_on: Collection[str], limit: int, file: str) -> Issues:
    """One issue for each operator, module and outcome in which a difference arises.

    Args:
        found: The difference of two recordings.
        fail_on: Of `recordings.FAIL_ON`.
        limit: Calls to look at.
        file: Name of the second recording.
    """
    pairs = found.difference.alignment.pairs
    recording = found.difference.first.recording
    rows: dict[tuple[str, ...], Issue] = {}
    for origin in found.flow.origins[:limit]:
        outcome, judged = found.difference.outcome(origin.pair), found.judgements.get(origin.pair)
        context = recording.context_of(int(pairs[origin.pair, 0]))
        key = (str(outcome), context.op, context.module, str(context.phase))
        not_rounding = judged is not None and judged.rounding is Rounding.NO
        fails = {"any", _KINDS.get(outcome, ""), *(("not-rounding",) if not_rounding else ())} & set(fail_on)
        why = f", rounding-sized: {judged.rounding}" if judged is not None else ""
        issue = Issue(
            kind=f"differs by {outcome}",
            cause="",
            name=context.op,
            message=clip(f"{context.op}: {found.labels[1]} differs from {found.labels[0]} by {outcome}{why}"),
            level="error" if fails else "warning",
            key=key,
            lines=(("where", ", ".join(filter(None, (context.module, str(context.phase))))),),
            sites=(context.site,) if context.site else (),
        )
        # The worst of equal ones: a module is called in each step.
        if key not in rows or (issue.level == "error" and rows[key].level != "error"):
            rows[key] = issue
    return Issues(f"{found.labels[1]} since {found.labels[0]}", tuple(rows.values()), file=file)
