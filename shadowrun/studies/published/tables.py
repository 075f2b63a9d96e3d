"""Tables of the recorded studies in the published form, with the published figures next to those of this machine.

Published figures are of Schlögl et al., "Causes and Effects of Unanticipated Numerical Deviations in Neural Network
Inference Frameworks" (NeurIPS 2023), on trained nets in TensorFlow; those here are of nets with random weights.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from shadowrun.report.document import (
    Block,
    Column,
    Document,
    Fact,
    Facts,
    Figure,
    Limits,
    Note,
    Records,
    Section,
    Table,
)
from shadowrun.studies.classes.equivalence import letter
from shadowrun.studies.classes.layer_kernels import kernel_section, layer_kernels
from shadowrun.studies.classes.report_data import dendrogram_svg, graph_svg
from shadowrun.studies.grid import RECORDED, machine_fact

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.studies.classes.classes_by_call import Change
    from shadowrun.studies.classes.equivalence import Classes
    from shadowrun.studies.published.recorded_studies import RecordedStudy

    Rows = list[tuple[str, ...]]
    Made = tuple[tuple[str, ...], Rows, list[Block]]

__all__ = ["TABLES", "study_document"]

_SOURCE: Final = "Columns marked (pub) are published: Schlögl et al., NeurIPS 2023, trained nets in TensorFlow 2.5. "


def study_document(study: RecordedStudy) -> Document:
    """Report of a recorded study."""
    title, note, make = TABLES[study.name]
    heads, rows, more = make(study)
    columns = tuple(Column(head, "text" if number == 0 else "number") for number, head in enumerate(heads))
    # A platform that wrote nothing is a line of the report: the number of classes is of the others alone.
    failed = [cell for cell in study.cells if cell.outcome != RECORDED]
    blocks: list[Block] = [
        Facts((machine_fact(), Fact("platforms", f"{len(study.specs)}: {', '.join(study.specs)}"))),
        *(Note(f"{c.platform}: left out: {c.outcome} {c.note}".strip(), "warn") for c in failed),
        Note((_SOURCE if any("(pub)" in head for head in heads) else "") + note, "dim"),
        Table(columns, tuple(rows), noun="rows: -f csv lists all", limits=Limits(100, 200, 1000)),
        *more,
    ]
    data: dict[str, Any] = {
        "format": 1,
        "study": study.name,
        "machine": machine_fact().text,
        "platforms": [{"platform": c.platform, "outcome": c.outcome, "note": c.note} for c in study.cells],
        "table": [dict(zip(heads, row, strict=True)) for row in rows],
        "variants": {v: _classes_data(study, v) for v in study.variants},
    }
    return Document(title, tuple(blocks), data, Records(heads, tuple(rows)))


def _classes_data(study: RecordedStudy, variant: str) -> dict[str, Any]:
    classes = study.classes(variant)
    return {
        "classes": dict(zip(study.specs, (letter(label) for label in classes.labels), strict=True)),
        "n_classes": classes.n_classes,
        "remaining_precision": classes.min_precision,
        "mantissa": classes.mantissa,
    }


def _bits(classes: Classes) -> str:
    return f"{classes.min_precision} of {classes.mantissa}"


# Published classes of 14 platforms, and remaining precision, by net and dtype (Figure 6).
_CASTS: Final = {
    "small": {"float16": ("1", ""), "float32": ("3", ""), "float64": ("2", "")},
    "resnet18": {"float16": ("3", "5 of 10"), "float32": ("9", "15 of 23"), "float64": ("4", "41 of 52")},
}


def _casts(study: RecordedStudy) -> Made:
    rows: Rows = []
    more: list[Block] = []
    for variant in study.variants:
        net, _, dtype = variant.partition(":")
        classes = study.classes(variant)
        # bfloat16 is ours: the paper casts to three dtypes, and an empty cell says so.
        published = _CASTS[net].get(dtype, ("", ""))
        rows.append((net, dtype, str(classes.n_classes), published[0], _bits(classes), published[1]))
        if classes.n_classes > 1:
            more.append(_near(f"{net} in {dtype}", classes, study.specs))
    return ("net", "dtype", "classes", "classes (pub)", "bits", "bits (pub)"), rows, more


def _near(title: str, classes: Classes, specs: Sequence[str]) -> Section:
    """The dendrogram, and as a table: how many classes are left with so many bits."""
    who = {c: ", ".join(s for s, k in zip(specs, classes.labels, strict=True) if k == c) for c in set(classes.labels)}
    rows: list[tuple[str, ...]] = []
    for n_lost, labels in enumerate(classes.truncated):
        groups: dict[int, list[str]] = {}
        for c, label in enumerate(labels):
            groups.setdefault(label, []).append(letter(c))
        # Only where the number falls: cutting off most bits joins no class.
        if not rows or rows[-1][1] != str(len(groups)):
            joined = " ".join("+".join(group) for group in groups.values())
            rows.append((str(classes.mantissa - n_lost), str(len(groups)), joined))
    members = tuple((letter(c), platforms) for c, platforms in sorted(who.items()))
    return Section(
        f"Dendrogram: {title}",
        (
            Figure(dendrogram_svg(classes, who), "Classes joined where they agree to so many bits."),
            Table((Column("bits", "number"), Column("classes", "number"), Column("joined")), tuple(rows), noun="steps"),
            Table((Column("class"), Column("platforms")), members, noun="classes", limits=Limits(50, 50, 50)),
        ),
    )


_PUBLISHED_CORES: Final = {2: "5", 4: "4", 8: "4", 16: "3"}


def _cores(study: RecordedStudy) -> Made:
    counts: dict[int, list[int]] = {}
    for number, platform in enumerate(study.platforms):
        counts.setdefault(int(platform.facts["threads"]), []).append(number)
    rows: Rows = []
    for n_threads, numbers in sorted(counts.items()):
        chosen = [study.platforms[number] for number in numbers]
        for variant in study.variants:
            classes = study.classes(variant, chosen)
            # Letters of all platforms, so that one letter means the same results in each row.
            everywhere = study.classes(variant).labels
            letters = " ".join(letter(everywhere[number]) for number in numbers)
            published = _PUBLISHED_CORES.get(n_threads, "")
            rows.append((variant, str(n_threads), str(len(chosen)), letters, str(classes.n_classes), published))
    return ("net", "threads", "platforms", "class of each", "classes", "classes (pub)"), rows, []


def _multiplications(study: RecordedStudy) -> Made:
    sizes = list(dict.fromkeys(variant.partition(":")[0] for variant in study.variants))
    filters = list(dict.fromkeys(variant.partition(":")[2] for variant in study.variants))
    rows: Rows = []
    for size in sizes:
        found = {f: study.classes(f"{size}:{f}") for f in filters}
        # The published curve is of one filter size; the worst of ours is the one that may contradict it.
        least = min(found.values(), key=lambda classes: classes.min_precision)
        cells = (f"{c.n_classes} / {c.min_precision}" for c in found.values())
        most = str(max(c.n_classes for c in found.values()))
        rows.append((size, *cells, most, "at most 4", _bits(least), "falls to 0" if size == "1e8" else ""))
    heads = ("size", *filters)
    return (*heads, "classes", "classes (pub)", "bits", "bits (pub)"), rows, []


def _distributions(study: RecordedStudy) -> Made:
    rows: Rows = []
    partitions = set()
    for variant in study.variants:
        weights, _, inputs = variant.partition(":")
        classes = study.classes(variant)
        partitions.add(tuple(classes.labels))
        rows.append((weights, inputs, str(classes.n_classes), "3", _bits(classes), _letters(classes)))
    same = len(partitions) == 1
    # One class everywhere has one partition as well, and would be told as a confirmation.
    if all(max(labels) == 0 for labels in partitions):
        text = "All platforms agree in every combination: these platforms say nothing on the distributions."
    elif same:
        text = f"All {len(rows)} combinations have the same classes, as published."
    else:
        text = f"The {len(rows)} combinations have {len(partitions)} different partitions; published: the same in all."
    heads = ("weights", "inputs", "classes", "classes (pub)", "bits", "class of each platform")
    return heads, rows, [Note(text, "" if same else "warn")]


def _letters(classes: Classes) -> str:
    return " ".join(letter(label) for label in classes.labels)


# Layers with remaining precision up / same / down, and deviating elements in % before and after (SUP-9, SUP-8).
_ACTIVATIONS: Final = {
    ("resnet18", "relu"): ("6 / 6 / 0", "71-99 -> 30-61"),
    ("resnet18", "sigmoid"): ("7.7 / 2 / 2.3", "12-99 -> 7-98"),
    ("small", "relu"): ("3 / 1 / 0", "86-99 -> 27-50"),
    ("small", "sigmoid"): ("1 / 0.3 / 2.7", ""),
}


def _activations(study: RecordedStudy) -> Made:
    rows: Rows = []
    layers: Rows = []
    for net, kind in dict.fromkeys(tuple(variant.split(":")[:2]) for variant in study.variants):
        # The published figures are means over inputs: layers up and down are not whole numbers.
        samples = [variant for variant in study.variants if variant.startswith(f"{net}:{kind}:")]
        trends: list[str] = []
        shares: dict[str, list[tuple[float, float]]] = {}
        for variant in samples:
            for change in study.of_variant(variant):
                if change.key.op == f"aten::{kind}" and change.parents:
                    trends.append(change.trend)
                    pair = study.deviating(change.parents[0]), study.deviating(change.key)
                    shares.setdefault(change.key.module.partition(f"{variant}.")[2], []).append(pair)
        means = {
            layer: tuple(100 * sum(side) / len(side) for side in zip(*p, strict=True)) for layer, p in shares.items()
        }
        counted = " / ".join(f"{trends.count(word) / len(samples):.3g}" for word in ("up", "same", "down"))
        before, after = ([mean[side] for mean in means.values()] for side in (0, 1))
        deviating = f"{min(before):.0f}-{max(before):.0f} -> {min(after):.0f}-{max(after):.0f}"
        published = _ACTIVATIONS[net, kind]
        rows.append((net, kind, counted, published[0], deviating, published[1]))
        layers += [(net, kind, layer, f"{mean[0]:.1f}", f"{mean[1]:.1f}") for layer, mean in means.items()]
    heads = ("net", "activation", "bits up / same / down", "(pub)", "deviating %: before -> after", "(pub) %")
    columns = (Column("net"), Column("activation"), Column("layer"), Column("before %", "number"))
    table = Table((*columns, Column("after %", "number")), tuple(layers), noun="layers", limits=Limits(60, 100, 200))
    return heads, rows, [Section("Deviating elements by layer", (table,))]


def _resnet18(study: RecordedStudy) -> Made:
    """Each layer of the net: classes before and after it, and the paths of its kernels."""
    (variant,) = study.variants
    layers = layer_kernels(study.platforms)
    paths = {layer.key: layer.paths for layer in layers}
    rows: Rows = []
    for change in study.of_variant(variant):
        counts = Counter(path or "?" for path in paths.get(change.key, ()))
        rows.append((
            f"{_layer(change, variant)} {change.key.op.removeprefix('aten::')}",
            *(str(n or "") for n in (change.n_before, change.n_classes, change.n_added, change.n_merged)),
            str(change.precision) if change.mantissa > 0 else "",
            ", ".join(f"{path} {n}" for path, n in counts.most_common()),
        ))  # fmt: skip
    classes = study.classes(variant)
    splits = [row[0] for row in rows if row[3]]
    text = (
        f"{len(study.platforms)} platforms, {classes.n_classes} classes of the output. Classes are added at "
        f"{len(splits)} calls: {', '.join(splits) or 'none'}."
    )
    heads = ("layer", "classes before", "after", "added", "merged", "bits", "paths: platforms")
    more: list[Block] = [Note(text)]
    if layers:
        more.append(kernel_section(layers, study.specs))
    if classes.n_classes > 1:
        more.append(_near(variant, classes, study.specs))
    return heads, rows, more


def _layer(change: Change, variant: str) -> str:
    """Path of a call's module inside its net."""
    return change.key.module.partition(f".{variant}.")[2]


