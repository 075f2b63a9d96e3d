"""Bars: how many of each state, one bar for each platform; and figures by name, the greatest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shadowrun.report.document import TONES, Figure
from shadowrun.report.formatting import percent
from shadowrun.report.sanitize import clip
from shadowrun.report.svg import AMBER, BLUE, GREEN, INK, LINE, RED, SOFT, dot, rect, svg, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["bar_chart", "region_strip", "stacked_bars"]

_WIDTH: Final = 960
_ROW: Final = 26.0
_MAX_ROWS: Final = 20
_MAX_LABEL: Final = 40
_MAX_PIECES: Final = 200
_COLOURS: Final = {"good": GREEN, "bad": RED, "warn": AMBER, "dim": SOFT}


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, int]]], title: str, noun: str) -> tuple[Figure, ...]:
    """A bar for each row, split by state; nothing if all are empty.

    Args:
        rows: Name, and state to number; the tone of a state is that of all reports.
        title: Of the picture.
        noun: What is counted, in the plural.
    """
    rows = [(name, {state: n for state, n in counts.items() if n}) for name, counts in rows]
    shown = [(name, counts) for name, counts in rows if counts][:_MAX_ROWS]
    if not shown:
        return ()
    left, right = _left([name for name, _ in shown]), _WIDTH - 20.0
    states = list(dict.fromkeys(state for _, counts in shown for state in counts))
    parts, said = [], []
    for number, (name, counts) in enumerate(shown):
        x, y, total = left, 12 + _ROW * number, sum(counts.values())
        parts.append(text(left - 8, y + 15, clip(name, _MAX_LABEL), INK, anchor="end"))
        for state in states:
            n = counts.get(state, 0)
            width = (right - left) * n / total
            words = f"{name}: {n:,} {state} ({percent(n, total)})"
            parts.append(rect(x, y, width, _ROW - 6, _colour(state, states), words, opacity=0.75) if n else "")
            x += width
        said.append(f"{clip(name, _MAX_LABEL)}: {', '.join(f'{n:,} {state}' for state, n in counts.items())}")
    y, x = 12 + _ROW * len(shown) + 16, left
    for state in states:
        parts += [dot(x + 4, y - 4, 4, _colour(state, states)), text(x + 13, y, state, INK)]
        x += 34 + 7 * len(state)
    caption = f"Share of {noun}, by state. {'; '.join(said[:6])}." + (" …" if len(said) > 6 else "")
    return (Figure(svg(_WIDTH, y + 14, title, parts, caption, wide=True), caption, title),)


def bar_chart(rows: Sequence[tuple[str, float, str]], title: str, axis: str) -> tuple[Figure, ...]:
    """A bar for each of the first rows; nothing without two.

    Args:
        rows: Name, figure, and the figure in words; the greatest first.
        title: Of the picture.
        axis: What the figures are, with their unit.
    """
    shown = [row for row in rows if row[1] > 0][:_MAX_ROWS]
    if len(shown) < 2:
        return ()
    left, right, most = _left([name for name, *_ in shown]), _WIDTH - 110.0, max(value for _, value, _ in shown)
    parts = []
    for number, (name, value, words) in enumerate(shown):
        y, width = 30 + _ROW * number, (right - left) * value / most
        parts.append(text(left - 8, y + 15, clip(name, _MAX_LABEL), INK, anchor="end"))
        parts.append(rect(left, y, right - left, _ROW - 6, LINE, opacity=0.35))
        parts.append(rect(left, y, width, _ROW - 6, BLUE, f"{name}: {words}", opacity=0.75))
        parts.append(text(right + 8, y + 15, words, INK))
    parts.append(text(left, 18, axis, SOFT))
    # The title and the axis say what is shown: words below it only where something is left out.
    caption = f"The first {len(shown)} of {len(rows):,}." if len(shown) < len(rows) else ""
    return (Figure(svg(_WIDTH, 40 + _ROW * len(shown), title, parts, f"{axis}. {caption}", wide=True), caption, title),)


def region_strip(rows: Sequence[tuple[str, Sequence[tuple[str, str, int]]]], title: str) -> tuple[Figure, ...]:
    """A strip for each row, whose pieces follow each other; nothing without two pieces.

    Args:
        rows: Name, and of each region its name, its state, and its number of operators; -1 if unknown.
        title: Of the picture.
    """
    shown = [(name, regions[:_MAX_PIECES]) for name, regions in rows if regions][:_MAX_ROWS]
    n = sum(len(regions) for _, regions in shown)
    if n < 2:
        return ()
    left, right = _left([name for name, _ in shown]), _WIDTH - 20.0
    # One scale for all rows, so that their lengths compare.
    total = max(sum(max(1, size) for *_, size in regions) for _, regions in shown)
    states = list(dict.fromkeys(state for _, regions in shown for _, state, _ in regions))
    parts = []
    for number, (name, regions) in enumerate(shown):
        x, y = left, 12 + _ROW * number
        parts.append(text(left - 8, y + 15, clip(name, _MAX_LABEL), INK, anchor="end"))
        for region, state, size in regions:
            width = (right - left) * max(1, size) / total
            words = f"{region}: {state}" + (f", {size:,} operators" if size >= 0 else "")
            parts.append(rect(x, y, max(1.5, width - 2), _ROW - 6, _colour(state, states), words, opacity=0.4))
            if width > 9 + 7 * len(region):
                parts.append(text(x + 6, y + 14, region, INK))
            x += width
    y, x = 12 + _ROW * len(shown) + 16, left
    for state in states:
        parts += [dot(x + 4, y - 4, 4, _colour(state, states)), text(x + 13, y, state, INK)]
        x += 34 + 7 * len(state)
    caption = f"{n:,} compiled regions in their order, each as wide as its number of operators."
    return (Figure(svg(_WIDTH, y + 14, title, parts, caption, wide=True), caption, title),)


def _left(names: Sequence[str]) -> float:
    return 24 + 6.6 * min(_MAX_LABEL, max(map(len, names)))


def _colour(state: str, states: Sequence[str]) -> str:
    # A state without a tone of its own has a neutral one.
    return _COLOURS.get(TONES.get(state, ""), BLUE if states.index(state) % 2 else SOFT)
