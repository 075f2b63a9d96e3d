"""Static coverage of several devices: one state for each operator and device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.analysis.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["StaticCoverage", "StaticOperator", "cover_statically"]

STATES = ("absent", "unknown", "fallback", "generic", "composite", "kernel")
"""From worst to best."""

SPECIFIC = "specific"
"""State of an operator that exists for one kind of device only: other devices do not need it."""


@dataclass(frozen=True, slots=True)
class StaticOperator:
    """One operator.

    Attributes:
        op: Operator such as ``aten::add.Tensor``.
        states: One of `STATES` or `SPECIFIC`, for each device of the `StaticCoverage`.
        n_calls: Calls in the run; 0 without a run.
    """

    op: str
    states: tuple[str, ...]
    n_calls: int


@dataclass(frozen=True, slots=True)
class StaticCoverage:
    """Operators and devices.

    Attributes:
        devices: Names of the devices.
        sources: Where the kernels of each are listed.
        operators: First those that most devices lack, then those with most calls.
    """

    devices: tuple[str, ...]
    sources: tuple[str, ...]
    operators: tuple[StaticOperator, ...]

    def n_by_state(self, device: str) -> dict[str, int]:
        """State to number of operators on a device."""
        at = self.devices.index(device)
        counted = Counter(operator.states[at] for operator in self.operators)
        return {state: counted[state] for state in (*STATES, SPECIFIC)}

    def lacking(self, device: str) -> tuple[StaticOperator, ...]:
        """Operators that a device certainly lacks."""
        at = self.devices.index(device)
        return tuple(operator for operator in self.operators if operator.states[at] == "absent")

    def percent(self, device: str) -> float:
        """Percentage of operators with a kernel or a decomposition; 100 if there is no operator.

        Operators specific to one kind of device are not counted. If some are unknown, this is a lower bound.
        """
        n = self.n_by_state(device)
        has, total = n["kernel"] + n["composite"] + n["generic"], len(self.operators) - n[SPECIFIC]
        return 100.0 * has / total if total else 100.0

    def verdict(self, device: str) -> str:
        """Summary of a device, in words."""
        n = self.n_by_state(device)
        if not self.operators:
            return "no operators to look up"
        words = []
        if n["absent"]:
            words.append(f"{plural(n['absent'], 'operator')} absent")
        if n["fallback"]:
            words.append(f"{plural(n['fallback'], 'operator')} left to the backend's fallback")
        if n["unknown"]:
            words.append(
                f"{plural(n['unknown'], 'operator')} unknown: the kernels of {device} are in a separate package"
            )
        return ", ".join(words) if words else "no operator is absent"


def cover_statically(
    n_calls: Mapping[str, int],
    devices: Mapping[str, tuple[str, Callable[[str], str]]],
    *,
    is_specific: Callable[[str], bool],
) -> StaticCoverage:
    """Look operators up.

    Args:
        n_calls: Operator to its number of calls.
        devices: Device to where its kernels are listed, and to the look-up of an operator's state.
        is_specific: Whether an operator exists for one kind of device only.
    """

    def states(op: str) -> tuple[str, ...]:
        listed = (state(op) for _, state in devices.values())
        return tuple(SPECIFIC if s in ("absent", "unknown") and is_specific(op) else s for s in listed)

    operators = [StaticOperator(op, states(op), n) for op, n in n_calls.items()]
    # What most devices lack is first, and of these what the program calls most.
    operators.sort(key=lambda o: (-o.states.count("absent"), -o.states.count("fallback"), -o.n_calls, o.op))
    return StaticCoverage(tuple(devices), tuple(source for source, _ in devices.values()), tuple(operators))
