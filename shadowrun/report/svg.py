"""Pieces of SVG pictures, in the colours of the HTML report, or of a light page elsewhere; all texts are escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from shadowrun.report.sanitize import clip

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AMBER", "BLUE", "CARD", "GREEN", "INK", "LINE", "RED", "SOFT", "dot", "line", "polyline", "rect", "svg", "text",
]  # fmt: skip

INK, SOFT, LINE, CARD = "var(--ink, #1d2126)", "var(--soft, #56606a)", "var(--line, #dfe3e6)", "var(--card, #fff)"
BLUE, RED, GREEN = "var(--accent, #0b62bb)", "var(--red, #b3261e)", "var(--green, #1b6b3a)"
AMBER = "var(--amber, #7d5200)"
_FONT: Final = 'font-family="system-ui, sans-serif" font-size="12"'


def svg(
    width: float, height: float, title: str, parts: Sequence[str], description: str = "", *, wide: bool = False
) -> str:
    """A picture; title and description are its text alternative; a wide one fills the page."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    card = f'<rect width="100%" height="100%" rx="8" style="fill: {CARD}"/>'
    says = f"<title>{escape(clip(title))}</title>"
    says += f"<desc>{escape(clip(description, 1000))}</desc>" if description else ""
    kind = ' class="wide"' if wide else ""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {_FONT} role="img"{kind}>{says}'
    return "\n".join([head, card, *parts, "</svg>"])


def line(x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1.3, dash: str = "") -> str:
    """A straight line."""
    dashed = f"; stroke-dasharray: {dash}" if dash else ""
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} style="stroke: {colour}; stroke-width: {width}{dashed}"/>'


def polyline(points: Sequence[str], colour: str, *, width: float = 1.6) -> str:
    """A line through points, each as ``x,y``."""
    return f'<polyline points="{" ".join(points)}" style="fill: none; stroke: {colour}; stroke-width: {width}"/>'


def dot(x: float, y: float, radius: float, colour: str, title: str = "") -> str:
    """A disc, with a text that shows when pointed at."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" style="fill: {colour}">{_title(title)}</circle>'


def rect(
    x: float, y: float, width: float, height: float, colour: str, title: str = "", *, opacity: float = 1.0
) -> str:  # fmt: skip
    """A rectangle, with a text that shows when pointed at."""
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    faint = f"; fill-opacity: {opacity:.2f}" if opacity < 1 else ""
    return f'<rect {shape} style="fill: {colour}{faint}">{_title(title)}</rect>'


def text(
    x: float, y: float, words: str, colour: str, *, anchor: str = "start", turn: int = 0, bold: bool = False
) -> str:
    """A line of text; `turn` in degrees."""
    turned = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} style="fill: {colour}"{turned}{weight}>{escape(clip(words))}</text>'


def _title(words: str) -> str:
    return f"<title>{escape(clip(words))}</title>" if words else ""
