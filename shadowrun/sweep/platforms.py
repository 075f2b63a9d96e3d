"""Coverage files side by side: what each platform has of each operator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.sweep.coveragefile import CoverageFile
from shadowrun.sweep.outcome import Support
from shadowrun.sweep.support import SupportTable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shadowrun.sweep.coveragefile import SweepInfo
    from shadowrun.sweep.support import OperatorSupport

__all__ = ["Platforms", "SupportRow", "Sweep", "read_sweeps"]

_WORST_FIRST = (Support.NONE, Support.PARTIAL, Support.UNTESTED, Support.FULL)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One coverage file.

    Attributes:
        label: Its target; followed by the file's name where several files have the same.
        info: What the sweep was.
        table: Its tables.
    """

    label: str
    info: SweepInfo
    table: SupportTable

    @property
    def percent_full(self) -> float:
        """Operators that are full, in percent of those that were tested; 0 where none was."""
        counts = self.table.by_support
        tested = sum(counts.values()) - counts[Support.UNTESTED]
        return 100.0 * counts[Support.FULL] / tested if tested else 0.0


@dataclass(frozen=True, slots=True)
class SupportRow:
    """One operator on all platforms.

    Attributes:
        name: Operator.
        cells: What each platform has of it; None where its sweep left it out.
    """

    name: str
    cells: tuple[OperatorSupport | None, ...]

    @property
    def supports(self) -> tuple[Support | None, ...]:
        """Class on each platform."""
        return tuple(cell.support if cell else None for cell in self.cells)

    @property
    def differs(self) -> bool:
        """Whether platforms that tested it have different classes."""
        return len({s for s in self.supports if s not in (None, Support.UNTESTED)}) > 1


@dataclass(frozen=True, slots=True)
class Platforms:
    """Several sweeps.

    Attributes:
        sweeps: In the order in which they were given.
        rows: Operators, those that most platforms lack first.
    """

    sweeps: tuple[Sweep, ...]
    rows: tuple[SupportRow, ...]

    @classmethod
    def of(cls, sweeps: Sequence[Sweep]) -> Platforms:
        """Put sweeps side by side."""
        found = [{o.name: o for o in sweep.table.operators} for sweep in sweeps]
        names = sorted(set().union(*found))
        rows = [SupportRow(name, tuple(f.get(name) for f in found)) for name in names]
        return cls(tuple(sweeps), tuple(sorted(rows, key=_rank)))

    @property
    def n_differing(self) -> int:
        """Operators that not all platforms have alike."""
        return sum(row.differs for row in self.rows)


def read_sweeps(paths: Sequence[Path]) -> list[Sweep]:
    """Read coverage files.

    Raises:
        DataFileError: Missing, or no coverage file.
    """
    read = []
    for path in paths:
        file = CoverageFile.open(path)
        try:
            read.append((path, file.info, SupportTable.of(file.results())))
        finally:
            file.close()
    named = Counter(info.target for _, info, _ in read)
    return [
        Sweep(f"{info.target} ({path.name})" if named[info.target] > 1 else info.target, info, table)
        for path, info, table in read
    ]


def _rank(row: SupportRow) -> tuple[object, ...]:
    counts = Counter(row.supports)
    return (*(-counts[support] for support in _WORST_FIRST[:2]), row.name)
