"""What HTML adds to a finding: all places of its calls, and links to the lines of the source."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING

from shadowrun.analysis.drift_effects import read_repairs
from shadowrun.report.descriptions import float_text, short_site
from shadowrun.report.document import Block, Column, Figure, Later, Limits, Note, Span, Table
from shadowrun.report.effects_report import author_facts, effects_section
from shadowrun.report.pictures import histogram, pictures_section
from shadowrun.report.sanitize import clip, sanitize
from shadowrun.report.source_report import line_links

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shadowrun.analysis import Charts, Finding, Place, SourceText
    from shadowrun.report.run_report import Source

__all__ = ["FindingDetails", "facets", "ranks"]

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
        return Later(lambda: pictures_section(self.charts, sanitize(self._run.info)))

    def effects(self, findings: Sequence[Finding]) -> Later:
        """The section on why the loss differs."""
        return Later(
            lambda: effects_section(findings, self._places, self.charts, sanitize(read_repairs(self._run.info)))
        )

    def _histogram(self, places: tuple[Place, ...]) -> tuple[Figure, ...]:
        excess: Counter[int] = Counter()
        ulp: Counter[int] = Counter()
        for place in places:
            excess.update(self.charts.excess.get(place.key, {}))
            ulp.update(self.charts.ulp.get(place.key, {}))
        # The excess says more, where the float64 oracle was run for most calls.
        is_excess = 2 * sum(excess.values()) > sum(ulp.values())
        return histogram(excess if is_excess else ulp, is_excess=is_excess)

    def of(self, finding: Finding) -> Later:
        """The blocks below a finding."""
        return Later(lambda: self._blocks(finding))

    @functools.cached_property
    def _places(self) -> Mapping[int, tuple[Place, ...]]:
        return self._run.places()

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
        ("excess", worst.excess_actual if worst is not None and worst.excess_actual == worst.excess_actual else -1.0),
        ("modules", float(finding.n_modules)),
    )


def _places(places: tuple[Place, ...]) -> Later:
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
