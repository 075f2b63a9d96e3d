"""The findings of a run as `Issues`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.report.descriptions import describe_cause, finding_facts
from shadowrun.report.issues import Issue, Issues
from shadowrun.report.sanitize import clip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from shadowrun.analysis import Finding, OperatorSummary
    from shadowrun.types import RunInfo

__all__ = ["run_issues"]


def run_issues(
    info: RunInfo,
    findings: Iterable[Finding],
    known: Iterable[Finding],
    operators: Sequence[OperatorSummary],
    fail_on: Collection[str],
) -> Issues:
    """All findings, known issues included, and the operators without one.

    Args:
        info: Description of the run.
        findings: New findings.
        known: Findings that the ledger excuses.
        operators: All operators.
        fail_on: Kinds that fail the run.
    """
    rows = [_issue(f, info.target, "error" if f.kind in fail_on else "warning") for f in findings]
    rows += [_issue(f, info.target, "note") for f in known]
    named = {issue.name for issue in rows}
    passed = tuple(o.op for o in operators if o.n_match and o.op not in named)
    return Issues(info.target, tuple(rows), passed, info.argv[0] if info.argv else "")


def _issue(finding: Finding, target: str, level: str) -> Issue:
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
    )
