"""What HTML adds to a finding: all places of its calls, and links to the lines of the source."""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from typing import TYPE_CHECKING

from shadowrun.analysis import for_authors
from shadowrun.analysis.drift_effects import read_repairs
from shadowrun.report.document import Block, Column, Fact, Facts, Figure, Later, Limits, Note, Section, Span, Table
from shadowrun.report.formatting import float_text, short_site
from shadowrun.report.run_charts import histogram, pictures_section
from shadowrun.report.sanitize import clip, sanitize
from shadowrun.report.source_report import line_links

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shadowrun.analysis import Charts, Finding, FindingOrigin, SourceText
    from shadowrun.analysis.drift_effects import Effects, Repair, StepEnd
    from shadowrun.report.run_report import Source

__all__ = ["FindingDetails", "author_facts", "effect_of", "effects_section", "facets", "ranks", "repair_blocks"]

MAX_PLACES = 200
MAX_FACETS = 20
MAX_CELL = 200


class FindingDetails:
    """Reads, once for all findings and only if a page asks, what their entries open.

    Args:
        run: The run.
    """

    def __init__(self, run: Source) -> None:
        self._run = run

    @functools.cached_property
    def source(self) -> SourceText:
        """The user's lines around the findings."""
        return self._run.source()

    @functools.cached_property
    def charts(self) -> Charts:
        """Series of the pictures."""
        return self._run.charts()

    def pictures(self) -> Later:
        """The section of pictures."""
        # Only HTML reads all calls for them: text and JSON of ten million calls need the groups alone.
        return Later(lambda: pictures_section(self.charts, sanitize(self._run.info)))

    def effects(self, findings: Sequence[Finding]) -> Later:
        """The section on why the loss differs."""
        return Later(
            lambda: effects_section(findings, self._places, self.charts, sanitize(read_repairs(self._run.info)))
        )

    def _histogram(self, places: tuple[FindingOrigin, ...]) -> tuple[Figure, ...]:
        excess: Counter[int] = Counter()
        ulp: Counter[int] = Counter()
        for place in places:
            excess.update(self.charts.excess.get(place.key, {}))
            ulp.update(self.charts.ulp.get(place.key, {}))
        # The excess says more, where the float64 oracle was run for most calls.
        is_excess = 2 * sum(excess.values()) > sum(ulp.values())
        return histogram(excess if is_excess else ulp, is_excess=is_excess)

    def blocks(self, finding: Finding) -> Later:
        """The blocks below a finding."""
        return Later(lambda: self._blocks(finding))

    @functools.cached_property
    def _places(self) -> Mapping[int, tuple[FindingOrigin, ...]]:
        return self._run.origins()

    def _blocks(self, finding: Finding) -> tuple[Block, ...]:
        places = self._places.get(finding.number, ())
        blocks: list[Block] = [*author_facts(finding)]
        links = line_links([place.site for place in places], self.source)
        if links:
            blocks.append(Note((Span("In the source:"), *links)))
        if finding.kind == "mismatch":
            blocks += self._histogram(places)
        if len(places) > 1:
            blocks.append(_places(places))
        return tuple(blocks)


