"""Report of classes as a `Document`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from shadowrun.report.document import (
    Block,
    Column,
    Document,
    Fact,
    Facts,
    Figure,
    GateLine,
    Limits,
    Note,
    Records,
    Section,
    Span,
    Table,
)
from shadowrun.report.document_blocks import naming
from shadowrun.studies.classes.classes_by_call import by_operator
from shadowrun.studies.classes.equivalence import letter
from shadowrun.studies.classes.layer_kernels import kernel_section
from shadowrun.studies.classes.report_data import (
    FORMAT,
    curve_svg,
    dendrogram_svg,
    graph_svg,
    leaf_order,
    study_data,
    study_records,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shadowrun.report.document import Cell
    from shadowrun.studies.classes.classes_by_call import Change
    from shadowrun.studies.classes.equivalence import Classes
    from shadowrun.studies.classes.explain import Claim, FlagClusters
    from shadowrun.studies.classes.known_classes import ClassCheck
    from shadowrun.studies.classes.study import OutputStudy, Study

__all__ = ["classes_document", "known_document", "plots_of"]

# Outputs that the table of letters has columns for; CSV and JSON have all.
_MAX_OUTPUTS: Final = 12

_ALL: Final = Limits(100, 200, 1000)
_MAX_VALUES: Final = 8
_MAX_NAMES: Final = 6


def classes_document(study: Study) -> Document:
    """Report of a study."""
    focus = study.focus
    blocks: list[Block] = [*_warnings(study), _summary(study), _outputs(study)]
    if focus.classes.n_classes > 1:  # of one there is nothing to join, nor to explain
        blocks += [_nearness(study, focus), _explained(focus)]
    if any(change.precision_before is not None for change in study.changes):
        blocks.append(_graph(study))
    if study.layers:
        blocks.append(kernel_section(study.layers, [p.name for p in study.platforms]))
    blocks.append(_letters(study))
    if study.unstable_outputs:
        blocks.append(_repeats(study))
    blocks.append(_claims(study.claims))
    title = f"classes of {len(study.platforms)} recordings"
    return Document(title, tuple(blocks), study_data(study), study_records(study))


def known_document(checked: Sequence[ClassCheck], file: str) -> Document:
    """Report of platforms against known classes."""
    n_new = sum(not found.known for found in checked)
    columns = (Column("platform", "name"), Column("class"), Column("distance"))
    rows: list[tuple[Cell, ...]] = [
        (found.platform, found.known, "")
        if found.known
        else (found.platform, (Span("new", "bad"),), found.message.partition(": ")[2])
        for found in sorted(checked, key=lambda c: bool(c.known))
    ]
    line = f"FAILED: {n_new} of {len(checked)} recordings are of a new class" if n_new else ""
    gate = GateLine(line or f"passed: {len(checked)} recordings are of known classes", not n_new)
    table = Table(columns, tuple(rows), noun="recordings", limits=_ALL)
    data = {"format": FORMAT, "known": file, "recordings": list(checked)}
    heads = ("platform", "class", "nearest", "is_for_hardware", "lost_bits", "mantissa_bits", "output")
    records = tuple(
        (c.platform, c.known, c.nearest, c.is_for_hardware, c.n_lost, c.mantissa, c.output) for c in checked
    )
    return Document(f"known classes in {file}", (table,), data, Records(heads, records), gate)


def plots_of(study: Study) -> dict[str, str]:
    """Pictures as SVG files: name without suffix to content."""
    plots = {"graph": graph_svg(study.changes)} if study.changes else {}
    for number, output in enumerate(study.outputs, 1):
        plots[f"curve-{number}"] = curve_svg(output.curve)
        plots[f"dendrogram-{number}"] = dendrogram_svg(output.classes, _who(study, output.classes))
    return plots


def _warnings(study: Study) -> Iterator[Note]:
    # Not an error: two scripts may share a model, and outputs of one name can still be compared.
    if study.are_different_programs:
        yield Note(
            f"These are recordings of different programs: all have {study.n_common:,} calls in common, of "
            f"{study.n_any:,} that any of them has. What follows is of outputs with equal names.",
            "warn",
        )
    if study.input_disagreements:
        before, after = "Inputs or program differ between the recordings: ", ". Their classes say nothing of hardware."
        yield Note(naming(before, list(study.input_disagreements), 4, after), "warn")
    if study.versions:
        listed = "; ".join(f"{name} {', '.join(found)}" for name, found in study.versions.items())
        yield Note(
            f"Versions differ between the recordings: {listed}. Their classes say nothing of hardware alone.", "warn"
        )
    if study.incomplete:
        yield Note(naming("Stopped while recording: ", study.incomplete, _MAX_NAMES, "."), "warn")
    weak = [f"{m.platform} on {_name(c)} ({m.n_mode} of {m.n_repeats})" for c, m in study.unreliable_outputs]
    if weak:
        before = "The most frequent result has under 60 % of the repeats, and hardly stands for the platform: "
        yield Note(naming(before, weak, _MAX_NAMES, "."), "warn")
    undecided = sum(o.classes.n_undecided for o in study.outputs)
    if undecided:
        yield Note(
            f"{undecided} pairs of classes may be equal by value: they have NaNs or negative zeros, and not all of "
            "their elements were sampled. They are counted as different.",
            "warn",
        )
    # As the published recordings, whose outliers had other inputs: 26 classes of which 20 are of hardware.
    if not any(p.provenance for p in study.platforms):
        yield Note(
            "The recordings do not say which inputs and weights were used: platforms that differ by more than rounding "
            "may have had others.",
            "dim",
        )


def _summary(study: Study) -> Facts:
    focus = study.focus.classes
    more = f" of {study.n_any:,}" if study.n_any > study.n_common else ""
    rows = [
        Fact("platforms", f"{len(study.platforms)}, with {study.n_common:,} common calls{more}"),
        Fact("classes", f"{focus.n_classes} at most ({_name(focus)})", "strong"),
        Fact("equal if", "values are equal (all NaNs, and both zeros)" if study.by_value else "bytes are equal"),
    ]
    return Facts(tuple(rows))


def _outputs(study: Study) -> Section:
    columns = (
        *(Column("no.", "number"), Column("output", "name"), Column("step", "number"), Column("platforms", "number")),
        *(Column("classes", "number"), Column("near", "number"), Column("bits", "number")),
        *(Column("ULP", "number"), Column("difference", "number"), Column("*", "number")),
    )
    rows: list[tuple[Cell, ...]] = []
    for number, output in enumerate(study.outputs, 1):
        c = output.classes
        rows.append((
            *(str(number), c.output.name, str(c.output.key.step), str(len(c.members)), str(c.n_classes)),
            str(output.outliers.n_classes),
            f"{c.min_precision} of {c.mantissa}" if c.mantissa else "-",
            _ulp(output),
            f"{'' if output.is_exact or c.n_classes == 1 else '≥ '}{output.max_difference:.2g}",
            str(c.n_starred or ""),
        ))  # fmt: skip
    lead = (
        "near: classes without platforms that differ by more than rounding. bits: least remaining precision. ULP and "
        "difference (relative to the greatest element): greatest of any two, exact where there is no ≥ or ≤. *: "
        "platforms that repeated themselves differently."
    )
    return Section("Outputs", (Table(columns, tuple(rows), noun="outputs", limits=_ALL),), lead, len(study.outputs))


def _ulp(output: OutputStudy) -> str:
    if output.max_ulp is None:
        return "-"
    if output.is_exact or output.classes.n_classes == 1:
        return f"{output.max_ulp:,}"
    # By the ladder, which covers all elements; samples give a lower bound only.
    bound = output.classes.max_ulp
    return f"≥ {output.max_ulp:,}" if bound is None else f"≤ {bound:,}"


def _letters(study: Study) -> Section:
    shown = study.outputs[:_MAX_OUTPUTS]
    letters = [{m.platform: m for m in o.classes.members} for o in shown]
    columns = (
        Column("platform", "name"),
        *(Column(str(number)) for number in range(1, len(shown) + 1)),
        *(Column("architecture", detail=1), Column("cores", "number", detail=1)),
    )
    rows: list[tuple[Cell, ...]] = []
    for p in study.platforms:
        own = [found.get(p.name) for found in letters]
        cells = tuple("" if m is None else (Span(m.text, "warn" if m.star else ""),) for m in own)
        rows.append((p.name, *cells, p.facts.get("architecture", ""), p.facts.get("cores", "")))
    rest = len(study.outputs) - len(shown)
    lead = "Equal letters in a column: equal results. The columns are the outputs above"
    lead += f"; {rest} more are in CSV and JSON." if rest else "."
    return Section("Classes", (Table(columns, tuple(rows), noun="platforms", limits=_ALL),), lead)


def _repeats(study: Study) -> Section:
    columns = (
        *(Column("platform", "name"), Column("output"), Column("class"), Column("results", "number")),
        *(Column("mode", "number"), Column("of", "number")),
    )
    rows = tuple(
        (m.platform, _name(c), m.text, str(m.n_distinct), str(m.n_mode), str(m.n_repeats))
        for c, m in study.unstable_outputs
    )
    table = Table(columns, rows, noun="repeated outputs", limits=Limits(12, 50, 200))
    lead = "results: different ones. mode: repeats with the most frequent one, which gives the class."
    return Section("Platforms that do not repeat themselves", (table,), lead, len(rows))


def _explained(output: OutputStudy) -> Section:
    columns = (Column("fact", "name"), Column("explains"), Column("values: platforms, classes"))
    rows: list[tuple[Cell, ...]] = []
    for fact in output.facts:
        groups = [f"{value}: {n}, {n_classes}" for value, n, n_classes in fact.groups]
        more = f" … {len(groups) - _MAX_VALUES} more" if len(groups) > _MAX_VALUES else ""
        verdict = {(True, True): "the classes", (True, False): "more than the classes"}.get(
            (fact.decides, fact.decided), ""
        )
        rows.append((fact.name, verdict, "; ".join(groups[:_MAX_VALUES]) + more))
    blocks: list[Block] = [Table(columns, tuple(rows), noun="facts", limits=Limits(16, 50, 100))] if rows else []
    if output.flags is not None and output.flags.clusters:
        blocks.append(_flags(output.flags))
    if not blocks:
        blocks.append(Note("The fingerprints of all platforms are equal."))
    lead = (
        "A fact explains the classes if platforms with equal values agree, and platforms of one class have one value."
    )
    return Section(f"What explains {_name(output.classes)}", tuple(blocks), lead)


def _flags(flags: FlagClusters) -> Section:
    columns = (
        *(Column("cluster", "name"), Column("flags", "number"), Column("explains"), Column("classes with it")),
        Column("others in it", detail=1),
    )
    rows = tuple(
        (
            cluster.name,
            str(len(cluster.flags)),
            (Span("yes", "good"),) if cluster.aligned else "",
            " ".join(cluster.classes),
            " ".join(flag for flag in cluster.flags if flag != cluster.name),
        )
        for cluster in flags.clusters
    )
    lead = (
        f"Flags that occur on the same platforms, of {flags.n_flags} without the {flags.n_common} that all have. A "
        "cluster explains if each class has it or lacks it; those tell apart "
        f"{flags.n_distinguished} of {flags.n_classes} classes."
    )
    table = Table(columns, rows, noun="clusters", limits=Limits(20, 50, 200))
    return Section(f"CPU flags of {flags.n_platforms} platforms", (table,), lead, len(rows))


def _nearness(study: Study, output: OutputStudy) -> Section:
    classes = output.classes
    who = _who(study, classes)
    columns = (Column("bits", "number"), Column("classes", "number"), Column("agree to so many bits"))
    rows: list[tuple[Cell, ...]] = []
    before = -1
    for n_lost, labels in enumerate(classes.truncated):
        n = max(labels) + 1
        # Only where the number falls: most bits, cut off, join no classes.
        if n != before:
            rows.append((str(classes.mantissa - n_lost), str(n), _joined(classes, labels)))
        before = n
    members = tuple((letter(c), str(sum(m.label == c for m in classes.members)), who[c]) for c in leaf_order(classes))
    blocks: list[Block] = [
        Figure(dendrogram_svg(classes, who), "Classes joined where they agree to so many bits."),
        Table(columns, tuple(rows), noun="steps", limits=Limits(24, 60, 60)),
        Table((Column("class"), Column("platforms", "number"), Column("which")), members, noun="classes", limits=_ALL),
        Figure(curve_svg(output.curve), "Classes so far, over platforms by vendor, architecture and cores."),
    ]
    if output.outliers.platforms:
        says = (
            f"{len(output.outliers.platforms)} platforms differ from most by more than rounding: other inputs or "
            f"weights, or a shorter format. Without them there are {output.outliers.n_classes} classes: "
        )
        blocks.append(Note(naming(says, list(output.outliers.platforms), _MAX_NAMES, "."), "warn"))
    return Section(f"How near the classes of {_name(classes)} are", tuple(blocks))


def _joined(classes: Classes, labels: list[int]) -> str:
    groups: dict[int, list[str]] = {}
    for c in range(classes.n_classes):
        groups.setdefault(labels[c], []).append(letter(c))
    return " ".join("+".join(group) for group in groups.values())


def _graph(study: Study) -> Section:
    # Most calls pass on the classes of their inputs: a table of all would hide the few that make them.
    changed = [c for c in study.changes if c.n_added or c.n_merged]
    columns = (
        *(Column("call", "name"), Column("step", "number"), Column("inputs", "number"), Column("results", "number")),
        *(Column("added", "number"), Column("merged", "number"), Column("bits", "number")),
        *(Column("kernels", detail=1), Column("parents", detail=1), Column("line", detail=2)),
    )
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (
            *(
                _call(c),
                str(c.key.step),
                str(c.n_before),
                str(c.n_classes),
                str(c.n_added or ""),
                str(c.n_merged or ""),
            ),
            *(_bits(c), _kernels(c), ", ".join(f"{k.module}/{k.op}".lstrip("/") for k in c.parents), c.site),
        )
        for c in changed
    )
    operators = by_operator(study.changes)
    of_operator = tuple(
        (
            o.op,
            *(
                str(n or "")
                for n in (o.n_calls, o.n_adding, o.n_added, o.n_merging, o.n_merged, o.n_up, o.n_same, o.n_down)
            ),
        )
        for o in operators
        if o.n_added or o.n_merged or o.n_up or o.n_same or o.n_down
    )
    heads = ("calls", "adding", "added", "merging", "merged", "bits up", "same", "down")
    lead = (
        "Classes by all inputs of a call, and by its results. A call adds classes where equal inputs differ afterwards."
    )
    return Section(
        "Along the graph",
        (
            Figure(graph_svg(study.changes)),
            Table(columns, rows, noun="calls", limits=Limits(30, 100, 1000)),
            Table(
                (Column("operator", "name"), *(Column(head, "number") for head in heads)),
                of_operator,
                noun="operators",
                limits=_ALL,
            ),
        ),
        lead,
        len(changed),
    )


def _claims(claims: tuple[Claim, ...]) -> Section:
    columns = (Column("claim"), Column("holds"), Column("broken", "number"), Column("of", "number"), Column("example"))
    verdicts = {True: Span("yes", "good"), False: Span("no", "bad"), None: Span("not tested", "dim")}
    rows = tuple((c.text, (verdicts[c.holds],), str(c.n_broken), str(c.n_tested), c.example) for c in claims)
    lead = "Of the published claims. Fingerprints are hardware, libraries and settings, without names and memory."
    return Section("Claims", (Table(columns, rows, noun="claims", limits=_ALL),), lead)


def _who(study: Study, classes: Classes) -> dict[int, str]:
    """For each class its platforms: ``Broadwell 2, 4; Haswell 2``, or their names if all have one architecture."""
    facts = {p.name: p.facts for p in study.platforms}
    # On one machine, platforms are settings: the architecture would name all of them alike.
    if len({own.get("architecture") for own in facts.values()}) == 1:
        return {c: ", ".join(m.platform for m in classes.members if m.label == c) for c in range(classes.n_classes)}
    found: dict[int, str] = {}
    for c in range(classes.n_classes):
        groups: dict[str, dict[str, None]] = {}
        for m in classes.members:
            if m.label == c:
                own = facts[m.platform]
                # The number of the host's cores says nothing of a result that an accelerator computed.
                cores = own.get("cores", "") if own.get("device", "cpu") == "cpu" else ""
                groups.setdefault(own.get("architecture") or m.platform, {})[cores] = None
        ordered = {name: sorted(filter(None, cores), key=_number) for name, cores in groups.items()}
        found[c] = "; ".join(f"{name} {', '.join(cores)}".rstrip() for name, cores in ordered.items())
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.inf


def _name(classes: Classes) -> str:
    return f"{classes.output.name} step {classes.output.key.step}"


def _call(change: Change) -> str:
    name = f"{change.key.module}/{change.key.op}" if change.key.module else change.key.op
    return f"{name} #{change.key.occurrence}" if change.key.occurrence else name


def _bits(change: Change) -> str:
    if change.mantissa <= 0:
        return "-"
    before = "" if change.precision_before is None else f"{change.precision_before} → "
    return f"{before}{change.precision}"


def _kernels(change: Change) -> str:
    return ", ".join(f"{name}: {n}" for name, n in change.kernels.items())
