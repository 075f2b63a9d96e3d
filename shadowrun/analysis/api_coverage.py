"""Coverage by function: which functions and modules of torch that a program called run on the target.

A function is *full* if the target ran all operators that it made, *partial* if some, and *none* if none. The published
function study counts its functions in this way (success, partial failure, complete failure).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.analysis.coverage import LACKING, STATES, state_of
from shadowrun.types import Status

if TYPE_CHECKING:
    from shadowrun.analysis.call_groups import CallGroups, Row
    from shadowrun.store.datafile import DataFile

__all__ = ["GRADES", "ApiCoverage", "FunctionCoverage", "api_coverage"]

GRADES = ("none", "partial", "unverified", "full")
"""Grades of a function, worst first; unverified: no operator of it could be verified, and none is lacking."""


@dataclass(frozen=True, slots=True)
class FunctionCoverage:
    """One function or module.

    Attributes:
        function: As programs write it: ``F.linear``, ``nn.GRU``.
        grade: One of full, partial, none, unverified.
        n_calls, n_supported_calls: Calls of operators that it made, and those that ran on the target itself.
        n_mismatched_calls: Those of them with a wrong result.
        lacking: Operators that are unsupported, raise or fall back in it, the worst first.
        operators: All operators that it made and that were compared.
    """

    function: str
    grade: str
    n_calls: int
    n_supported_calls: int
    n_mismatched_calls: int
    lacking: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ApiCoverage:
    """Coverage by function.

    Attributes:
        functions: Those that need work first.
        n_by_grade: Grade to number of functions.
        n_other_calls: Calls of operators that no function of torch made, or of another thread.
    """

    functions: tuple[FunctionCoverage, ...]
    n_by_grade: dict[str, int]
    n_other_calls: int

    def percent(self, grade: str) -> float:
        """Share of a grade in the functions, 0 to 100; 0 without functions."""
        return 100.0 * self.n_by_grade[grade] / len(self.functions) if self.functions else 0.0


def api_coverage(table: CallGroups, data: DataFile) -> ApiCoverage:
    """Coverage of the functions that a run with ``api=True`` called."""
    names: dict[int, str] = dict(data.query("select context_id, name from api"))
    by_function: dict[str, list[Row]] = defaultdict(list)
    n_other = 0
    for row in table.rows:
        # Views and calls that were not selected say nothing about what the target has.
        if row.outcome.status is Status.SKIPPED:
            continue
        name = names.get(row.group.context_id)
        if name is None:
            n_other += row.group.n
        else:
            by_function[name].append(row)
    found = [_function(name, rows) for name, rows in by_function.items()]
    found.sort(key=lambda f: (GRADES.index(f.grade), -f.n_calls, f.function))
    counted = Counter(f.grade for f in found)
    return ApiCoverage(tuple(found), {grade: counted[grade] for grade in GRADES}, n_other)


def _function(name: str, rows: list[Row]) -> FunctionCoverage:
    calls: Counter[str] = Counter()
    for row in rows:
        calls[state_of(row)] += row.group.n
    n_lacking = sum(calls[state] for state in LACKING)
    # One supported call is enough: the unverified ones, such as random operators, lack nothing.
    grade = "full" if calls["supported"] else "unverified"
    if n_lacking:
        grade = "partial" if calls["supported"] else "none"
    lacking = sorted({(STATES.index(state_of(row)), row.context.op) for row in rows if state_of(row) in LACKING})
    return FunctionCoverage(
        name,
        grade,
        calls.total(),
        calls["supported"],
        sum(row.group.n for row in rows if row.outcome.status is Status.MISMATCH),
        tuple(dict.fromkeys(op for _, op in lacking)),
        tuple(sorted({row.context.op for row in rows})),
    )
