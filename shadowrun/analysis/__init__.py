"""Analyses of a data file: findings, operator summaries, coverage, compiled regions, the gate."""

from shadowrun.analysis.advice import for_authors
from shadowrun.analysis.call_groups import CallGroups, Skipped, Step, read_contexts
from shadowrun.analysis.changes import (
    Baseline,
    Change,
    FindingChange,
    FindingInRun,
    Signature,
    SinceBaseline,
    changes,
    signatures,
)
from shadowrun.analysis.charts import CallReader, Charts
from shadowrun.analysis.coverage import (
    ApiCoverage,
    Coverage,
    FunctionCoverage,
    MissingKernel,
    OperatorCoverage,
    api_coverage,
    operator_coverage,
)
from shadowrun.analysis.findings import (
    KINDS,
    Finding,
    Note,
    collect_findings,
    collect_internal_failures,
    collect_notes,
    finding_of_call,
    without_numbers,
)
from shadowrun.analysis.gate import Gate, evaluate_gate
from shadowrun.analysis.known_issues import KnownIssues, LedgerLineUse, LedgerUse
from shadowrun.analysis.min_tolerance import MinTolerance
from shadowrun.analysis.regions import Regions, RegionSummary, summarise_regions
from shadowrun.analysis.source_lines import (
    FindingOrigin,
    SourceFile,
    SourceLine,
    SourceText,
    find_origins,
    read_source,
    split_site,
)
from shadowrun.analysis.summary import DriftStep, OperatorSummary, count_statuses, summarise, trace_drift

__all__ = [
    "KINDS",
    "ApiCoverage",
    "Baseline",
    "CallGroups",
    "CallReader",
    "Change",
    "Charts",
    "Coverage",
    "DriftStep",
    "Finding",
    "FindingChange",
    "FindingInRun",
    "FindingOrigin",
    "FunctionCoverage",
    "Gate",
    "KnownIssues",
    "LedgerLineUse",
    "LedgerUse",
    "MinTolerance",
    "MissingKernel",
    "Note",
    "OperatorCoverage",
    "OperatorSummary",
    "RegionSummary",
    "Regions",
    "Signature",
    "SinceBaseline",
    "Skipped",
    "SourceFile",
    "SourceLine",
    "SourceText",
    "Step",
    "api_coverage",
    "changes",
    "collect_findings",
    "collect_internal_failures",
    "collect_notes",
    "count_statuses",
    "evaluate_gate",
    "find_origins",
    "finding_of_call",
    "for_authors",
    "operator_coverage",
    "read_contexts",
    "read_source",
    "signatures",
    "split_site",
    "summarise",
    "summarise_regions",
    "trace_drift",
    "without_numbers",
]