def facets(finding: Finding) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What a finding can be filtered by; the step is that of its first call."""
    named = {
        "status": (finding.kind,),
        "operator": (finding.op,),
        "cause": (str(finding.cause),) if finding.cause else (),
        "phase": tuple(map(str, finding.phases)),
        # Each value is an attribute of the page, for each finding: a model may have 5,000 modules.
        "module": finding.modules[:MAX_FACETS],
        "first step": (str(finding.first_step),),
    }
    return tuple((name, tuple(clip(value, MAX_CELL) for value in values)) for name, values in named.items())


def ranks(finding: Finding) -> tuple[tuple[str, float], ...]:
    """What findings can be sorted by, the greatest first; the first call is negative, so that it leads."""
    worst = finding.worst
    return (
        ("calls", float(finding.n_calls)),
        ("first call", -float(finding.first_seq)),
        ("ULP", float(worst.max_ulp) if worst is not None else -1.0),
        ("excess", -1.0 if worst is None else _finite(worst.excess_actual)),
        ("modules", float(finding.n_modules)),
    )


def _finite(number: float) -> float:
    # NaN is unequal to itself: in a page's script it would leave the order to the browser. JSON has no infinity.
    return -1.0 if math.isnan(number) else min(number, sys.float_info.max)


def _places(places: tuple[FindingOrigin, ...]) -> Later:
    rows = tuple(
        (
            place.module or "outside any module",
            str(place.phase),
            clip(short_site(place.site), MAX_CELL),
            clip(place.inputs, MAX_CELL),
            f"{place.n_calls:,}",
            f"{place.first_seq:,}",
            f"{place.first_step:,}",
            float_text(place.max_abs),
            f"{place.max_ulp:,}",
        )
        for place in sanitize(places[:MAX_PLACES])
    )
    columns = (
        Column("module"), Column("phase"), Column("line"), Column("inputs"), Column("calls", "number"),
        Column("first call", "number"), Column("step", "number"), Column("max abs", "number"), Column("ULP", "number"),
    )  # fmt: skip
    table = Table(columns, rows, len(places) - len(rows), "places: the JSON has the first five", Limits(html=20))
    return Later(lambda: (table,), f"All {len(places):,} places of these calls")


# Why the loss differs: the findings ranked by their effect, as a section of the HTML report.

_MAX_AUTHOR_CELL = 160
MAX_ROWS = 1000
_REPAIR_LEAD = (
    "The deviation of the loss within one step, and what it is with each call of one operator before it on the "
    "reference: measured by replay, from the program's values at the start of the step."
)
_NO_REPAIRS = (
    "What share of the loss's error is one operator's was not measured: a run with --drift does it from its second "
    "step on, in a step for each operator."
)


def effect_of(places: Sequence[FindingOrigin], effects: Effects) -> tuple[float, float]:
    """Rise of the accumulated error at a finding's calls, in a step, and the greatest one of their results."""
    keys = dict.fromkeys(place.key for place in places)
    reached = [effects.reach[key] for key in keys if key in effects.reach]
    # Two origins may share a context and outcome, whose rise must count once.
    return sum(effects.rise.get(key, 0.0) for key in keys), max(reached, key=_size, default=-1.0)


def author_facts(finding: Finding) -> tuple[Facts, ...]:
    """What the authors of model and kernel can do."""
    advice = for_authors(finding.cause, op=finding.op, kernel=" and ".join(finding.missing_kernels[:2]))
    if advice is None:
        return ()
    return (Facts((Fact("in the model", clip(advice[0])), Fact("in the kernel", clip(advice[1])))),)


def repair_blocks(repairs: Mapping[str, Repair]) -> tuple[Block, ...]:
    """What the loss would be with one operator right; nothing where that was not measured."""
    if not repairs:
        return ()
    ranked = sorted(repairs.values(), key=lambda repair: -(repair.share if repair.share is not None else -math.inf))
    rows = tuple(
        (
            clip(repair.op, _MAX_AUTHOR_CELL),
            float_text(repair.error) if repair.n_steps else "-",
            float_text(repair.without) if repair.n_steps else "-",
            share_text(repair),
            f"{repair.n_steps:,}",
        )
        for repair in ranked
    )
    columns = (
        Column("operator", "name"), Column("loss differs by", "number"), Column("with it right", "number"),
        Column("gone"), Column("steps measured", "number"),
    )  # fmt: skip
    return Note(_REPAIR_LEAD, "dim"), Table(columns, rows)


def share_text(repair: Repair | None) -> str:
    """The share of the loss's error that is gone with an operator right, or why it is not known."""
    if repair is None:
        return "not measured"
    if not repair.n_steps:
        return clip(f"not measured: the chain ends at {repair.lost}", _MAX_AUTHOR_CELL)
    if not repair.n_calls:
        return "no call before the loss"
    if repair.share is None:
        return "the loss is equal" if repair.error == 0 else "not finite"
    return f"{100 * repair.share:.0f} %" if repair.share >= 0 else f"none: it grows by {-100 * repair.share:.0f} %"


