"""The root causes of a campaign as `Issues`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip
from shadowrun.studies.campaign.cause_report import target_name
from shadowrun.studies.campaign.findings import without_flaws

if TYPE_CHECKING:
    from collections.abc import Collection

    from shadowrun.studies.campaign.findings import RootCause
    from shadowrun.studies.campaign.summary import Summary

__all__ = ["campaign_issues"]


def campaign_issues(summary: Summary, fail_on: Collection[str], folder: str) -> Issues:
    """One issue for each root cause.

    Args:
        summary: Figures of the campaign.
        fail_on: Beginnings of verdicts that fail it.
        folder: Of the campaign: generated programs have no source line.
    """
    rows = tuple(_issue(n, cause, summary, fail_on) for n, cause in enumerate(summary.root_causes, 1))
    return Issues(without_flaws(summary.title), rows, file=folder)


def _issue(number: int, cause: RootCause, summary: Summary, fail_on: Collection[str]) -> Issue:
    s, f = cause.signature, cause.smallest.finding
    known = summary.known.get(str(s), "")
    where = ", ".join(without_flaws(target_name(summary, t)) for t in cause.targets)
    why = ", ".join(filter(None, (s.cause, *cause.explanations[:2], f.message)))
    name = s.op or "the program as a whole"
    change = "" if summary.new is None else "new" if str(s) in summary.new else "same"
    fails = any(s.kind.startswith(kind) for kind in fail_on)
    return Issue(
        kind=s.kind,
        cause=s.cause,
        name=f"{name} [{s.dtype}]" if s.dtype else name,
        message=clip(f"root cause {number}: {name} on {where}: {s.kind}{f', {why}' if why else ''}"),
        level="note" if known else "error" if fails else "warning",
        key=(s.kind, s.op, s.dtype, s.cause, s.raised),
        lines=(("seen in", f"{cause.n_variants:,} variants, smallest in number {cause.smallest.number}"),),
        known=known,
        change=change,
    )
