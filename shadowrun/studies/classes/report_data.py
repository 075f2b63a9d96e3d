"""The data of a report on classes: what JSON, CSV and the pictures have of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shadowrun.report.document import (
    Records,
)
from shadowrun.report.sanitize import clip
from shadowrun.report.svg import BLUE, GREEN, INK, LINE, RED, SOFT, dot, line, polyline, svg, text
from shadowrun.studies.classes.classes_by_call import by_operator
from shadowrun.studies.classes.equivalence import letter
from shadowrun.studies.classes.layer_kernels import kernel_data, layer_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shadowrun.studies.classes.classes_by_call import Change
    from shadowrun.studies.classes.equivalence import Classes
    from shadowrun.studies.classes.explain import Point
    from shadowrun.studies.classes.layer_kernels import LayerKernels
    from shadowrun.studies.classes.study import OutputStudy, Study

__all__ = ["FORMAT", "curve_svg", "dendrogram_svg", "graph_svg", "leaf_order", "study_data", "study_records"]

FORMAT: Final = 1
"""Version of the JSON's form."""


def study_data(study: Study) -> dict[str, object]:
    """What JSON has of a study."""
    return {
        "format": FORMAT,
        "by_value": study.by_value,
        "n_common_calls": study.n_common,
        "n_calls": study.n_any,
        "different_programs": study.are_different_programs,
        "provenance_differs": study.provenance,
        "platforms": [
            {"name": p.name, "facts": dict(p.facts), "flags": sorted(p.flags), "fingerprint": p.fingerprint}
            for p in study.platforms
        ],
        "outputs": [_output_data(o) for o in study.outputs],
        "graph": study.changes,
        "layers": kernel_data(study.layers, [p.name for p in study.platforms]),
        "operators": by_operator(study.changes),
        "claims": [
            {"claim": c.text, "holds": c.holds, "n_tested": c.n_tested, "n_broken": c.n_broken, "example": c.example}
            for c in study.claims
        ],
    }


def _output_data(output: OutputStudy) -> dict[str, object]:
    c = output.classes
    return {
        "output": c.output.name,
        "key": c.output.fields,
        "n_classes": c.n_classes,
        "n_classes_near": output.outliers.n_classes,
        "apart": output.outliers.platforms,
        "mantissa_bits": c.mantissa,
        "remaining_precision": c.precision.tolist(),
        "labels_by_lost_bits": c.truncated,
        "max_ulp_bound": c.max_ulp,
        "max_ulp_of_samples": output.max_ulp,
        "max_relative_difference_of_samples": output.max_difference,
        "all_elements_sampled": output.is_exact,
        "n_undecided": c.n_undecided,
        "classes": [{"class": letter(i), "digest": f"{int(v.ladder[0]):016x}"} for i, v in enumerate(c.values)],
        "platforms": [
            {
                "platform": m.platform,
                "class": letter(m.label),
                "n_repeats": m.n_repeats,
                "n_mode": m.n_mode,
                "n_distinct": m.n_distinct,
            }
            for m in c.members
        ],
        "facts": output.facts,
        "flag_clusters": output.flags,
        "curve": output.curve,
    }


def study_records(study: Study) -> Records:
    """What CSV has of a study: a row for each output and platform, then for each layer and platform."""
    head = ("output", "step", "platform", "class", "digest", "repeats", "mode", "distinct", "architecture", "cores",
            "path", "kernel")  # fmt: skip
    facts = {p.name: p.facts for p in study.platforms}
    layers = {layer.key: layer for layer in study.layers}
    numbers = {p.name: number for number, p in enumerate(study.platforms)}
    rows: list[tuple[object, ...]] = []
    for o in study.outputs:
        c = o.classes
        layer = layers.pop(c.output.key, None)
        for m in c.members:
            digest = f"{int(c.values[m.label].ladder[0]):016x}"
            own = facts[m.platform]
            rows.append((
                *(c.output.name, c.output.key.step, m.platform, letter(m.label), digest, m.n_repeats, m.n_mode),
                *(m.n_distinct, own.get("architecture", ""), own.get("cores", "")),
                *_path_and_kernel(layer, numbers[m.platform]),
            ))  # fmt: skip
    for layer in layers.values():
        labels = list(dict.fromkeys(layer.digests))
        for p in study.platforms:
            digest = layer.digests[numbers[p.name]]
            rows.append((
                *(layer_name(layer), layer.key.step, p.name, letter(labels.index(digest)), digest, "", "", ""),
                *(p.facts.get("architecture", ""), p.facts.get("cores", "")),
                *_path_and_kernel(layer, numbers[p.name]),
            ))  # fmt: skip
    return Records(head, tuple(rows))


def _path_and_kernel(layer: LayerKernels | None, number: int) -> tuple[str, str]:
    return ("", "") if layer is None else (layer.paths[number], layer.kernels[number])


# Pictures as SVG: the cumulative curve, classes along the graph, and the dendrogram. Colours are those of the HTML
# report where there is one around the picture, and of a light page elsewhere.

_LEFT, _RIGHT, _TOP = 46, 46, 30
_ROW: Final = 20
_MAX_LABEL: Final = 60


