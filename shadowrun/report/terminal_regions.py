"""The terminal report's section on compiled regions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from shadowrun.report.layout import COLOURS, labelled, table_of, texts
from shadowrun.report.words import describe_region, figure, region_outcomes, short_site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from shadowrun.report.content import Content

__all__ = ["region_section"]

MAX_REGIONS = 25
MAX_DESCRIBED = 12


def region_section(content: Content) -> Iterator[Text | Table]:
    """What to print below the heading; nothing where the run had no regions."""
    regions, skipped = content.regions, content.regions_skipped
    if regions.rows or skipped.rows:
        yield Text(content.regions_line)
    if regions.rows:
        yield _table(content)
    n_more = len(regions.rows) + regions.n_more - MAX_REGIONS
    if n_more > 0:
        yield Text(f"… and {n_more:,} more regions", "dim")
    for region in regions.rows[:MAX_DESCRIBED]:
        lines = describe_region(region)
        if lines:
            yield Text.assemble("\n", (f"{region.name} {region.phase}", f"bold {COLOURS[region.status]}"))
            yield from labelled(lines)
    for skip in skipped.rows[:MAX_DESCRIBED]:
        yield Text(f"not compared: {skip.n:,} calls of {skip.op}, {skip.reason}", "yellow")


def _table(content: Content) -> Table:
    table = table_of(
        ("region", ""), ("phase", ""), ("calls", "number"), ("outcome", ""), ("max abs", "number"),
        ("operators", "number"), ("backend", ""), ("line", ""),
    )  # fmt: skip
    for region in content.regions.rows[:MAX_REGIONS]:
        outcomes = Text(", ").join(Text(f"{n:,} {status}", COLOURS[status]) for n, status in region_outcomes(region))
        figures = (
            "-" if region.worst is None else figure(region.worst.max_abs),
            f"{region.n_operators:,}" if region.n_operators >= 0 else "-",
        )
        last = texts(region.backend, short_site(region.site))
        table.add_row(*texts(region.name, region.phase), f"{region.n_calls:,}", outcomes, *figures, *last)
    return table
