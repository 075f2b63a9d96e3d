"""Mutators: ways to change a program, in four families. `MUTATORS` has them by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shadowrun.studies.campaign.mutators import arguments, execution, inplace_and_out, structure, tensors, values

if TYPE_CHECKING:
    from shadowrun.studies.campaign.mutators.mutator import Mutator

__all__ = ["ALL", "FAMILIES", "MUTATORS"]

_KNOWN: Final[tuple[Mutator, ...]] = (
    structure.Insert(),
    structure.InsertBinary(),
    structure.InsertLayer(),
    structure.Remove(),
    structure.Duplicate(),
    structure.Swap(),
    structure.Replace(),
    structure.Weights(),
    structure.Graft(),
    arguments.Argument(),
    arguments.Unread(),
    tensors.Size(),
    tensors.Rank(),
    tensors.Broadcast(),
    tensors.Dtype(),
    tensors.Layout(),
    inplace_and_out.InPlace(),
    inplace_and_out.Out(),
    values.Exceptional(),
    values.Scale(),
    values.Edge(),
    execution.Backward(),
    execution.Autocast(),
    execution.BatchSlice(),
    execution.Train(),
    execution.Threads(),
    execution.Metamorphic(),
    execution.Compile(),
)
MUTATORS: Final[dict[str, Mutator]] = {m.name: m for m in _KNOWN}
FAMILIES: Final = ("structure", "arguments", "tensors", "execution")
ALL: Final = tuple(name for name in MUTATORS if name != "compile")
"""Names of the mutators that a campaign uses where it names none: a compiler takes a thousand times as long."""