def _untrained(study: RecordedStudy) -> Made:
    rows: Rows = []
    more: list[Block] = []
    for variant in study.variants:
        changes = study.of_variant(variant)
        bits = [change.precision for change in changes if change.mantissa]
        merging = [n for n, change in enumerate(changes) if change.n_merged]
        again = sum(bool(change.n_added) for change in changes[merging[0] :]) if merging else 0
        numbers = [change.n_classes for change in changes]
        net, _, scheme = variant.partition(":")
        ends = f"{min(bits)} to {max(bits)}", f"{min(numbers)} to {max(numbers)}"
        rows.append((net, scheme, *ends, str(len(merging)), str(again), str(study.classes(variant).n_classes)))
        more.append(_along(f"Along the graph: {net}, {scheme}", changes, variant))
    heads = (
        "net",
        "weights",
        "bits",
        "classes",
        "calls that merge",
        "calls that add after a merge",
        "classes at the end",
    )
    return heads, rows, more


def _along(title: str, changes: Sequence[Change], variant: str) -> Section:
    """The picture, and as a table: the calls that add or merge classes."""
    rows = tuple(
        (
            f"{_layer(change, variant)} {change.key.op.removeprefix('aten::')}",
            *(str(n or "") for n in (change.n_before, change.n_classes, change.n_added, change.n_merged)),
            str(change.precision) if change.mantissa > 0 else "",
        )
        for change in changes
        if change.n_added or change.n_merged
    )
    heads = ("layer", "classes before", "after", "added", "merged", "bits")
    columns = tuple(Column(head, "number" if number else "name") for number, head in enumerate(heads))
    table = Table(columns, rows, noun="calls that change the classes", limits=Limits(100, 100, 200))
    return Section(title, (Figure(graph_svg(changes)), *([table] if rows else [])))


