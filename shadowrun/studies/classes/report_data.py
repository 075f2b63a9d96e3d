"""The data of a report on classes: what JSON and CSV have of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shadowrun.report.document import (
    Records,
)
from shadowrun.studies.classes.classes_by_call import by_operator
from shadowrun.studies.classes.equivalence import letter
from shadowrun.studies.classes.layer_kernels import kernel_data, layer_name

if TYPE_CHECKING:
    from shadowrun.studies.classes.layer_kernels import LayerKernels
    from shadowrun.studies.classes.study import OutputStudy, Study

__all__ = ["FORMAT", "study_data", "study_records"]

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
