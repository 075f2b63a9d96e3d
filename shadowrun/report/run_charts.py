"""The run in pictures: errors along the graph, by module and step, histograms, time, and the tree of modules.

Each picture has a title, axes with units, a caption and a text for each mark. What the file lacks is left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from shadowrun.analysis.charts import FAILING
from shadowrun.report.document import TONES, Bar, Block, Figure, Section, Tree, TreeNode, status_span
from shadowrun.report.formatting import duration, float_text, percent
from shadowrun.report.sanitize import clip, sanitize
from shadowrun.report.svg import AMBER, BLUE, GREEN, INK, LINE, RED, SOFT, dot, line, polyline, rect, svg, text
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from shadowrun.analysis.charts import Charts, GraphPoint, HeatCell, HeatMap, Module, StepGraph, StepTimes
    from shadowrun.types import RunInfo

__all__ = ["histogram", "pictures_section"]

_WIDTH: Final = 960
_LEFT, _RIGHT, _TOP = 78.0, 20.0, 34.0
_MAX_ROWS: Final = 32
_MAX_NODES: Final = 300
_MAX_CHILDREN: Final = 40
# Of a histogram: fewer calls are listed better than drawn.
_MIN_CALLS: Final = 5
_COLOURS: Final = {"good": GREEN, "bad": RED, "warn": AMBER, "dim": SOFT}


def pictures_section(charts: Charts, info: RunInfo) -> tuple[Section, ...]:
    """The section, or nothing if the file has nothing to draw."""
    figures: list[Block] = []
    if charts.graph is not None:
        figures.append(_graph(charts.graph))
    if charts.heat is not None:
        figures.append(_heat_map(charts.heat))
    figures += _tree(charts.modules)
    figures += _times(charts, info)
    lead = "" if charts.is_whole else f"Of the first {charts.n_calls:,} calls."
    return (Section("Pictures", tuple(figures), lead, anchor="pictures"),) if figures else ()


class _Log:
    """A logarithmic axis of errors, from the bottom to the top; 0 lies below it, NaN and infinity above."""

    def __init__(self, values: Iterable[float], top: float, base: float) -> None:
        values = tuple(values)
        real = [value for value in values if 0 < value < math.inf]
        self.has_nan = any(math.isnan(value) or value == math.inf for value in values)
        self.low = math.floor(math.log10(min(real))) if real else -8
        self.high = max(self.low + 2, math.ceil(math.log10(max(real)))) if real else 0
        self.top, self.base = top + (34 if self.has_nan else 16), base - 24

    def y(self, value: float) -> float:
        if math.isnan(value) or value == math.inf:
            return self.top - 18
        if value <= 0:
            return self.base + 16
        return self._at(math.log10(value))

    def _at(self, power: float) -> float:
        share = (power - self.low) / (self.high - self.low)
        return self.base - min(1.0, max(0.0, share)) * (self.base - self.top)

    def ticks(self, left: float, right: float) -> Iterator[str]:
        every = max(1, math.ceil((self.high - self.low) / 8))
        for power in range(self.low, self.high + 1, every):
            y = self._at(power)  # the power itself may be beyond the greatest float
            yield line(left, y, right, y, LINE)
            yield text(left - 8, y + 4, f"1e{power}" if power else "1", SOFT, anchor="end")
        yield text(left - 8, self.base + 20, "0", SOFT, anchor="end")
        if self.has_nan:
            yield text(left - 8, self.top - 14, "NaN, Inf", SOFT, anchor="end")


# -- along the graph ------------------------------------------------------------------------------


def _graph(graph: StepGraph) -> Figure:
    height, base, right = 330.0, 270.0, _WIDTH - _RIGHT
    points = sanitize(graph.points)  # before texts are made of them: a name may have megabytes
    drifts = [p for p in points if p.accumulated >= 0 or math.isnan(p.accumulated)]
    axis = _Log([*(p.isolated for p in points), *(p.accumulated for p in drifts)], _TOP, base)
    last = max(1, points[-1].place + points[-1].n_calls - 1)

    def x(place: float) -> float:
        return _LEFT + (right - _LEFT) * place / last

    parts = [*_phases(points, x, base), *axis.ticks(_LEFT, right)]
    parts.append(text(_LEFT, 16, "greatest absolute error of a call's results", SOFT))
    parts += [polyline([f"{x(p.place):.1f},{axis.y(p.accumulated):.1f}" for p in drifts], BLUE)] if drifts else []
    # The worst ones last, on top of the others.
    for p in sorted(points, key=lambda p: p.status in FAILING):
        parts += _stem(p, x(p.place), axis)
    first = next((p for p in points if p.seq == graph.first), None)
    if first is not None:
        parts.append(line(x(first.place), _TOP, x(first.place), base, RED, dash="5 3"))
        end = x(first.place) > _WIDTH * 0.6
        shift = -6 if end else 6
        label = f"first divergence: {clip(first.op, 60)}, call {first.place:,} of the step"
        parts.append(text(x(first.place) + shift, _TOP + 10, label, RED, anchor="end" if end else "start", bold=True))
    for share in (0, 0.25, 0.5, 0.75, 1):
        parts.append(text(x(share * last), base + 18, f"{round(share * last):,}", SOFT, anchor="middle"))
    parts.append(
        text((_LEFT + right) / 2, base + 38, "number of the call within the step, in call order", SOFT, anchor="middle")
    )
    parts += _legend(_LEFT, base + 54, _graph_legend(points, has_drift=bool(drifts)))
    failing = sum(p.status in FAILING for p in points)
    caption = f"Step {graph.step:,}, {graph.n_calls:,} calls"
    caption += f", {len(points):,} points: each the worst of some calls in a row" if len(points) < graph.n_calls else ""
    caption += f"; {failing:,} of the points are findings. " if failing else "; none of them is a finding. "
    caption += "Isolated: the call alone, of equal inputs. "
    caption += (
        "Accumulated: of a chain of results that each platform continues by itself, which a later call can take over "
        "without being at fault."
        if drifts
        else "The accumulated error was not recorded (--drift records it)."
    )
    title = f"Error along the graph, step {graph.step:,}"
    return Figure(svg(_WIDTH, height, title, parts, caption, wide=True), caption, title)


def _stem(p: GraphPoint, x: float, axis: _Log) -> Iterator[str]:
    tone, fails = TONES.get(p.status, ""), p.status in FAILING
    colour = _COLOURS.get(tone, SOFT)
    y = axis.y(p.isolated)
    said = f"call {p.seq:,}, {p.op}, {p.module or 'outside any module'}, {p.phase}: {p.status}, "
    said += f"isolated {float_text(p.isolated)}"
    said += f", accumulated {float_text(p.accumulated)}" if p.accumulated >= 0 else ""
    if fails:
        yield line(x, axis.base + 16, x, y, colour, width=1)
    yield dot(x, y, 4 if fails else 2.2, colour, said)


def _phases(points: Sequence[GraphPoint], x: object, base: float) -> Iterator[str]:
    """A band for each stretch of one phase."""
    assert callable(x)
    start = 0
    for i, p in enumerate(points):
        if i + 1 < len(points) and points[i + 1].phase == p.phase:
            continue
        left, right = x(points[start].place), x(points[min(i + 1, len(points) - 1)].place)
        if p.phase == "backward":
            yield rect(left, _TOP, right - left, base - _TOP, SOFT, opacity=0.08)
        if right - left > 70:
            yield text((left + right) / 2, _TOP - 4, str(p.phase), SOFT, anchor="middle")
        start = i + 1


def _graph_legend(points: Sequence[GraphPoint], *, has_drift: bool) -> list[tuple[str, str]]:
    statuses = dict.fromkeys(p.status for p in points)
    found = {_COLOURS.get(TONES.get(s, ""), SOFT): [] for s in Status if s in statuses}  # type: dict[str, list[str]]
    for status in Status:
        if status in statuses:
            found[_COLOURS.get(TONES.get(status, ""), SOFT)].append(str(status))
    legend = [(colour, f"isolated: {', '.join(names)}") for colour, names in found.items()]
    return [*legend, *([(BLUE, "accumulated")] if has_drift else [])]


def _legend(x: float, y: float, entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    for colour, words in entries:
        yield dot(x + 4, y - 4, 4, colour)
        yield text(x + 13, y, words, INK)
        x += 30 + 6.7 * len(words)


# -- modules and steps ----------------------------------------------------------------------------


def _heat_map(heat: HeatMap) -> Figure:
    rows = _chosen_rows(heat)
    names = [clip(heat.modules[row], 44) for row in rows]
    top = 12.0
    left, row_height, n = 24 + 6.4 * max(map(len, names)), 19.0, len(heat.steps)
    width = min(48.0, (_WIDTH - left - _RIGHT) / n)
    base = top + row_height * len(rows)
    values = [cell.error for cell in heat.cells.values() if 0 < cell.error < math.inf]
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    parts = []
    for i, row in enumerate(rows):
        y = top + i * row_height
        parts.append(text(left - 8, y + 13, names[i], INK, anchor="end"))
        for column in range(n):
            cell = heat.cells.get((row, column))
            if cell is not None:
                parts += _heat_cell(left + column * width, y, width, row_height, cell, _depth(cell.error, low, high))
    for column in range(0, n, max(1, math.ceil(60 / width / 2))):
        parts.append(
            text(left + (column + 0.5) * width, base + 15, f"{heat.steps[column][0]:,}", SOFT, anchor="middle")
        )
    parts.append(text(left, base + 33, "step", SOFT))
    parts += _scale(left + 60, base + 33, low, high, heat)
    what = "accumulated error, relative to the reference" if heat.is_accumulated else "isolated absolute error"
    caption = f"The stronger the colour, the greater the {what}, on a logarithmic scale; a cross: calls that are "
    caption += "unsupported, wrong, raise or fall back; empty: no call."
    caption += (
        f" The {len(rows)} modules with the greatest errors, of {len(heat.modules):,}."
        if len(rows) < len(heat.modules)
        else ""
    )
    first = heat.steps[0]
    caption += f" A column is of {first[1] - first[0] + 1:,} steps." if first[1] > first[0] else ""
    picture = svg(_WIDTH, base + 48, "Errors by module and step", parts, caption, wide=True)
    return Figure(picture, caption, "Errors by module and step")


def _chosen_rows(heat: HeatMap) -> list[int]:
    """Those with most failing calls and the greatest errors, in the order of the graph."""
    worst: dict[int, tuple[int, float]] = dict.fromkeys(range(len(heat.modules)), (0, -1.0))
    for (row, _), cell in heat.cells.items():
        error = math.inf if math.isnan(cell.error) else cell.error
        worst[row] = worst[row][0] + cell.n_failed, max(worst[row][1], error)
    return sorted(sorted(worst, key=lambda row: worst[row], reverse=True)[:_MAX_ROWS])


def _depth(error: float, low: float, high: float) -> float:
    if math.isnan(error) or error == math.inf:
        return 1.0
    if error <= 0:
        return 0.0
    if high <= low:
        return 0.6
    return 0.08 + 0.82 * (math.log(error) - math.log(low)) / (math.log(high) - math.log(low))


def _heat_cell(x: float, y: float, width: float, height: float, cell: HeatCell, depth: float) -> Iterator[str]:
    said = f"greatest error {float_text(cell.error)}; {cell.n_failed:,} of {cell.n_calls:,} calls failed"
    yield rect(x + 0.5, y + 0.5, width - 1, height - 1, LINE, opacity=0.5)
    yield rect(x + 0.5, y + 0.5, width - 1, height - 1, RED, said, opacity=depth)
    if cell.n_failed:
        a, b, c, d = x + width / 2 - 3, y + height / 2 - 3, x + width / 2 + 3, y + height / 2 + 3
        yield line(a, b, c, d, INK)
        yield line(a, d, c, b, INK)


def _scale(x: float, y: float, low: float, high: float, heat: HeatMap) -> Iterator[str]:
    unit = "relative" if heat.is_accumulated else "absolute"
    yield text(x, y, f"error, {unit}:", SOFT)
    x += 100
    yield text(x, y, float_text(low), SOFT)
    for i in range(6):
        yield rect(x + 56 + 16 * i, y - 10, 16, 12, RED, opacity=0.08 + 0.82 * i / 5)
    yield text(x + 160, y, float_text(high), SOFT)


# -- histograms -----------------------------------------------------------------------------------


def histogram(bins: Mapping[int, int], *, is_excess: bool) -> tuple[Figure, ...]:
    """Calls of a finding by their greatest error; nothing for a few calls, or all in one bin.

    Args:
        bins: Power of two above the error, to number of calls.
        is_excess: The error is in units of the operator's own rounding error; else in ULP.
    """
    total = sum(bins.values())
    if total < _MIN_CALLS or len(bins) < 2:
        return ()
    low, high = min(bins), max(bins)
    width = min(54.0, (620.0 - _LEFT) / (high - low + 1))
    base, most = 150.0, max(bins.values())
    unit = "rounding errors of the operator" if is_excess else "ULP"
    parts = [text(_LEFT, 16, "calls", SOFT), line(_LEFT, base, _LEFT + width * (high - low + 1), base, LINE)]
    for y, n in ((base, 0), (_TOP, most)):
        parts.append(text(_LEFT - 8, y + 4, f"{n:,}", SOFT, anchor="end"))
    for power in range(low, high + 1):
        x, n = _LEFT + (power - low) * width, bins.get(power, 0)
        tall = (base - _TOP) * n / most
        said = f"{n:,} calls with an error from {_power(power - 1)} to {_power(power)} {unit}"
        parts.append(rect(x + 1, base - tall, width - 2, tall, RED, said))
        if width > 30 or (power - low) % math.ceil(34 / width) == 0:
            parts.append(text(x, base + 16, _power(power - 1), SOFT, anchor="middle"))
    parts.append(text(_LEFT, base + 36, f"greatest error of a call, in {unit}", SOFT))
    caption = f"{total:,} calls of this finding by their greatest error, in {unit}: most lie from "
    top = max(bins, key=lambda power: bins[power])
    caption += f"{_power(top - 1)} to {_power(top)}."
    caption += " A correct kernel stays near 1." if is_excess else ""
    picture = svg(640, base + 48, "Calls by their error", parts, caption)
    return (Figure(picture, caption, "Calls by their error"),)


def _power(power: int) -> str:
    return f"{2**power:,}" if 0 <= power < 20 else f"2^{power}" if power >= 20 else float_text(2.0**power)


# -- times ----------------------------------------------------------------------------------------


def _times(charts: Charts, info: RunInfo) -> Iterator[Figure]:
    if not (charts.ref_s or charts.target_s) or info.wall_s <= 0:
        return
    if charts.is_whole:
        yield _shares(charts, info)
    if len(charts.times) > 1:
        yield _steps(charts.times)


def _shares(charts: Charts, info: RunInfo) -> Figure:
    """One bar for the whole run."""
    # One side's calls are the program's own, the other side's are the replay; which is which, the file does not say.
    rest = info.wall_s - charts.ref_s - charts.target_s
    own = max(0.0, min(rest, info.own_s - min(charts.ref_s, charts.target_s)))
    pieces = [
        (BLUE, "calls on the target", charts.target_s),
        (GREEN, "calls on the reference", charts.ref_s),
        (AMBER, "shadowrun: copies, judge, recording (at most)", own),
        (SOFT, "the rest of the program", max(0.0, rest - own)),
    ]
    total, x, right = sum(s for *_, s in pieces) or 1.0, 20.0, _WIDTH - 20.0
    parts = []
    for colour, name, s in pieces:
        width = (right - 20.0) * s / total
        parts.append(rect(x, 30, width, 30, colour, f"{name}: {duration(s * 1e6)}, {percent(s, total)}", opacity=0.75))
        x += width
    parts.append(text(20, 18, f"0 s to {duration(info.wall_s * 1e6)}: wall time of the run", SOFT))
    for number, (colour, name, s) in enumerate(pieces):
        words = f"{name}: {duration(s * 1e6)} ({percent(s, total)})"
        parts += _legend(20 + number % 2 * 470, 84 + number // 2 * 20, [(colour, words)])
    caption = (
        "Times of calls are those of the host: on an asynchronous device, the time to launch them. The calls of one "
        "side are the program's own, those of the other side its replay."
    )
    return Figure(svg(_WIDTH, 118, "Where the time went", parts, caption, wide=True), caption, "Where the time went")


def _steps(times: Sequence[StepTimes]) -> Figure:
    """Steps along the run's time, each as high as a step took, split into calls on both sides and the rest."""
    base, right = 190.0, _WIDTH - _RIGHT
    tallest = max(t.wall_s / (t.last - t.first + 1) for t in times) or 1.0
    span, before = sum(t.wall_s for t in times) or 1.0, 0.0
    parts = [text(_LEFT, 16, "time of a step", SOFT)]
    for share in (0.0, 0.5, 1.0):
        y = base - (base - _TOP) * share
        parts.append(line(_LEFT, y, right, y, LINE))
        parts.append(text(_LEFT - 8, y + 4, duration(tallest * share * 1e6) if share else "0", SOFT, anchor="end"))
        x = _LEFT + (right - _LEFT) * share
        parts.append(text(x, base + 18, duration(span * share * 1e6) if share else "0", SOFT, anchor="middle"))
    for t in times:
        # Added up: a comparison that was started again counts the seconds from its new start.
        x, width = _LEFT + (right - _LEFT) * before / span, (right - _LEFT) * t.wall_s / span
        before += t.wall_s
        n, y = t.last - t.first + 1, base
        steps = f"step {t.first:,}" if n == 1 else f"steps {t.first:,} to {t.last:,}, each"
        for colour, name, s in (
            (BLUE, "calls on the target", t.target_s / n),
            (GREEN, "calls on the reference", t.ref_s / n),
            (
                SOFT,
                "the rest of the program, copies, judge, recording",
                max(0.0, (t.wall_s - t.target_s - t.ref_s) / n),
            ),
        ):
            tall = (base - _TOP) * min(1.0, s / tallest)
            parts.append(
                rect(
                    x, y - tall, max(1.0, width - 1), tall, colour, f"{steps}: {name} {duration(s * 1e6)}", opacity=0.75
                )
            )
            y -= tall
    parts.append(text((_LEFT + right) / 2, base + 36, "time of the steps before it", SOFT, anchor="middle"))
    legend = [
        (BLUE, "calls on the target"),
        (GREEN, "calls on the reference"),
        (SOFT, "the rest of the program, copies, judge, recording"),
    ]
    parts += _legend(_LEFT, base + 56, legend)
    slowest = max(times, key=lambda t: t.wall_s / (t.last - t.first + 1))
    caption = f"{times[-1].last - times[0].first + 1:,} steps; the slowest is step {slowest.first:,}"
    caption += f", {duration(slowest.wall_s / (slowest.last - slowest.first + 1) * 1e6)}."
    return Figure(
        svg(_WIDTH, base + 70, "Steps along the run", parts, caption, wide=True), caption, "Steps along the run"
    )


