"""The coverage of a run as a `Document`."""

from __future__ import annotations

import dataclasses
import html
from typing import TYPE_CHECKING

from shadowrun.analysis import ApiCoverage, Coverage
from shadowrun.report.bars import stacked_bars
from shadowrun.report.document import (
    TONES,
    Block,
    Cell,
    Column,
    Document,
    Fact,
    Facts,
    Limits,
    Note,
    Records,
    Section,
    Table,
    status_span,
)
from shadowrun.report.formatting import first_few_cell
from shadowrun.report.sanitize import MAX_WHOLE, clip, sanitize

if TYPE_CHECKING:
    from shadowrun.types import RunInfo

__all__ = ["api_document", "coverage_document", "notebook_api_coverage", "notebook_coverage"]

FORMAT = 1
"""Version of the JSON's form."""
MAX_NAMES = 4
# More than a run has operators: this report is the list of all of them.
_LIMITS = Limits(500, 500, 500)
_CALLS = Column("calls", "number")
_FUNCTION_COLUMNS = (
    Column("function", "name"), Column("coverage"), _CALLS, Column("supported", "number"),
    Column("mismatched", "number", 1), Column("lacks"),
)  # fmt: skip


def coverage_document(coverage: Coverage, info: RunInfo) -> Document:
    """Which operators the target has, which kernels it lacks, and which modules need them."""
    shown = sanitize(coverage)  # for the blocks; the JSON keeps names as they are
    n = coverage.n_by_state["supported"]
    facts = [
        Fact("operators", _share(n, coverage.n_operators, coverage.percent_operators)),
        Fact("calls", _share(coverage.n_supported_calls, coverage.n_calls, coverage.percent_calls)),
    ]
    if coverage.fallback_share:
        facts.append(Fact("fallbacks", f"{100 * coverage.fallback_share:.2g} % of the time on the target"))
    n_skipped = sum(skipped.n for skipped in coverage.skipped)
    facts.append(Fact("not counted", f"{n_skipped:,} calls of views and other operators that compute nothing"))
    blocks: list[Block] = [Note(f"On {info.target} the program {coverage.verdict}."), Facts(tuple(facts))]
    blocks += stacked_bars([("operators", coverage.n_by_state)], "Operators by state", "operators")
    blocks += [_operators(shown, state) for state, n in coverage.n_by_state.items() if n and state != "supported"]
    blocks += [block for block in (_kernels(shown), _modules(shown)) if block is not None]
    data = {
        "format": FORMAT,
        # Properties, which the JSON of `coverage` lacks: it has the fields of dataclasses only.
        "target": info.target,
        "ref": info.ref,
        "percent_operators": coverage.percent_operators,
        "percent_calls": coverage.percent_calls,
        "coverage": coverage,
    }
    rows = ([getattr(o, field.name) for field in dataclasses.fields(o)] for o in coverage.operators)
    records = Records(
        ("op", "state", "n_calls", "n_supported_calls", "missing_kernels", "target_us"),
        tuple(tuple(", ".join(v) if isinstance(v, tuple) else v for v in row) for row in rows),
    )
    return Document(f"coverage: {info.target} against {info.ref}", tuple(blocks), data, records)


def api_document(coverage: ApiCoverage, info: RunInfo) -> Document:
    """Which functions and modules of torch the target runs in full, in part or not at all."""
    shown = sanitize(coverage)  # for the blocks; the JSON keeps names as they are
    n = len(coverage.functions)
    facts = [
        Fact(grade, _share(coverage.n_by_grade[grade], n, coverage.percent(grade)))
        for grade in reversed(tuple(coverage.n_by_grade))
        if grade != "unverified" or coverage.n_by_grade[grade]
    ]
    facts.append(Fact("not counted", f"{coverage.n_other_calls:,} calls that no function of torch made"))
    lead = f"Functions and modules of torch that the program called, on {info.target}."
    table = Table(_FUNCTION_COLUMNS, _functions(shown), noun="functions: -f json has all", limits=_LIMITS)
    data = {
        "format": FORMAT,
        "target": info.target,
        "ref": info.ref,
        "percent": {grade: coverage.percent(grade) for grade in coverage.n_by_grade},
        "coverage": coverage,
    }
    names = ("function", "grade", "n_calls", "n_supported_calls", "n_mismatched_calls", "lacking", "operators")
    values = ([getattr(f, name) for name in names] for f in coverage.functions)
    records = Records(names, tuple(tuple(", ".join(v) if isinstance(v, tuple) else v for v in row) for row in values))
    blocks: tuple[Block, ...] = (Note(lead), Facts(tuple(facts)), Section("Functions", (table,), count=n))
    return Document(f"functions: {info.target} against {info.ref}", blocks, data, records)


