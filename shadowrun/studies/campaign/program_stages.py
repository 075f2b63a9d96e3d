"""Stages of the making of a campaign's programs, as its report counts them: what came in, out, and why not."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from shadowrun.errors import DataFileError
from shadowrun.studies.zoo.program import read_zoo

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["program_stages"]

_MAX_REASON: Final = 60
_NUMBERS: Final = re.compile(r"\d+")


def program_stages(programs: Path) -> tuple[tuple[str, int, int, Mapping[str, int]], ...]:
    """Name, counts in and out, and reasons of each stage of the zoo; none where its file cannot be read.

    Args:
        programs: File with the programs of a campaign.
    """
    try:
        zoo = read_zoo(programs)
    except DataFileError:
        return ()  # a report needs the stores only
    stages = [(f"{s.source}: {s.name}", s.n_in, s.n_out, _reasons(s.left_out)) for s in zoo.stages]
    # The last step of a source gives its programs.
    n_made = sum({s.source: s.n_out for s in zoo.stages}.values())
    n_chosen = len(zoo.programs)
    left = {"not chosen": n_made - n_chosen} if n_made > n_chosen else {}
    return (*stages, ("programs of the campaign", max(n_made, n_chosen), n_chosen, left))


def _reasons(left_out: tuple[tuple[str, str], ...]) -> dict[str, int]:
    """Reasons with their numbers, the most frequent first: up to the first figure or quotation."""
    found = Counter(_short(why) for _, why in left_out)
    return dict(found.most_common())


def _short(why: str) -> str:
    head = _NUMBERS.split(why.partition(": ")[0].partition("'")[0])[0].strip(" ,;(")
    return head[:_MAX_REASON] or why[:_MAX_REASON]
