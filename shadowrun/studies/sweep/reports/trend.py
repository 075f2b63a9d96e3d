"""Support of operators on one platform over its releases: a table, what each release gained and lost, and a badge."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Final

from shadowrun.report.bars import stacked_bars
from shadowrun.report.document import Column, Document, Limits, Note, Records, Section, Table, status_span
from shadowrun.report.sanitize import clip
from shadowrun.studies.sweep.cases import Support

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shadowrun.report.document import Block, Cell
    from shadowrun.report.issues import Issues
    from shadowrun.studies.sweep.reports.support import Sweep

__all__ = ["Release", "Trend", "badge_json", "badge_svg", "trend_document"]

FORMAT: Final = 1
_RANK: Final = {Support.NONE: 0, Support.PARTIAL: 1, Support.FULL: 2}
_LIMITS: Final = Limits(40, 200, 1_000_000)
_MAX_NAMES: Final = 8
_COLOURS: Final = (
    (95.0, "brightgreen", "#4c1"),
    (80.0, "green", "#97ca00"),
    (60.0, "yellow", "#dfb317"),
    (0.0, "red", "#e05d44"),
)


@dataclass(frozen=True, slots=True)
class Release:
    """One sweep in the order of releases.

    Attributes:
        name: Of the release: that of its file.
        sweep: The sweep.
        gained, lost: Operators whose class is better or worse than in the release before, of those that both tested.
        added, dropped: Operators that only this one tested, and that only the one before tested.
    """

    name: str
    sweep: Sweep
    gained: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trend:
    """Releases of one platform, the oldest first."""

    releases: tuple[Release, ...]

    @classmethod
    def from_sweeps(cls, sweeps: Sequence[tuple[str, Sweep]]) -> Trend:
        """Compare each release with the one before.

        Args:
            sweeps: Name and sweep of each, the oldest first.
        """
        releases: list[Release] = []
        for name, sweep in sweeps:
            # Of the release before, not of the first: a table of releases says when an operator was lost.
            before = _supports(releases[-1].sweep) if releases else None
            releases.append(_release(name, sweep, before))
        return cls(tuple(releases))


def _supports(sweep: Sweep) -> dict[str, Support]:
    # What could not be tested is no loss.
    return {o.name: o.support for o in sweep.table.operators if o.support is not Support.UNTESTED}


def _release(name: str, sweep: Sweep, before: Mapping[str, Support] | None) -> Release:
    now = _supports(sweep)
    if before is None:
        return Release(name, sweep)
    both = sorted(set(now) & set(before))
    return Release(
        name,
        sweep,
        gained=tuple(op for op in both if _RANK[now[op]] > _RANK[before[op]]),
        lost=tuple(op for op in both if _RANK[now[op]] < _RANK[before[op]]),
        added=tuple(sorted(set(now) - set(before))),
        dropped=tuple(sorted(set(before) - set(now))),
    )


def trend_document(trend: Trend, issues: Issues | None = None) -> Document:
    """Support over releases.

    Args:
        trend: The releases.
        issues: What the last release lost, for CI services.
    """
    releases = trend.releases
    shares = [(r.name, {str(s): n for s, n in r.sweep.table.by_support.items()}) for r in releases]
    blocks: list[Block] = [_releases(releases), *stacked_bars(shares, "Operators by support and release", "operators")]
    blocks += [Note(f"the sweep of {r.name} is not complete", "warn") for r in releases if not r.sweep.info.complete]
    targets = list(dict.fromkeys(r.sweep.info.target for r in releases))
    if len(targets) > 1:
        blocks.append(Note(f"these are different platforms: {', '.join(map(clip, targets))}", "warn"))
    for r in releases[1:]:
        blocks += [
            Note((status_span("gained" if word == "gained" else "regressed", f"{r.name} {word} "), *_named(names)))
            for word, names in (("gained", r.gained), ("lost", r.lost))
            if names
        ]
    changed = _changed(releases)
    if changed:
        columns = (Column("operator", "name"), *(Column(r.name) for r in releases))
        rows: tuple[tuple[Cell, ...], ...] = tuple(
            (name, *((status_span(s or "-"),) for s in supports)) for name, supports in changed
        )
        table = Table(columns, rows, noun="operators: -f csv lists all", limits=_LIMITS)
        blocks.append(Section("Operators that changed", (table,), count=len(rows)))
    last = releases[-1]
    return Document(
        f"{last.sweep.info.target} over {len(releases)} releases",
        tuple(blocks),
        _data(trend),
        _records(trend),
        issues=issues,
    )


def _named(names: Sequence[str]) -> tuple[Any, ...]:
    from shadowrun.report.document import Span

    more = len(names) - _MAX_NAMES
    text = ", ".join(names[:_MAX_NAMES])
    if more <= 0:
        return (Span(f"{len(names)}: {text}"),)
    return (Span(f"{len(names)}: {text} "), Span(f"… and {more} more", opens=tuple(names[_MAX_NAMES:])))


def _releases(releases: Sequence[Release]) -> Table:
    numbers = (*(str(s) for s in Support), "full, %", "gained", "lost", "cases")
    columns = (
        *(Column("release", "name"), Column("swept on", detail=1)),
        *(Column(name, "number") for name in numbers),
        *(Column("plug-in", detail=1), Column("torch")),
    )
    return Table(columns, tuple(map(_row, releases)), limits=_LIMITS)


def _row(r: Release) -> tuple[str, ...]:
    info = r.sweep.info
    plugin = info.target_fingerprint.get("plugin", "")
    return (
        *(r.name, clip(str(info.started))[:10]),
        *(str(n) for n in r.sweep.table.by_support.values()),
        *(f"{percent_full(r.sweep):.1f}", str(len(r.gained) or ""), str(len(r.lost) or "")),
        *(
            str(sum(r.sweep.table.totals.values())),
            clip(str(plugin), 40),
            clip(str(info.versions.get("torch", "?")), 40),
        ),
    )


def _changed(releases: Sequence[Release]) -> list[tuple[str, tuple[Support | None, ...]]]:
    """Operators whose class is not the same in all releases that tested them; those that the last lost first."""
    supports = [_supports(r.sweep) for r in releases]
    lost = set(releases[-1].lost)
    names = {name for name in set().union(*supports) if len({s[name] for s in supports if name in s}) > 1}
    return [(n, tuple(s.get(n) for s in supports)) for n in sorted(names, key=lambda n: (n not in lost, n))]


def _records(trend: Trend) -> Records:
    """One row for each operator and release."""
    rows = tuple((r.name, name, str(support)) for r in trend.releases for name, support in _supports(r.sweep).items())
    return Records(("release", "operator", "support"), rows)


def _data(trend: Trend) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "releases": [
            {
                "name": r.name,
                "info": r.sweep.info,
                "operators_by_support": r.sweep.table.by_support,
                "percent_full": r.sweep.percent_full,
                **{name: list(getattr(r, name)) for name in ("gained", "lost", "added", "dropped")},
            }
            for r in trend.releases
        ],
        "changed": [{"name": name, "support": list(supports)} for name, supports in _changed(trend.releases)],
    }


# -- the badge -----------------------------------------------------------------------------------------


def percent_full(sweep: Sweep) -> float:
    """Percentage of full operators, cut to one decimal: 99.96 is not 100."""
    return math.floor(sweep.percent_full * 10) / 10


def _badge(sweep: Sweep) -> tuple[str, str, str, str]:
    """Label, message, and the colour by name and value."""
    percent = percent_full(sweep)
    _, name, value = next(row for row in _COLOURS if percent >= row[0])
    return f"operators on {clip(sweep.info.target, 40)}", f"{percent:.1f} % full", name, value


def badge_json(sweep: Sweep) -> str:
    """A badge for the endpoint of shields.io: https://shields.io/badges/endpoint-badge."""
    label, message, colour, _ = _badge(sweep)
    return json.dumps({"schemaVersion": 1, "label": label, "message": message, "color": colour}) + "\n"


def badge_svg(sweep: Sweep) -> str:
    """A badge as a picture."""
    label, message, _, colour = _badge(sweep)
    # 11 px of a sans-serif font: 6.2 px for each character, which `textLength` makes exact.
    widths = [round(6.2 * len(words)) + 10 for words in (label, message)]
    total = sum(widths)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="20" role="img">',
        f"<title>{escape(label)}: {escape(message)}</title>",
        f'<clipPath id="r"><rect width="{total}" height="20" rx="3"/></clipPath>',
        f'<g clip-path="url(#r)"><rect width="{widths[0]}" height="20" fill="#555"/>',
        f'<rect x="{widths[0]}" width="{widths[1]}" height="20" fill="{colour}"/></g>',
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,Geneva,DejaVu Sans,sans-serif" font-size="11">',
    ]
    for x, width, words in ((widths[0] / 2, widths[0], label), (widths[0] + widths[1] / 2, widths[1], message)):
        parts.append(f'<text x="{x:g}" y="14" textLength="{width - 10}">{escape(words)}</text>')
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"
