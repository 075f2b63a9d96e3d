"""The tables of docs/coverage.md, made from coverage files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.report.formats.markdown import Markdown, pipe_table
from shadowrun.studies.sweep.cases import FAILURES, NOT_COUNTED, Kind, Support

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shadowrun.studies.sweep.cases import CaseFinding
    from shadowrun.studies.sweep.reports.support import OperatorSupport, Sweep

__all__ = ["Measured", "markdown"]

FALLBACKS = (Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK)
CLASSES = {
    "not implemented": (Kind.UNSUPPORTED,),
    "dtype": (Kind.UNSUPPORTED_DTYPE,),
    "time-out": (Kind.TIMEOUT,),
    "memory": (Kind.OUT_OF_MEMORY,),
    "values": (Kind.MISMATCH,),
    "form": (Kind.FORM,),
    "error": (Kind.ERROR, Kind.MISSING_ERROR, Kind.WRONG_ERROR),
    "crash": (Kind.CRASH,),
    "fallback only": FALLBACKS,
}
"""Reasons for failing, as the published tables have them and further ones."""
_MAX_ROWS = 15
_MAX_NAMES = 6


@dataclass(frozen=True, slots=True)
class Measured:
    """A sweep, and what it tried.

    Attributes:
        sweep: Its tables.
        parts: ``forward, backward; 3 samples``.
    """

    sweep: Sweep
    parts: str


def markdown(measured: Sequence[Measured], dtypes: str) -> str:
    """All tables.

    Args:
        measured: Sweeps, in the order of the rows.
        dtypes: The table of dtypes, or nothing.
    """
    blocks = []
    if measured:
        blocks += [
            _facts(measured),
            "### Operators",
            _support(measured),
            "### Why an operator is not full",
            _classes(measured),
        ]
        blocks += ["### Dtypes", _by_dtype(measured)]
    if dtypes:
        blocks.append(dtypes)
    for one in measured:
        blocks += [f"### {one.sweep.label}", _reasons(one.sweep)]
    return "\n\n".join(blocks) + "\n"


def _facts(measured: Sequence[Measured]) -> str:
    info = measured[0].sweep.info
    minutes, cpu = (
        sum(times) / 60 for times in zip(*((m.sweep.info.wall_s, m.sweep.info.cpu_s) for m in measured), strict=True)
    )
    days = sorted({one.sweep.info.started[:10] for one in measured})
    return (
        f"Run on {' to '.join(dict.fromkeys((days[0], days[-1])))} with torch {info.versions.get('torch', '?')}: "
        f"{minutes:.0f} minutes with two worker processes, {cpu:.0f} of processor time."
    )


def _support(measured: Iterable[Measured]) -> str:
    head = ["platform", "tried", "operators", "full", "partial", "none", "%", "not tested", "cases", "minutes"]
    rows = []
    for one in measured:
        counts, info = one.sweep.table.by_support, one.sweep.info
        tested = [counts[s] for s in (Support.FULL, Support.PARTIAL, Support.NONE)]
        cases = sum(one.sweep.table.totals.values())
        rows.append(
            [
                *(one.sweep.label, one.parts, str(sum(tested)), *map(str, tested), _percent(tested)),
                *(str(counts[Support.UNTESTED]), str(cases), f"{info.wall_s / 60:.0f}"),
            ]
        )
    return "\n".join(pipe_table([head, *rows]))


def _percent(counts: Sequence[int]) -> str:
    """``90.6 / 4.7 / 4.7``."""
    return " / ".join(f"{100 * n / max(1, sum(counts)):.1f}" for n in counts)


def _classes(measured: Iterable[Measured]) -> str:
    rows = []
    for one in measured:
        counted = Counter(_class(operator) for operator in one.sweep.table.operators if operator.failing)
        aside = (one.sweep.table.totals[kind] for kind in NOT_COUNTED)
        rows.append([one.sweep.label, *(str(counted[name] or "") for name in CLASSES), *(str(n or "") for n in aside)])
    return "\n".join(pipe_table([["platform", *CLASSES, *(Markdown(f"*{kind}*") for kind in NOT_COUNTED)], *rows]))


def _class(operator: OperatorSupport) -> str:
    """That of its worst finding."""
    worst = min((f.finding.kind for f in operator.failing), key=FAILURES.index)
    return next(name for name, kinds in CLASSES.items() if worst in kinds)


def _by_dtype(measured: Iterable[Measured]) -> str:
    rows = []
    for one in measured:
        dtypes = sorted({dtype for dtype, _ in one.sweep.table.counts})
        for dtype in dtypes:
            found = Counter(_in_dtype(operator, dtype) for operator in one.sweep.table.operators)
            tested = [found[s] for s in (Support.FULL, Support.PARTIAL, Support.NONE)]
            rows.append([one.sweep.label, dtype, *map(str, tested), _percent(tested)])
    return "\n".join(pipe_table([["platform", "dtype", "full", "partial", "none", "%"], *rows]))


def _in_dtype(operator: OperatorSupport, dtype: str) -> Support | None:
    """Class over the parts of one dtype; None where it has none, or none was tested."""
    found = {support for (d, _), support in operator.parts.items() if d == dtype} - {Support.UNTESTED}
    if len(found) > 1:
        return Support.PARTIAL
    return next(iter(found), None)


def _reasons(sweep: Sweep) -> str:
    found: dict[tuple[str, str, str], dict[str, CaseFinding]] = {}
    for operator in sweep.table.operators:
        for failing in operator.failing:
            finding = failing.finding
            where = "" if finding.kind in FALLBACKS else finding.kernel or finding.op
            why = "" if finding.kind in FALLBACKS else finding.explanation
            found.setdefault((finding.kind, where, why), {})[operator.name] = finding
    if not found:
        return "Nothing."
    order = sorted(found.items(), key=lambda item: (FAILURES.index(Kind(item[0][0])), -len(item[1]), item[0]))
    order = _thinned(order)
    rows = [
        [kind, Markdown(f"`{where}`" if where else ""), why, str(len(ops)), Markdown(_names(sorted(ops)))]
        for (kind, where, why), ops in order
    ]
    text = "\n".join(pipe_table([["what", "where", "why", "operators", "names"], *rows]))
    left = len(found) - len(order)
    return text + (f"\n\nand {left} more reasons, each of fewer operators." if left else "")


def _thinned(
    order: list[tuple[tuple[str, str, str], dict[str, CaseFinding]]],
) -> list[tuple[tuple[str, str, str], dict[str, CaseFinding]]]:
    """The reasons that most operators have, still in order of their kinds."""
    most = sorted(order, key=lambda item: -len(item[1]))[:_MAX_ROWS]
    return [item for item in order if item in most]


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_MAX_NAMES])
    return shown + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
