"""A sweep in words: for the terminal, Markdown, CSV and JSON."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

from shadowrun.report.grid import cell, comma_separated, pipes
from shadowrun.report.tame import tame
from shadowrun.store.codec import jsonable
from shadowrun.sweep.outcome import FAILURES, Kind, Support

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.sweep.coveragefile import SweepInfo
    from shadowrun.sweep.support import FailingPart, OperatorSupport, SupportTable

__all__ = ["FORMAT", "as_csv", "as_json", "as_markdown", "as_text", "closing_line"]

FORMAT = 1
"""Version of the JSON's form. History: 1, first version."""

_COLUMNS = (
    ("pass", (Kind.PASS,)),
    ("unsupported", (Kind.UNSUPPORTED, Kind.UNSUPPORTED_DTYPE)),
    ("error", (Kind.ERROR, Kind.MISSING_ERROR, Kind.WRONG_ERROR)),
    ("mismatch", (Kind.MISMATCH, Kind.FORM)),
    ("fallback", (Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK)),
    ("crash", (Kind.CRASH, Kind.TIMEOUT, Kind.OUT_OF_MEMORY)),
    ("unverified", (Kind.UNVERIFIED, Kind.REFERENCE)),
    ("not valid", (Kind.NOT_VALID,)),
    ("harness", (Kind.HARNESS,)),
)
"""Columns of the table of cases."""
_WIDTH = 120
_MOST_SHOWN = 40


def as_text(table: SupportTable, info: SweepInfo, *, everything: bool = False) -> str:
    """The tables for a terminal; of what fails the first `_MOST_SHOWN` lines, or all."""
    table, info = tame(table, whole=True), tame(info, whole=True)
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    colour = sys.stdout.isatty()
    console = Console(file=out, force_terminal=colour, width=None if colour else _WIDTH, highlight=False, emoji=False)
    console.print(Text(f"{info.target} against {info.ref}", style="bold"))
    console.print(_facts(table, info))
    grid = Table("dtype", "part", box=None, pad_edge=False)
    for name, _ in _COLUMNS:
        grid.add_column(name, justify="right")
    for row in _case_rows(table):
        grid.add_row(*row)
    console.print(grid)
    console.print()
    console.print(_support_line(table))
    lines = list(_failing_lines(table))
    for line in lines if everything else lines[:_MOST_SHOWN]:
        console.print(Text(line))
    if len(lines) > _MOST_SHOWN and not everything:
        console.print(f"and {len(lines) - _MOST_SHOWN} more: --all, or --json, --csv, --markdown FILE")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def as_markdown(table: SupportTable, info: SweepInfo) -> str:
    """Both tables, and all that fails."""
    table, info = tame(table, whole=True), tame(info, whole=True)
    lines = [f"# {cell(info.target)} against {cell(info.ref)}", "", _facts(table, info), ""]
    lines += pipes([["dtype", "part", *(name for name, _ in _COLUMNS)], *_case_rows(table)])
    lines += ["", _support_line(table), ""]
    rows = ([operator.name, operator.support, *_failing_cells(f)] for operator, f in _failing(table))
    lines += pipes([["operator", "support", "dtype", "part", "cases", "what", "where", "why"], *rows])
    return "\n".join(lines) + "\n"


def as_csv(table: SupportTable) -> str:
    """One row for each operator, dtype and part, with counts by kind and the first reason for failing."""
    rows = []
    for operator in tame(table, whole=True).operators:
        for (dtype, part), support in operator.parts.items():
            found = [f for f in operator.failing if (f.dtype, f.part) == (dtype, part)]
            why = "; ".join(_reason(f) for f in found)
            kinds = "; ".join(dict.fromkeys(f.finding.kind for f in found))
            rows.append([operator.name, operator.support, dtype, part, support, kinds, why])
    return comma_separated(["operator", "operator_support", "dtype", "part", "support", "failing", "why"], rows)


