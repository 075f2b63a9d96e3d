"""The ratios as an SVG picture: one panel for each workload, a bar for each tool, on a logarithmic scale."""

from __future__ import annotations

import math
from html import escape
from typing import Any

__all__ = ["draw"]

_COLUMNS = 2
_NAMES, _PLOT, _VALUES = 220, 270, 60
_PANEL = _NAMES + _PLOT + _VALUES
_BAR, _STEP, _HEAD, _FOOT, _MARGIN = 11, 17, 44, 30, 20
_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)

_STYLE = """
  .card { fill: #ffffff } .text { fill: #24292f } .faint { fill: #57606a } .grid { stroke: #d0d7de }
  .ours { fill: #0969da } .floor { fill: #8c959f } .theirs { fill: #bf8700 } .limit { stroke: #cf222e }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117 } .text { fill: #e6edf3 } .faint { fill: #9198a1 } .grid { stroke: #30363d }
    .ours { fill: #4493f8 } .floor { fill: #656c76 } .theirs { fill: #d29922 } .limit { stroke: #f85149 }
  }
  text { font: 12px -apple-system, "Segoe UI", "Helvetica Neue", "DejaVu Sans", Arial, sans-serif }
  .value { paint-order: stroke; stroke-width: 4px } .value { stroke: #ffffff }
  @media (prefers-color-scheme: dark) { .value { stroke: #0d1117 } }
  .title { font-size: 14px; font-weight: 600 } .small { font-size: 11px }
"""


def draw(found: dict[str, Any]) -> str:
    """The picture of all steps that were measured; it brings its own background, for light and dark pages."""
    from targets import limit_of

    workloads = [w for w in found["workloads"] if not w["single"]]
    ratios = [f["cpu"] for w in workloads for f in w["tools"].values() if "cpu" in f]
    most = max([2.0, *ratios])
    top = next((tick for tick in _TICKS if tick >= most), _TICKS[-1])
    height = _HEAD + _FOOT + _STEP * max([0, *(len(w["tools"]) for w in workloads)])
    n_rows = math.ceil(len(workloads) / _COLUMNS)
    n_columns = min(_COLUMNS, max(1, len(workloads)))
    width, whole = 2 * _MARGIN + n_columns * _PANEL, 2 * _MARGIN + 26 + n_rows * height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" width="{width}" height="{whole}">',
        "<title>Time of a step under each tool, in plain steps</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="card" width="{width}" height="{whole}" rx="8"/>',
        *_legend(_MARGIN, _MARGIN + 12),
    ]
    for i, workload in enumerate(workloads):
        x, y = _MARGIN + i % _COLUMNS * _PANEL, _MARGIN + 26 + i // _COLUMNS * height
        limits = {t: limit_of(t, workload["name"], single=False) for t in workload["tools"]}
        parts += _panel(workload, limits, x, y, top)
    return "\n".join([*parts, "</svg>", ""])


def _panel(workload: dict[str, Any], limits: dict[str, float | None], x: int, y: int, top: int) -> list[str]:
    tools = workload["tools"]
    left, first = x + _NAMES, y + _HEAD
    last = first + _STEP * len(tools)
    plain = next((f["plain_cpu_ms"] for f in tools.values() if "plain_cpu_ms" in f), None)
    parts = [f'<text class="text title" x="{x}" y="{y + 22}">{escape(workload["name"])}</text>']
    if plain is not None:
        at = x + _PANEL - 16
        text = f"plain: {plain:.1f} ms"
        parts.append(f'<text class="faint small" x="{at}" y="{y + 22}" text-anchor="end">{text}</text>')
    for tick in (t for t in _TICKS if t <= top):
        at = left + _length(tick, top)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{first - 6}" x2="{at:.1f}" y2="{last}"/>')
        parts.append(f'<text class="faint small" x="{at:.1f}" y="{last + 14}" text-anchor="middle">{tick}</text>')
    for k, (name, figures) in enumerate(tools.items()):
        parts += _bar(name, figures, limits[name], (x, left, first + k * _STEP), top)
    return parts


def _bar(name: str, figures: dict[str, Any], limit: float | None, place: tuple[int, int, int], top: int) -> list[str]:
    x, left, y = place
    base = y + _BAR - 1
    kind = "ours" if figures.get("ours") else "floor" if "floor" in name else "theirs"
    parts = [f'<text class="text" x="{x}" y="{base}">{escape(name)}</text>']
    if "cpu" not in figures:
        reason = str(figures["error"]).partition(":")[0]
        return [*parts, f'<text class="faint small value" x="{left + 4}" y="{base}">{escape(reason)}</text>']
    length = _length(figures["cpu"], top)
    at = left + max(length, 1)
    parts.append(f'<rect class="{kind}" x="{left}" y="{y}" width="{max(length, 1):.1f}" height="{_BAR}" rx="2"/>')
    if limit is not None:
        mark = left + _length(limit, top)
        parts.append(
            f'<line class="limit" stroke-width="2" x1="{mark:.1f}" y1="{y - 3}" x2="{mark:.1f}" y2="{y + _BAR + 3}"/>'
        )
        at = max(at, mark)
    parts.append(f'<text class="text small value" x="{at + 5:.1f}" y="{base}">{_short(figures["cpu"])}</text>')
    return parts


def _legend(x: int, y: int) -> list[str]:
    parts, at = [], x
    for kind, text in (("ours", "shadowrun"), ("theirs", "other tools"), ("floor", "floor: a mode that does nothing")):
        parts.append(f'<rect class="{kind}" x="{at}" y="{y - 10}" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="text" x="{at + 18}" y="{y}">{text}</text>')
        at += 46 + 7 * len(text)
    parts.append(f'<line class="limit" stroke-width="2" x1="{at}" y1="{y - 11}" x2="{at}" y2="{y + 3}"/>')
    parts.append(f'<text class="text" x="{at + 8}" y="{y}">target</text>')
    parts.append(
        f'<text class="faint" x="{at + 70}" y="{y}">processor time of a step, in plain steps; logarithmic</text>'
    )
    return parts


def _length(ratio: float, top: int) -> float:
    return _PLOT * math.log(min(max(ratio, 1.0), top)) / math.log(top)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"
