"""The findings of a run as `Issues`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.report.descriptions import describe_cause, finding_facts
from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shadowrun.analysis import Finding, OperatorSummary, SinceBaseline
    from shadowrun.types import RunInfo

__all__ = ["run_issues"]


def run_issues(
    info: RunInfo,
    findings: Sequence[Finding],
    known: Sequence[Finding],
    operators: Sequence[OperatorSummary],
    fail_on: Collection[str],
    since: SinceBaseline | None = None,
) -> Issues:
    """All findings, known issues included, and the operators without one.

    Args:
        info: Description of the run.
        findings: New findings.
        known: Findings that the ledger excuses.
        operators: All operators.
        fail_on: Kinds that fail the run; ``new`` and ``worse`` are those since the baseline.
        since: What became of the findings of a baseline.
    """
    changes = since.by_finding() if since is not None else {}
    change = {
        f.number: str(changes.get((f.kind, f.op, str(f.cause or ""), f.known is not None), ""))
        for f in (*findings, *known)
    }
    failing = {f.number for f in findings if {f.kind, change[f.number]} & set(fail_on)}
    rows = [_issue(f, info.target, "error" if f.number in failing else "warning", change[f.number]) for f in findings]
    rows += [_issue(f, info.target, "note", change[f.number]) for f in known]
    named = {issue.name for issue in rows}
    passed = tuple(o.op for o in operators if o.n_match and o.op not in named)
    return Issues(info.target, tuple(rows), passed, info.argv[0] if info.argv else "")


def _issue(finding: Finding, target: str, level: str, change: str) -> Issue:
    why = describe_cause(finding.cause, finding.explanation, finding.evidence, finding.confidence)
    message = clip(f"{finding.op} on {target}: {finding.kind}{f', {why}' if why else ''}")
    facts = finding_facts(finding)
    # Without line and explanation, which change with the program while the fault stays: as `analysis.Signature`.
    key = (
        *(finding.kind, finding.op, str(finding.cause or "")),
        *(*finding.modules[:1], *map(str, finding.phases[:1])),
    )
    reason = finding.known.reason if finding.known is not None else ""
    return Issue(
        kind=finding.kind,
        cause=str(finding.cause or ""),
        name=finding.op,
        message=message,
        level=level,
        key=key,
        lines=tuple((fact.label, fact.text) for fact in facts if fact.label != "why"),
        sites=finding.sites,
        known=reason,
        change=change,
    )