def curve_svg(points: Sequence[Point]) -> str:
    """Cumulative number of classes over platforms, with a mark where another group begins."""
    step = max(13.0, min(24.0, 760 / max(1, len(points))))
    # Names are of a file: clipped, and without control characters, which XML does not have.
    base, top = 210.0, max(p.n_classes for p in points)
    width, height = (
        _LEFT + step * len(points) + _RIGHT,
        base + 30 + 6.6 * max(len(clip(p.group, _MAX_LABEL)) for p in points),
    )
    parts = _axis(width, base, top, "classes so far")
    path, begun = [], ""
    for i, point in enumerate(points):
        x, y = _LEFT + step * i, _height(point.n_classes, top, base)
        path.append(f"{x:.1f},{y:.1f} {x + step:.1f},{y:.1f}")
        if point.group != begun:
            begun = point.group
            parts.append(line(x, _TOP, x, base + 6, LINE))
            parts.append(text(x + 3, base + 12, clip(begun, _MAX_LABEL), SOFT, turn=90))
    parts.append(f'<polyline points="{" ".join(path)}" style="fill: none; stroke: {BLUE}; stroke-width: 2"/>')
    parts.append(text(_LEFT + step * len(points) + 6, _height(top, top, base) + 4, str(top), BLUE))
    return svg(width, height, "Cumulative number of classes", parts)


def graph_svg(changes: Sequence[Change]) -> str:
    """Classes (line) and least remaining precision (dots) of each call; red where classes are added, green merged."""
    step = max(2.0, min(16.0, 900 / max(1, len(changes))))
    width, height, base = _LEFT + step * len(changes) + _RIGHT, 270.0, 220.0
    top = max(c.n_classes for c in changes)
    bits = max([1, *(c.mantissa for c in changes)])
    parts = _axis(width, base, top, "classes")
    parts.append(text(width - _RIGHT, 16, f"remaining precision (of {bits} bits)", SOFT, anchor="end"))
    path = []
    for i, change in enumerate(changes):
        x, y = _LEFT + step * (i + 0.5), _height(change.n_classes, top, base)
        path.append(f"{x:.1f},{y:.1f}")
        if change.mantissa > 0:
            parts.append(dot(x, _height(change.precision, bits, base), 1.6, SOFT))
        if change.n_added or change.n_merged:
            name = f"{change.key.module}/{change.key.op}: +{change.n_added} -{change.n_merged}"
            parts.append(dot(x, y, 4, RED if change.n_added else GREEN, name))
    parts.insert(len(_axis(width, base, top, "")), polyline(path, BLUE))
    parts.append(text(_LEFT, base + 18, "calls, in the order of the first platform", SOFT))
    parts.append(
        text(_LEFT, base + 36, "line: classes; grey: remaining precision; red: adds classes; green: merges", SOFT)
    )
    return svg(width, height, "Classes along the graph", parts)


def dendrogram_svg(classes: Classes, notes: Mapping[int, str]) -> str:
    """Classes joined where they agree to so many bits.

    Args:
        classes: The classes.
        notes: For each class what to write after its letter.
    """
    order = leaf_order(classes)
    m = classes.mantissa
    scale = 420 / (m + 1)
    base = _TOP + _ROW * len(order)
    width = _LEFT + 420 + 40 + 7.0 * min(_MAX_LABEL, max(len(notes[c]) for c in order)) + 40
    labels_at = _LEFT + 440.0

    def x_of(n_lost: int) -> float:
        return labels_at - 20 - scale * n_lost

    parts = []
    for bits in range(0, m + 1, max(1, round((m + 1) / 8))):
        x = x_of(m - bits)
        parts += [line(x, _TOP - 6, x, base, LINE), text(x, base + 16, str(bits), SOFT, anchor="middle")]
    parts.append(text(_LEFT, base + 34, "remaining precision in bits; left of 0: sign or exponent differs", SOFT))
    at: dict[frozenset[int], tuple[float, float]] = {}
    for place, leaf in enumerate(order):
        y = _TOP + _ROW * (place + 0.5)
        at[frozenset((leaf,))] = (x_of(0), y)
        words = clip(f"{letter(leaf)}  {notes[leaf]}", _MAX_LABEL)
        parts.append(text(labels_at - 12, y + 4, words, INK))
    for n_lost, labels in enumerate([*classes.truncated[1:], [0] * classes.n_classes], 1):
        for label in sorted(set(labels)):
            joined = frozenset(c for c, own in enumerate(labels) if own == label)
            inner = [group for group in at if group <= joined]
            # A group that no other joins at this number of bits has no node there.
            if len(inner) < 2:
                continue
            x, ys = x_of(n_lost), [at[group][1] for group in inner]
            parts += [line(x, at[group][1], at[group][0], at[group][1], BLUE) for group in inner]
            parts.append(line(x, min(ys), x, max(ys), BLUE))
            for group in inner:
                del at[group]
            at[joined] = (x, (min(ys) + max(ys)) / 2)
    return svg(width, base + 48, "Dendrogram by remaining precision", parts)


def leaf_order(classes: Classes) -> list[int]:
    """Classes so that those that agree to more bits are closer together."""
    return sorted(range(classes.n_classes), key=lambda c: [labels[c] for labels in reversed(classes.truncated)])


def _axis(width: float, base: float, top: int, title: str) -> list[str]:
    parts = [text(_LEFT, 16, title, SOFT)]
    for value in range(0, top + 1, max(1, round(top / 5))):
        y = _height(value, top, base)
        parts += [line(_LEFT, y, width - _RIGHT, y, LINE), text(_LEFT - 8, y + 4, str(value), SOFT, anchor="end")]
    return parts


def _height(value: int, top: int, base: float) -> float:
    return base - (base - _TOP) * value / max(1, top)