TABLES: Final[dict[str, tuple[str, str, Callable[[RecordedStudy], Made]]]] = {
    "activations": (
        "activations: deviation before and after",
        (
            "Deviating: share of elements that are not identical on all platforms, of 64 sampled elements of each "
            "layer and input. Sigmoid nets have Xavier weights, as published."
        ),
        _activations,
    ),
    "casts": (
        "casts: classes by dtype",
        "Published: 14 platforms; bfloat16 was not studied. Bits: least remaining precision of any two platforms.",
        _casts,
    ),
    "cores": (
        "cores: classes by number of threads",
        "Published: CPUs with so many cores; here threads, of which more than this machine's cores share them.",
        _cores,
    ),
    "distributions": (
        "distributions: classes of one convolution, 3 weights x 4 inputs",
        (
            "Published: 3 classes in each of the 12 combinations, the same ones. The output of a ReLU stands for the "
            "published captured input, and He's weights for the trained ones."
        ),
        _distributions,
    ),
    "multiplications": (
        "multiplications: classes and precision of one convolution by its size",
        (
            "k2f16: windows of 2 x 2, 16 filters; classes / bits. Measured earlier for this project on an Intel "
            "Xeon with AVX-512, 11 platforms: 15, 10, 6, 5, 0, 0 bits, 3 classes."
        ),
        _multiplications,
    ),
    "resnet18": (
        "resnet18: classes along the net on many virtual platforms",
        (
            "Measured earlier for this project on an Intel Xeon with AVX-512: 49 other virtual platforms gave 20 "
            "classes. Bits: least remaining precision of any two platforms. paths: how many platforms ran a kernel "
            "of that kind."
        ),
        _resnet18,
    ),
    "untrained": (
        "untrained: classes and precision along a net with random weights",
        "Published: remaining precision takes all values from 0 to 23, classes collapse and emerge again.",
        _untrained,
    ),
}
"""Study to its title, a note on its figures, and its table."""