def _functions(coverage: ApiCoverage) -> tuple[tuple[Cell, ...], ...]:
    return tuple(
        (
            f.function,
            f.grade,
            f"{f.n_calls:,}",
            f"{f.n_supported_calls:,}",
            f"{f.n_mismatched_calls:,}",
            first_few_cell(f.lacking),
        )
        for f in coverage.functions
    )


class _NotebookCoverage(Coverage):
    __slots__ = ()

    def _repr_html_(self) -> str:
        shown = sanitize(self)
        rows = tuple(
            (
                o.op,
                (status_span(o.state),),
                f"{o.n_calls:,}",
                f"{o.n_supported_calls:,}",
                first_few_cell(o.missing_kernels),
            )
            for o in shown.operators
        )
        columns = (
            Column("operator", "name"), Column("state"), _CALLS, Column("supported", "number"),
            Column("missing kernels"),
        )  # fmt: skip
        n = self.n_by_state["supported"]
        operators = f"{_share(n, self.n_operators, self.percent_operators)} operators"
        calls = f"{_share(self.n_supported_calls, self.n_calls, self.percent_calls)} calls"
        return _html(f"The program {self.verdict}; {operators}, {calls} run on the target.", columns, rows)


class _NotebookApiCoverage(ApiCoverage):
    __slots__ = ()

    def _repr_html_(self) -> str:
        grades = ", ".join(f"{n:,} {grade}" for grade, n in self.n_by_grade.items() if n)
        return _html(f"{len(self.functions):,} functions: {grades}", _FUNCTION_COLUMNS, _functions(sanitize(self)))


def notebook_coverage(coverage: Coverage) -> Coverage:
    """The same with a table for notebooks."""
    return _NotebookCoverage(*(getattr(coverage, field.name) for field in dataclasses.fields(coverage)))


def notebook_api_coverage(coverage: ApiCoverage) -> ApiCoverage:
    """The same with a table for notebooks."""
    return _NotebookApiCoverage(*(getattr(coverage, field.name) for field in dataclasses.fields(coverage)))


def _html(text: str, columns: tuple[Column, ...], rows: tuple[tuple[Cell, ...], ...]) -> str:
    from shadowrun.report.formats.html import table_html  # imports jinja2

    return f"<p>{html.escape(clip(text, MAX_WHOLE))}</p>{table_html(Table(columns, rows))}"


def _operators(coverage: Coverage, state: str) -> Section:
    """The operators in one state."""
    rows = tuple(
        # An operator without a kernel of its own would be listed twice in its row.
        (o.op, f"{o.n_calls:,}", ", ".join(kernel for kernel in o.missing_kernels if kernel != o.op))
        for o in coverage.operators
        if o.state == state
    )
    table = Table((Column("operator", "name"), _CALLS, Column("missing kernels")), rows, limits=_LIMITS)
    return Section(state.capitalize(), (table,), count=len(rows), tone=TONES[state])


def _kernels(coverage: Coverage) -> Section | None:
    rows = tuple(
        (k.kernel, f"{k.n_calls:,}", first_few_cell(k.modules, shown=MAX_NAMES)) for k in coverage.missing_kernels
    )
    table = Table((Column("kernel", "name"), _CALLS, Column("modules")), rows, limits=_LIMITS)
    return Section("Kernels to write", (table,), "Those that most calls need first.", len(rows)) if rows else None


def _modules(coverage: Coverage) -> Section | None:
    lacking = [module for module in coverage.modules if module.lacking]
    rows = tuple(
        (
            m.module or "(outside of modules)",
            f"{m.n_calls:,}",
            f"{100 * m.n_supported_calls / m.n_calls:.1f} %",
            first_few_cell(m.lacking, shown=MAX_NAMES),
        )
        for m in lacking
    )
    columns = (Column("module", "name"), _CALLS, Column("supported", "number"), Column("lacks"))
    table = Table(columns, rows, noun="modules: -f json has all", limits=Limits(20, 50, 500))
    lead = f"Modules that call an operator which the target lacks, of {len(coverage.modules):,}."
    return Section("Modules", (table,), lead, len(rows)) if rows else None


def _share(n: int, total: int, percent: float) -> str:
    return f"{n:,} of {total:,} ({percent:.1f} %)"
