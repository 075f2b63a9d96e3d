"""Static coverage as text, Markdown, JSON and CSV."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shadowrun.report.grid import columns, comma_separated, pipes
from shadowrun.report.tame import one_line, tame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.analysis.static import StaticCoverage, StaticOperator

__all__ = ["FORMATS"]

MAX_LISTED = 40
_FORMAT = 1
"""Version of the JSON's form."""

_WARNING = "By torch's tables only, nothing ran: they know no dtypes, and not what a generic operator calls in turn."


def _rows(coverage: StaticCoverage) -> list[tuple[str, ...]]:
    """Head and one row for each state: operators on each device."""
    counts = {device: coverage.n_by_state(device) for device in coverage.devices}
    states = next(iter(counts.values()))
    rows = [(state, *(f"{counts[d][state]:,}" for d in coverage.devices)) for state in states]
    at_least = {d: "at least " if counts[d]["unknown"] else "" for d in coverage.devices}
    percents = ("have kernels", *(f"{at_least[d]}{coverage.percent(d):.1f} %" for d in coverage.devices))
    return [("operators", *coverage.devices), *rows, percents]


def _lacking(coverage: StaticCoverage) -> list[StaticOperator]:
    """Operators that some device lacks or leaves to a fallback."""
    return [o for o in coverage.operators if {"absent", "fallback"} & set(o.states)]


def _verdicts(coverage: StaticCoverage) -> Iterator[str]:
    for device, source in zip(coverage.devices, coverage.sources, strict=True):
        yield f"{device}: {coverage.verdict(device)} (by {source})"


def _more(lacking: list[StaticOperator]) -> str:
    n = len(lacking) - MAX_LISTED
    return f"… and {n:,} more: -f csv lists every operator" if n > 0 else ""


def _text(coverage: StaticCoverage, what: str) -> str:
    lines = [f"static coverage of {what}", _WARNING, "", *_verdicts(coverage), ""]
    lines += columns(_rows(coverage))
    lacking = _lacking(coverage)
    if lacking:
        shown = [(f"{o.n_calls or ''}", o.op, *o.states) for o in lacking[:MAX_LISTED]]
        lines += ["", *columns([("calls", "operator", *coverage.devices), *shown]), *filter(None, [_more(lacking)])]
    return "\n".join(lines) + "\n"


def _markdown(coverage: StaticCoverage, what: str) -> str:
    lines = [f"# Static coverage of {what}", "", _WARNING, "", *(f"- {v}" for v in _verdicts(coverage)), ""]
    lines += pipes(_rows(coverage))
    lacking = _lacking(coverage)
    if lacking:
        shown = [(f"{o.n_calls or ''}", f"`{o.op}`", *o.states) for o in lacking[:MAX_LISTED]]
        lines += ["", *pipes([("calls", "operator", *coverage.devices), *shown])]
        lines += ["", _more(lacking)] if _more(lacking) else []
    return "\n".join(lines) + "\n"


def _json(coverage: StaticCoverage, what: str) -> str:
    document = {
        "format": _FORMAT,
        "of": what,
        "static": True,
        "devices": {
            device: {
                "source": source,
                "verdict": coverage.verdict(device),
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
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _csv(coverage: StaticCoverage, _: str) -> str:
    head = ("operator", "calls", *coverage.devices)
    return comma_separated(head, ((o.op, o.n_calls, *o.states) for o in coverage.operators))


FORMATS: dict[str, Callable[[StaticCoverage, str], str]] = {
    "txt": lambda coverage, what: _text(tame(coverage, whole=True), one_line(what)),
    "md": lambda coverage, what: _markdown(tame(coverage, whole=True), one_line(what)),
    "json": _json,
    "csv": lambda coverage, what: _csv(tame(coverage, whole=True), what),
}
"""Format to function of a coverage and the name of what was looked at."""
