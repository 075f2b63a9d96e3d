"""What a run means: a data file in, small tables out."""

from shadowrun.analysis.coverage import Coverage, MissingKernel, OperatorCoverage, cover
from shadowrun.analysis.drift import DriftStep, trace_drift
from shadowrun.analysis.findings import KINDS, Finding, Note, find, note, own_failures, without_numbers
from shadowrun.analysis.gate import FAIL_ON, Gate, judge
from shadowrun.analysis.known import Known, Ledger, LineUse
from shadowrun.analysis.mintolerance import MinTolerance
from shadowrun.analysis.regions import Regions, RegionSummary, summarise_regions
from shadowrun.analysis.summary import OperatorSummary, count_statuses, summarise
from shadowrun.analysis.table import Skipped, Step, Table

__all__ = [
    "FAIL_ON",
    "KINDS",
    "Coverage",
    "DriftStep",
    "Finding",
    "Gate",
    "Known",
    "Ledger",
    "LineUse",
    "MinTolerance",
    "MissingKernel",
    "Note",
    "OperatorCoverage",
    "OperatorSummary",
    "RegionSummary",
    "Regions",
    "Skipped",
    "Step",
    "Table",
    "count_statuses",
    "cover",
    "find",
    "judge",
    "note",
    "own_failures",
    "summarise",
    "summarise_regions",
    "trace_drift",
    "without_numbers",
]
