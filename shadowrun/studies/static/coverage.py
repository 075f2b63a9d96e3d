"""Static coverage of several devices: one state for each operator and device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.analysis.wording import plural
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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shadowrun.report.document import Cell

__all__ = ["StaticCoverage", "StaticOperator", "cover_statically", "static_document"]

STATES = ("absent", "unknown", "fallback", "generic", "composite", "kernel")
"""From worst to best."""

SPECIFIC = "specific"
"""State of an operator that exists for one kind of device only: other devices do not need it."""


@dataclass(frozen=True, slots=True)
class StaticOperator:
    """One operator.

    Attributes:
        op: Operator such as ``aten::add.Tensor``.
        states: One of `STATES` or `SPECIFIC`, for each device of the `StaticCoverage`.
        n_calls: Calls in the run; 0 without a run.
    """

    op: str
    states: tuple[str, ...]
    n_calls: int


@dataclass(frozen=True, slots=True)
class StaticCoverage:
    """Operators and devices.

    Attributes:
        devices: Names of the devices.
        sources: Where the kernels of each are listed.
        operators: First those that most devices lack, then those with most calls.
    """

    devices: tuple[str, ...]
    sources: tuple[str, ...]
    operators: tuple[StaticOperator, ...]

    def n_by_state(self, device: str) -> dict[str, int]:
        """State to number of operators on a device."""
        at = self.devices.index(device)
        counted = Counter(operator.states[at] for operator in self.operators)
        return {state: counted[state] for state in (*STATES, SPECIFIC)}

    def lacking(self, device: str) -> tuple[StaticOperator, ...]:
        """Operators that a device certainly lacks."""
        at = self.devices.index(device)
        return tuple(operator for operator in self.operators if operator.states[at] == "absent")

    def percent(self, device: str) -> float:
        """Percentage of operators with a kernel or a decomposition; 100 if there is no operator.

        Operators specific to one kind of device are not counted. If some are unknown, this is a lower bound.
        """
        n = self.n_by_state(device)
        has, total = n["kernel"] + n["composite"] + n["generic"], len(self.operators) - n[SPECIFIC]
        return 100.0 * has / total if total else 100.0

    def verdict(self, device: str) -> str:
        """Summary of a device, in words."""
        n = self.n_by_state(device)
        if not self.operators:
            return "no operators to look up"
        words = []
        if n["absent"]:
            words.append(f"{plural(n['absent'], 'operator')} absent")
        if n["fallback"]:
            words.append(f"{plural(n['fallback'], 'operator')} left to the backend's fallback")
        if n["unknown"]:
            words.append(
                f"{plural(n['unknown'], 'operator')} unknown: the kernels of {device} are in a separate package"
            )
        return ", ".join(words) if words else "no operator is absent"


def cover_statically(
    n_calls: Mapping[str, int],
    devices: Mapping[str, tuple[str, Callable[[str], str]]],
    *,
    is_specific: Callable[[str], bool],
) -> StaticCoverage:
    """Look operators up.

    Args:
        n_calls: Operator to its number of calls.
        devices: Device to where its kernels are listed, and to the look-up of an operator's state.
        is_specific: Whether an operator exists for one kind of device only.
    """

    def states(op: str) -> tuple[str, ...]:
        listed = (state(op) for _, state in devices.values())
        return tuple(SPECIFIC if s in ("absent", "unknown") and is_specific(op) else s for s in listed)

    operators = [StaticOperator(op, states(op), n) for op, n in n_calls.items()]
    # What most devices lack is first, and of these what the program calls most.
    operators.sort(key=lambda o: (-o.states.count("absent"), -o.states.count("fallback"), -o.n_calls, o.op))
    return StaticCoverage(tuple(devices), tuple(source for source, _ in devices.values()), tuple(operators))


# Report of static coverage as a `Document`.

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
