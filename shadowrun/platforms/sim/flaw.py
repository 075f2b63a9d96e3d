"""What a flaw of the simulated device is, and what a correct tool must say about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shadowrun.types import Cause

__all__ = ["Flaw"]


@dataclass(frozen=True, slots=True)
class Flaw:
    """One switchable flaw. Free of torch: the command line lists flaws in its help.

    Attributes:
        name: ``maximum-drops-nan``.
        kind: ``support``, ``exceptional``, ``precision``, ``form``, ``kernel``, ``memory``, ``training`` or ``speed``.
        description: One line.
        issue: Public issue that it is modelled on, ``pytorch/pytorch#143976``, or ``none:`` and what it imitates.
        operators: Operators, as a dispatch mode sees them, on which the finding may be placed: any of them is
            right, any other is wrong.
        statuses: Values of `shadowrun.types.Status` that are right.
        cause: Cause that is right; None where no cause fits (a vendor's runtime error).
        accepted: Causes that are right as well, where the evidence a tool can have leaves two.
        explanation: Hypothesis that a tool should name; may be empty.
        trigger: Name of the function in `triggers` that makes the flaw matter; the flaw's own name if empty.
    """

    name: str
    kind: str
    description: str
    issue: str
    operators: tuple[str, ...]
    statuses: tuple[str, ...]
    cause: Cause | None
    accepted: tuple[Cause, ...] = ()
    explanation: str = ""
    trigger: str = ""

    def __post_init__(self) -> None:
        if not self.trigger:
            object.__setattr__(self, "trigger", self.name)
