"""The programs of a campaign: a zoo's, or torch's own (modules, operators, optimizers), and frequent subgraphs."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from shadowrun.errors import DataFileError, UsageError
from shadowrun.studies.zoo.program import read_zoo, unique, write_zoo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from shadowrun.studies.zoo.graph import Graph
    from shadowrun.studies.zoo.program import Program, Stage

__all__ = ["LazyProgram", "lazily", "program_stages", "write_programs"]


class LazyProgram:
    """A program that is checked when its graph is needed: a campaign draws a few of many.

    Args:
        key: Its id.
        programs: All of a zoo.

    Attributes:
        id: Its id.
    """

    __slots__ = ("_programs", "id")

    def __init__(self, key: str, programs: Mapping[str, Program]) -> None:
        self.id = key
        self._programs = programs

    @property
    def graph(self) -> Graph:
        """What it computes."""
        return self._programs[self.id].graph


def lazily(path: Path) -> list[LazyProgram]:
    """The programs of a zoo.

    Raises:
        DataFileError: It cannot be read.
    """
    programs = read_zoo(path).programs
    return [LazyProgram(key, programs) for key in programs]


def write_programs(out: Path, zoo: Path | None, patterns: Sequence[str], on_progress: Callable[..., None]) -> int:
    """Write the programs of a campaign to a file of their own, from which everything regenerates; gives their number.

    Args:
        out: The file.
        zoo: Where they come from; None for torch's own modules, operators and optimizers and, unless `patterns` leave
            these out, the frequent subgraphs of the modules.
        patterns: Glob patterns of names, sources or ids; all if empty.
        on_progress: Called with done, total and name.

    Raises:
        UsageError: No program fits, or torch's database cannot be imported.
        DataFileError: The zoo cannot be read, or the file not be written.
    """
    if zoo is None:
        programs, stages = _own_programs(patterns, on_progress)
    else:
        whole = read_zoo(zoo)
        programs, stages = list(whole.programs.values()), whole.stages
    chosen = [p for p in programs if _fits(p, patterns)]
    if not chosen:
        raise UsageError(
            f"No program fits --programs {','.join(patterns)}: `shadowrun zoo list` names those of a zoo.",
            slug="no-programs",
        )
    write_zoo(out, chosen, stages)
    return len(chosen)


def _own_programs(
    patterns: Sequence[str], on_progress: Callable[..., None]
) -> tuple[Sequence[Program], tuple[Stage, ...]]:
    from shadowrun.studies.zoo import subgraphs
    from shadowrun.studies.zoo.sources import modules, operators, optimizers

    found = modules.collect(lambda _: True, on_progress)
    others = [source.collect(lambda _: True, on_progress) for source in (operators, optimizers)]
    own, stages = unique(found.programs)[0], (*found.stages, *(stage for one in others for stage in one.stages))
    programs = unique((*own, *(program for one in others for program in one.programs)))[0]
    if patterns and not any(fnmatchcase(subgraphs.SOURCE, pattern) for pattern in patterns):
        return programs, stages
    # Of the modules alone: a program of one operator has no part that is frequent elsewhere.
    mined = subgraphs.mine_subgraphs(own, lambda done, n, name: on_progress(done, n, f"subgraphs of {name}"))
    return unique((*programs, *mined.programs))[0], (*stages, *mined.stages)


def _fits(program: Program, patterns: Sequence[str]) -> bool:
    names = (program.name, program.source, program.id)
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


# Stages of the making of a campaign's programs, as its report counts them: what came in, out, and why not.

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
