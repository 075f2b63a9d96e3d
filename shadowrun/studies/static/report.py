"""Report of static coverage as a `Document`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shadowrun.report.bars import stacked_bars
from shadowrun.report.document import (
    Block,
    Column,
    Document,
    Filter,
    Limits,
    Note,
    Records,
    Section,
    Table,
    status_span,
)
from shadowrun.studies.static.coverage import SPECIFIC, STATES

if TYPE_CHECKING:
    from shadowrun.report.document import Cell
    from shadowrun.studies.static.coverage import StaticCoverage, StaticOperator

__all__ = ["static_document"]

FORMAT = 1
"""Version of the JSON's form."""

_WARNING = "By torch's tables only, nothing ran: they know no dtypes, and not what a generic operator calls in turn."


def static_document(coverage: StaticCoverage, subject: str) -> Document:
    """Report of the operators of `subject` that each device lacks by torch's tables."""
    verdicts = {device: coverage.verdict(device) for device in coverage.devices}
    sources = zip(coverage.devices, coverage.sources, strict=True)
    notes = (Note(f"{device}: {verdicts[device]} (by {source})") for device, source in sources)
    bars = stacked_bars([(d, coverage.n_by_state(d)) for d in coverage.devices], "Operators by state", "operators")
    blocks: list[Block] = [Note(_WARNING, "dim"), *notes, *bars, _states(coverage)]
    lacking = [o for o in coverage.operators if {"absent", "fallback"} & set(o.states)]
    if lacking:
        blocks.append(Section("Operators that a device lacks", (_operators(coverage, lacking),), count=len(lacking)))
    data = {
        "format": FORMAT,
        "of": subject,
        "static": True,
        "devices": {
            device: {
                "source": source,
                "verdict": verdicts[device],
                "percent": coverage.percent(device),
                "n_by_state": coverage.n_by_state(device),
            }
            for device, source in zip(coverage.devices, coverage.sources, strict=True)
        },
        "operators": [
            {"op": o.op, "n_calls": o.n_calls, "states": dict(zip(coverage.devices, o.states, strict=True))}
            for o in coverage.operators
        ],
    }
    rows = tuple((o.op, o.n_calls, *o.states) for o in coverage.operators)
    records = Records(("operator", "calls", *coverage.devices), rows)
    return Document(f"static coverage of {subject}", tuple(blocks), data, records)


def _states(coverage: StaticCoverage) -> Table:
    """Operators in each state on each device."""
    counts = [coverage.n_by_state(device) for device in coverage.devices]
    rows: list[tuple[Cell, ...]] = [
        ((status_span(state),), *(f"{n[state]:,}" for n in counts)) for state in (*STATES, SPECIFIC)
    ]
    shares = [
        f"{'at least ' if n['unknown'] else ''}{coverage.percent(device):.1f} %"
        for device, n in zip(coverage.devices, counts, strict=True)
    ]
    columns = (Column("operators"), *(Column(device, "number") for device in coverage.devices))
    return Table(columns, (*rows, ("have kernels", *shares)))


def _operators(coverage: StaticCoverage, lacking: list[StaticOperator]) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (o.op, f"{o.n_calls:,}" if o.n_calls else "", *((status_span(state),) for state in o.states)) for o in lacking
    )
    columns = (Column("operator", "name"), Column("calls", "number"), *(Column(d) for d in coverage.devices))
    return Table(
        columns,
        rows,
        noun="operators: -f csv lists all",
        limits=Limits(40, 40, len(rows)),
        filter=Filter(("absent", "fallback")),
        tags=tuple(o.states for o in lacking),
    )