# -- modules --------------------------------------------------------------------------------------


def _tree(modules: Sequence[Module]) -> Iterator[Tree]:
    named = [module for module in modules if module.path]
    if not named:
        return
    n_wrong, us = sum(m.n_wrong for m in modules), sum(m.target_us for m in modules)
    budget = [_MAX_NODES]
    nodes = tuple(_node(module, n_wrong, us, budget) for module in modules[:_MAX_CHILDREN])
    caption = (
        f"Share of error: of the {n_wrong:,} elements beyond rounding, those of calls in the module. Share of time: of "
        "the calls on the target. A module contains its children."
    )
    caption += f" {len(modules) - _MAX_CHILDREN:,} modules are not shown." if len(modules) > _MAX_CHILDREN else ""
    yield Tree("Modules", ("module", "outcome", "share of error", "share of time"), nodes, caption)


def _node(module: Module, n_wrong: int, us: float, budget: list[int]) -> TreeNode:
    budget[0] -= 1
    # Those that need work first; of many equal ones the first few.
    worst = sorted(module.children.values(), key=lambda m: (-sum(m.statuses[s] for s in FAILING), -m.target_us))
    kept = set(map(id, worst[: max(0, min(_MAX_CHILDREN, budget[0]))]))
    budget[0] -= len(kept)
    children = [child for child in module.children.values() if id(child) in kept]
    counts: Counter[Status] = module.statuses
    shown = (Status.UNSUPPORTED, Status.ERROR, Status.MISMATCH, Status.FALLBACK, Status.UNVERIFIED, Status.MATCH)
    chips = tuple(status_span(status, f"{counts[status]:,} {status}") for status in shown if counts[status])
    bars = (
        Bar(module.n_wrong / n_wrong if n_wrong else 0.0, percent(module.n_wrong, n_wrong), "bad"),
        Bar(module.target_us / us if us else 0.0, percent(module.target_us, us)),
    )
    name = module.path.rpartition(".")[2] if module.path else "outside any module"
    nodes = tuple(_node(child, n_wrong, us, budget) for child in children)
    return TreeNode(clip(name, 60), chips, bars, nodes, len(module.children) - len(children))
