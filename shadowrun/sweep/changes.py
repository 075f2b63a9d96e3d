"""What became better and worse between two sweeps."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.sweep.outcome import Support

if TYPE_CHECKING:
    from shadowrun.sweep.cases import Part
    from shadowrun.sweep.outcome import Kind
    from shadowrun.sweep.platforms import Sweep
    from shadowrun.sweep.support import OperatorSupport, SupportTable

__all__ = ["Change", "Changes", "Direction"]

_RANK = {Support.NONE: 0, Support.PARTIAL: 1, Support.FULL: 2}


class Direction(enum.StrEnum):
    """Which way."""

    REGRESSED = "regressed"
    """The class is worse, or it fails in another way than before too."""
    GAINED = "gained"
    OTHERWISE = "fails otherwise"
    """The class is the same, and so is no reason."""


@dataclass(frozen=True, slots=True)
class Change:
    """A part of an operator in a dtype.

    Attributes:
        name, dtype, part: Which.
        direction: Which way.
        before, after: Class in each sweep.
        kinds_before, kinds_after: Kinds of failures in each.
        why: Of the later one, where something fails there: the first reason; else of the earlier one.
    """

    name: str
    dtype: str
    part: Part
    direction: Direction
    before: Support
    after: Support
    kinds_before: tuple[Kind, ...]
    kinds_after: tuple[Kind, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Changes:
    """The differences of two sweeps, over the parts that both tested.

    Attributes:
        before, after: Names of the sweeps.
        changes: Regressions first.
        n_compared: Parts that both tested.
        only_before, only_after: Operators that one of them tested only.
    """

    before: str
    after: str
    changes: tuple[Change, ...]
    n_compared: int
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @classmethod
    def between(cls, before: Sweep, after: Sweep) -> Changes:
        """Compare two sweeps, the earlier one first."""
        old, new = _parts(before.table), _parts(after.table)
        both = sorted(set(old) & set(new))
        changes = [c for key in both if (c := _change(key, old[key], new[key]))]
        changes.sort(key=lambda c: (list(Direction).index(c.direction), c.name, c.dtype, c.part))
        names = {key[0] for key in old}, {key[0] for key in new}
        return cls(
            before.label,
            after.label,
            tuple(changes),
            len(both),
            tuple(sorted(names[0] - names[1])),
            tuple(sorted(names[1] - names[0])),
        )

    def of(self, direction: Direction) -> tuple[Change, ...]:
        """The changes in one direction."""
        return tuple(c for c in self.changes if c.direction is direction)


_Key = tuple[str, str, "Part"]


def _parts(table: SupportTable) -> dict[_Key, tuple[Support, OperatorSupport]]:
    return {
        (operator.name, dtype, part): (support, operator)
        for operator in table.operators
        for (dtype, part), support in operator.parts.items()
        if support is not Support.UNTESTED
    }


def _change(key: _Key, old: tuple[Support, OperatorSupport], new: tuple[Support, OperatorSupport]) -> Change | None:
    name, dtype, part = key
    before, after = ([f for f in o.failing if (f.dtype, f.part) == (dtype, part)] for _, o in (old, new))
    kinds_before, kinds_after = (tuple(dict.fromkeys(f.finding.kind for f in found)) for found in (before, after))
    reasons = [
        {(f.finding.kind, f.finding.op, f.finding.kernel, f.finding.cause) for f in fs} for fs in (before, after)
    ]
    if _RANK[new[0]] < _RANK[old[0]] or reasons[1] > reasons[0]:
        direction = Direction.REGRESSED
    elif _RANK[new[0]] > _RANK[old[0]] or reasons[1] < reasons[0]:
        direction = Direction.GAINED
    elif reasons[0] != reasons[1]:
        direction = Direction.OTHERWISE
    else:
        return None
    shown = (after or before)[0].finding
    why = ": ".join(filter(None, (shown.op, shown.cause, shown.explanation or shown.message)))
    return Change(name, dtype, part, direction, old[0], new[0], kinds_before, kinds_after, why)
