"""Several sweeps, or the changes between two, as text, Markdown, JSON, CSV and HTML."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from shadowrun.report import grid
from shadowrun.report.grid import clip, columns, comma_separated, pipes
from shadowrun.report.tame import tame
from shadowrun.store.codec import jsonable
from shadowrun.sweep.changes import Direction
from shadowrun.sweep.outcome import Support

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shadowrun.sweep.changes import Change, Changes
    from shadowrun.sweep.platforms import Platforms, SupportRow, Sweep

__all__ = ["CHANGES", "PLATFORMS"]

MAX_LISTED = 60
_MOST_SHOWN = 80
_FORMAT = 1
"""Version of both JSON forms."""

_LEFT_OUT = "-"


def _why(row: SupportRow) -> str:
    """The worst failure of the first platform that has one."""
    for cell in row.cells:
        if cell is not None and cell.failing:
            f = cell.failing[0]
            words = ": ".join(filter(None, (f.finding.kind, f.finding.kernel or f.finding.op, f.finding.explanation)))
            return f"{f.dtype} {f.part}, {words}"
    return ""


def _shown(row: SupportRow) -> list[str]:
    return [row.name, *(str(s) if s else _LEFT_OUT for s in row.supports), _why(row)]


def _lacking(platforms: Platforms) -> list[SupportRow]:
    """Operators that are not full everywhere they were tested."""
    return [row for row in platforms.rows if {Support.NONE, Support.PARTIAL} & set(row.supports)]


def _totals(sweeps: Iterable[Sweep]) -> list[list[str]]:
    head = ["platform", "reference", *Support, "full, %", "cases", "torch"]
    rows = []
    for s in sweeps:
        counts, n_cases = s.table.by_support.values(), sum(s.table.totals.values())
        torch = str(s.info.versions.get("torch", "?"))
        rows.append([s.label, s.info.ref, *map(str, counts), f"{s.percent_full:.1f}", str(n_cases), torch])
    return [head, *rows]


def _more(n: int) -> list[str]:
    return [f"… and {n - MAX_LISTED} more: -f csv has all"] if n > MAX_LISTED else []


def _text(platforms: Platforms) -> str:
    lacking = _lacking(platforms)
    lines = columns(_totals(platforms.sweeps))
    lines += [f"the sweep of {s.label} is not complete" for s in platforms.sweeps if not s.info.complete]
    if len(platforms.sweeps) > 1:
        lines += ["", f"{platforms.n_differing} of {len(platforms.rows)} operators are not alike on all"]
    if lacking:
        head = ["operator", *(s.label for s in platforms.sweeps), "first reason"]
        rows = [[*cells[:-1], clip(cells[-1], _MOST_SHOWN)] for cells in map(_shown, lacking[:MAX_LISTED])]
        lines += ["", *columns([head, *rows]), *_more(len(lacking))]
    return "\n".join(lines) + "\n"


def _markdown(platforms: Platforms) -> str:
    lines = ["# Operator coverage", "", *pipes(_totals(platforms.sweeps)), ""]
    if len(platforms.sweeps) > 1:
        lines += [f"{platforms.n_differing} of {len(platforms.rows)} operators are not alike on all.", ""]
    head = ["operator", *(s.label for s in platforms.sweeps), "first reason"]
    lines += pipes([head, *map(_shown, _lacking(platforms))])
    return "\n".join(lines) + "\n"


def _json(platforms: Platforms) -> str:
    return _dumped(
        {
            "format": _FORMAT,
            "platforms": [
                {
                    "label": s.label,
                    "info": s.info,
                    "operators_by_support": s.table.by_support,
                    "percent_full": s.percent_full,
                }
                for s in platforms.sweeps
            ],
            "n_differing": platforms.n_differing,
            "operators": [
                {"name": row.name, "support": list(row.supports), "differs": row.differs, "why": _why(row)}
                for row in platforms.rows
            ],
        }
    )


def _csv(platforms: Platforms) -> str:
    return comma_separated(
        ["operator", *(s.label for s in platforms.sweeps), "first reason"],
        ([row.name, *(s or "" for s in row.supports), _why(row)] for row in platforms.rows),
    )


def _html(platforms: Platforms) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("shadowrun.sweep"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    totals = _totals(platforms.sweeps)
    page = environment.get_template("support.html")
    return page.render(platforms=platforms, totals=totals, why=_why, classes=list(Support))


PLATFORMS: dict[str, Callable[[Platforms], str]] = {
    "txt": lambda platforms: _text(tame(platforms, whole=True)),
    "md": lambda platforms: _markdown(tame(platforms, whole=True)),
    "json": _json,
    "csv": lambda platforms: _csv(tame(platforms, whole=True)),
    "html": lambda platforms: _html(tame(platforms, whole=True)),
}
"""Format to function of several platforms."""


def _change(c: Change) -> list[str]:
    kinds = f"{', '.join(c.kinds_before) or 'pass'} → {', '.join(c.kinds_after) or 'pass'}"
    return [c.direction, c.name, c.dtype, c.part, f"{c.before} → {c.after}", kinds, c.why]


_CHANGE_HEAD = ["change", "operator", "dtype", "part", "support", "failures", "why"]


def _facts(changes: Changes) -> list[str]:
    counts = ", ".join(f"{len(changes.of(d))} {d}" for d in Direction)
    lines = [f"{changes.before} → {changes.after}", f"{counts}, of {changes.n_compared} parts that both tested"]
    for which, names in ((changes.before, changes.only_before), (changes.after, changes.only_after)):
        if names:
            lines.append(f"only in {which}: {len(names)} operators, {clip(', '.join(names), _MOST_SHOWN)}")
    return lines


def _changes_text(changes: Changes) -> str:
    lines = _facts(changes)
    if changes.changes:
        rows = [[*cells[:-1], clip(cells[-1], _MOST_SHOWN)] for cells in map(_change, changes.changes[:MAX_LISTED])]
        lines += ["", *columns([_CHANGE_HEAD, *rows]), *_more(len(changes.changes))]
    return "\n".join(lines) + "\n"


def _changes_markdown(changes: Changes) -> str:
    title, *facts = _facts(changes)
    lines = [f"# {grid.cell(title)}", "", *(f"- {grid.cell(fact)}" for fact in facts), ""]
    return "\n".join([*lines, *pipes([_CHANGE_HEAD, *map(_change, changes.changes)])]) + "\n"


def _changes_json(changes: Changes) -> str:
    n = {d: len(changes.of(d)) for d in Direction}
    return _dumped({"format": _FORMAT, "n": n, **{k: getattr(changes, k) for k in changes.__slots__}})


def _changes_csv(changes: Changes) -> str:
    return comma_separated(_CHANGE_HEAD, map(_change, changes.changes))


CHANGES: dict[str, Callable[[Changes], str]] = {
    "txt": lambda changes: _changes_text(tame(changes, whole=True)),
    "md": lambda changes: _changes_markdown(tame(changes, whole=True)),
    "json": _changes_json,
    "csv": lambda changes: _changes_csv(tame(changes, whole=True)),
}
"""Format to function of the changes between two sweeps."""


def _dumped(document: dict[str, Any]) -> str:
    return json.dumps(jsonable(document), indent=1, sort_keys=True, allow_nan=False) + "\n"
