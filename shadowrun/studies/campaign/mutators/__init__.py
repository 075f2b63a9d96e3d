"""Mutators: ways to change a program, in four families. `MUTATORS` has them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shadowrun.studies.campaign.mutators import structure

if TYPE_CHECKING:
    from shadowrun.studies.campaign.mutators.mutator import Mutator

__all__ = ["ALL", "FAMILIES", "MUTATORS"]

_ALL: Final[tuple[Mutator, ...]] = (
    structure.Insert(),
    structure.InsertBinary(),
    structure.InsertLayer(),
    structure.Remove(),
    structure.Duplicate(),
)
MUTATORS: Final[dict[str, Mutator]] = {m.name: m for m in _ALL}
FAMILIES: Final = ("structure", "arguments", "tensors", "execution")
ALL: Final = tuple(MUTATORS)
"""Names of the mutators that a campaign uses where it names none."""