def effects_section(
    findings: Sequence[Finding],
    places: Mapping[int, tuple[FindingOrigin, ...]],
    charts: Charts,
    repairs: Mapping[str, Repair],
) -> tuple[Section, ...]:
    """The section; nothing for a run without mismatches."""
    wrong = [finding for finding in findings if finding.kind == "mismatch"]
    if not wrong:
        return ()
    effects = charts.effects
    blocks = [*_ends(charts, effects.ends)] if effects is not None else []
    if effects is None:
        text = "The accumulated error was not recorded, so the order is that of the isolated error. Run with --drift "
        blocks.append(Note(text + "(drift=True) to see what reaches the loss and the gradients.", "warn"))
        ranked = [(finding, (-1.0, -1.0)) for finding in wrong]
    else:
        ranked = [(finding, effect_of(places.get(finding.number, ()), effects)) for finding in wrong]
        # What was measured by a repair comes first; a rise may also be another operator's error that passes through.
        ranked.sort(key=lambda pair: (-_share(repairs, pair[0]), -pair[1][0], -_size(pair[1][1])))
    blocks += [_table(ranked, repairs, has_effects=effects is not None)]
    blocks += repair_blocks(repairs) or (Note(_NO_REPAIRS, "dim"),)
    lead = "Mismatches by their effect on the model, the greatest first; each finding has what you can do about it."
    return (Section("Why does my loss differ?", tuple(blocks), lead, anchor="effects"),)


def _ends(charts: Charts, ends: Sequence[StepEnd]) -> Iterator[Block]:
    rows = []
    for end in ends:
        loss, grad = charts.contexts.get(end.loss_context), charts.contexts.get(end.grad_context)
        rows.append(
            (
                f"{end.step:,}",
                _figure(end.loss_rel),
                _figure(end.loss_abs),
                clip(f"{loss.op}, call {end.loss_seq:,}", _MAX_AUTHOR_CELL) if loss else "not measured",
                _figure(end.grad_rel),
                clip(f"{grad.op} in {grad.module or 'no module'}", _MAX_AUTHOR_CELL) if grad else "not measured",
            )
        )
    columns = (
        Column("step", "number"), Column("loss, relative", "number"), Column("loss, absolute", "number"),
        Column("loss of"), Column("gradients, relative", "number"), Column("greatest at"),
    )  # fmt: skip
    if rows:
        yield Note("The accumulated error at the loss and the gradients: first step, worst step, last step.")
        yield Table(columns, tuple(rows))


def _share(repairs: Mapping[str, Repair], finding: Finding) -> float:
    """For the order; what was not measured is between gain and loss."""
    repair = repairs.get(finding.op)
    return 0.0 if repair is None or repair.share is None else repair.share


def _table(
    ranked: Sequence[tuple[Finding, tuple[float, float]]], repairs: Mapping[str, Repair], *, has_effects: bool
) -> Table:
    rows = []
    for finding, (rise, reach) in ranked[:MAX_ROWS]:
        advice = for_authors(finding.cause, op=finding.op)
        worst = finding.worst
        shares = (share_text(repairs.get(finding.op)),) if repairs else ()
        figures = (*shares, _figure(rise), _figure(reach)) if has_effects else ()
        rows.append(
            (
                (Span(str(finding.number), link=f"finding-{finding.number}"),),
                clip(finding.op, _MAX_AUTHOR_CELL),
                *figures,
                float_text(worst.max_abs) if worst is not None else "-",
                _figure(worst.excess_actual) if worst is not None else "-",
                clip(finding.explanation or str(finding.cause or ""), _MAX_AUTHOR_CELL),
                clip(advice[0], _MAX_AUTHOR_CELL) if advice else "",
            )
        )
    effect = (Column("error rises by", "number"), Column("error reached", "number")) if has_effects else ()
    effect = (Column("gone"), *effect) if has_effects and repairs else effect
    columns = (
        Column("nr", "number"), Column("operator", "name"), *effect, Column("isolated error", "number"),
        Column("excess", "number"), Column("why"), Column("in the model"),
    )  # fmt: skip
    return Table(columns, tuple(rows), len(ranked) - len(rows), "findings", Limits(html=10))


def _figure(value: float) -> str:
    return "-" if value < 0 else float_text(value)


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value
