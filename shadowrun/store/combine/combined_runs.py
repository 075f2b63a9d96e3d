"""The runs in a combined file, their blocks of call numbers, and their names in reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.store.codec import decode_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shadowrun.store.datafile import DataFile
    from shadowrun.types import RunInfo

__all__ = ["ONE_RUN", "SourceRun", "are_ranks", "block_of", "greatest_seq", "name_runs", "ranges", "read_sources"]

ONE_RUN = 2**62
"""Block of numbers of a file of one run: all its calls are in it."""
MAX_NAMED = 3

# Not of `call` alone: a call that was folded has left it.
_GREATEST = (
    "select max(seq) from call where seq >= ? and seq < ?",
    "select max(seq) from diff where seq >= ? and seq < ?",
    "select max(worst_seq) from folded where worst_seq >= ? and worst_seq < ?",
    "select max(first_seq) from folded where first_seq >= ? and first_seq < ?",
)


@dataclass(frozen=True, slots=True)
class SourceRun:
    """One of the runs in a combined file, usually one rank's.

    Attributes:
        number: From 0.
        file: Name of the data file that it was read from.
        info: Description of the run, with its fingerprints.
        first_seq: Added to its call numbers: its call 17 is call ``first_seq + 17`` of the combined file.
    """

    number: int
    file: str
    info: RunInfo
    first_seq: int


def read_sources(data: DataFile) -> tuple[SourceRun, ...]:
    """The runs in a combined file; none in the file of one run."""
    return tuple(
        SourceRun(number, file, decode_info(info), first_seq)
        for number, file, info, first_seq in data.query("select id, file, info, first_seq from source order by id")
    )


def block_of(sources: Sequence[SourceRun]) -> int:
    """Call numbers that each run of a combined file has."""
    # Blocks are adjacent and of one length (`validation.check_sources`).
    return sources[1].first_seq if len(sources) > 1 else ONE_RUN


def greatest_seq(data: DataFile, first: int, block: int) -> int:
    """Greatest call number in the block that begins at `first`, counted from there."""
    found = [next(data.query(sql, (first, first + block)))[0] for sql in _GREATEST]
    return max((number for number in found if number is not None), default=first) - first


def are_ranks(sources: Sequence[SourceRun]) -> bool:
    """Whether the runs are different ranks of one distributed run."""
    ranks = {source.info.rank for source in sources}
    worlds = {source.info.world_size for source in sources}
    # The same rank twice is that of two runs.
    return len(worlds) == 1 and max(worlds) > 1 and len(ranks) == len(sources)


def name_runs(sources: Sequence[SourceRun], numbers: Iterable[int]) -> str:
    """``ranks 0-63`` or ``rank 17 only``; file names if the runs are not ranks; empty for the file of one run."""
    seen = sorted(set(numbers))
    if not sources or not seen:
        return ""
    only = " only" if len(seen) == 1 and len(sources) > 1 else ""
    if are_ranks(sources):
        ranks = [sources[number].info.rank for number in seen]
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}{only}"
    if len(seen) == len(sources) > 1:
        return f"all {len(sources)} runs"
    files = [sources[number].file for number in seen]
    more = f" and {len(files) - MAX_NAMED} more" if len(files) > MAX_NAMED else ""
    return f"{', '.join(files[:MAX_NAMED])}{more}{only}"


def ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