def as_json(table: SupportTable, info: SweepInfo) -> str:
    """Everything, sorted; described in ``docs/howto/sweep.md``."""
    document = {
        "format": FORMAT,
        "info": info,
        "operators_by_support": table.by_support,
        "cases_by_kind": table.totals,
        "cases": [
            {"dtype": dtype, "part": part, "kinds": {k: n for k, n in kinds.items() if n}}
            for (dtype, part), kinds in table.counts.items()
        ],
        "operators": [_operator_json(operator) for operator in table.operators],
    }
    return json.dumps(jsonable(document), indent=1, sort_keys=True, allow_nan=False) + "\n"


def closing_line(table: SupportTable) -> str:
    """``641 of 653 operators full (98.2 %)``."""
    counts = table.by_support
    tested = sum(n for support, n in counts.items() if support is not Support.UNTESTED)
    share = f" ({100 * counts[Support.FULL] / tested:.1f} %)" if tested else ""
    return f"{counts[Support.FULL]} of {tested} operators full{share}"


def _facts(table: SupportTable, info: SweepInfo) -> str:
    n = sum(table.totals.values())
    state = "" if info.complete else ", not complete"
    return (
        f"{n} cases, seed {info.seed}, {info.source}, torch {info.versions.get('torch', '?')}; "
        f"{info.wall_s:.0f} s, {info.cpu_s:.0f} s of processor time{state}"
    )


def _case_rows(table: SupportTable) -> Iterator[list[str]]:
    for (dtype, part), kinds in table.counts.items():
        counts = (sum(kinds.get(kind, 0) for kind in of) for _, of in _COLUMNS)
        yield [dtype, part, *(str(n) if n else "" for n in counts)]


def _support_line(table: SupportTable) -> str:
    counts = table.by_support
    return f"operators: {', '.join(f'{counts[support]} {support}' for support in Support)}; {closing_line(table)}"


def _failing(table: SupportTable) -> list[tuple[OperatorSupport, FailingPart]]:
    """What fails, the worst kinds first."""
    found = [(operator, f) for operator in table.operators for f in operator.failing]
    return sorted(found, key=lambda pair: (FAILURES.index(pair[1].finding.kind), pair[0].name))


def _failing_lines(table: SupportTable) -> Iterator[str]:
    """One line for each operator and reason; parts that share them stand together."""
    grouped: dict[tuple[str, ...], list[FailingPart]] = {}
    for operator, f in _failing(table):
        words = (operator.name, operator.support, f.finding.kind, _where(f), _reason(f))
        grouped.setdefault(words, []).append(f)
    for (name, support, kind, where, why), found in grouped.items():
        parts = ", ".join(f"{f.dtype} {f.part} {f.n}/{f.of}" for f in found)
        place = f" in {where}" if where and where != name else ""
        yield f"{name} [{support}]: {kind}{place}: {parts}"
        yield f"    {why}; first: sample {found[0].first.sample} of {found[0].part}, {found[0].inputs or 'no inputs'}"


def _failing_cells(f: FailingPart) -> list[str]:
    return [f.dtype, f.part, f"{f.n}/{f.of}", f.finding.kind, _where(f), _reason(f)]


def _where(f: FailingPart) -> str:
    return f.finding.kernel or f.finding.op


def _reason(f: FailingPart) -> str:
    words = [w for w in (f.finding.cause, f.finding.explanation) if w]
    return f"{': '.join(words)}{' (' + f.finding.message + ')' if f.finding.message else ''}"


def _operator_json(operator: OperatorSupport) -> dict[str, Any]:
    return {
        "name": operator.name,
        "support": operator.support,
        "parts": [{"dtype": d, "part": p, "support": s} for (d, p), s in operator.parts.items()],
        "kinds": {kind: n for kind, n in operator.counts.items() if n},
        "failing": [
            {
                "dtype": f.dtype,
                "part": f.part,
                "finding": f.finding,
                "n": f.n,
                "of": f.of,
                "first_sample": f.first.sample,
                "inputs": f.inputs,
            }
            for f in operator.failing
        ],
    }
