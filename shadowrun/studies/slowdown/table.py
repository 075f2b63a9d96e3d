"""Slowdown of operators and the expected time of a step, computed from measured times."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.studies.slowdown.timing import TimedCall

__all__ = ["OperatorSlowdown", "Slowdown", "StepTime"]

BOUNDS = (2.0, 10.0)
"""Ratios that published tables count; see docs/howto/slowdown.md."""


@dataclass(frozen=True, slots=True)
class OperatorSlowdown:
    """Slowdown of one operator over all its call signatures.

    Attributes:
        op: Operator.
        n_signatures: Signatures that were timed.
        n_calls: Calls of them in the run.
        ratio: Time of its calls on the target divided by that on the reference.
        lower, upper: The same from the quartiles of each signature's ratio.
        lost_us: Extra microseconds in one step on the target; negative if it is faster.
        worst: Signature with the greatest ratio.
    """

    op: str
    n_signatures: int
    n_calls: int
    ratio: float
    lower: float
    upper: float
    lost_us: float
    worst: TimedCall


@dataclass(frozen=True, slots=True)
class StepTime:
    """Expected time of the operators of one step, in microseconds, one after the other.

    Attributes:
        ref_us, target_us: On each platform.
        complete: Whether all its calls were timed; if not, both times exclude the others.
    """

    ref_us: float
    target_us: float
    complete: bool

    @property
    def ratio(self) -> float:
        """Target divided by reference; 1 if the reference took no time."""
        return self.target_us / self.ref_us if self.ref_us > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Slowdown:
    """All measurements of a study.

    Attributes:
        operators: Operators by extra time in a step; of a database, by their ratio.
        failing: Signatures that the target cannot run.
        left_out: Signatures that could not be timed for other reasons.
        step: Expected time of a step.
        critical_ratio: Operators slower than this are reported separately.
        of_program: Whether the calls are those of a program. If not, there is one call of each operator of a database
            and no step, and the slowest operators come first.
    """

    operators: tuple[OperatorSlowdown, ...]
    failing: tuple[TimedCall, ...]
    left_out: tuple[TimedCall, ...]
    step: StepTime
    critical_ratio: float
    of_program: bool = True

    @classmethod
    def from_timings(
        cls, measured: Sequence[TimedCall], n_steps: int, critical_ratio: float, *, of_program: bool = True
    ) -> Slowdown:
        """Summarise measurements.

        Args:
            measured: One for each signature.
            n_steps: Steps of the run.
            critical_ratio: Operators slower than this are reported separately.
            of_program: Whether the calls are those of a program.
        """
        by_op: dict[str, list[TimedCall]] = defaultdict(list)
        for m in measured:
            if m.ratio is not None:
                by_op[m.call.op].append(m)
        timed = [m for ms in by_op.values() for m in ms]
        operators = [_operator(op, ms, n_steps) for op, ms in by_op.items()]
        return cls(
            # In a program, the time that is lost decides what to mend: a slow operator that is called once costs
            # nothing.
            operators=tuple(sorted(operators, key=lambda o: (-(o.lost_us if of_program else o.ratio), o.op))),
            failing=tuple(m for m in measured if m.on_target),
            left_out=tuple(m for m in measured if m.failed and not m.on_target),
            step=StepTime(
                sum(m.ref_us.median * m.call.n for m in timed if m.ref_us) / n_steps,
                sum(m.target_us.median * m.call.n for m in timed if m.target_us) / n_steps,
                len(timed) == len(measured),
            ),
            critical_ratio=critical_ratio,
            of_program=of_program,
        )

    @property
    def median_ratio(self) -> float:
        """Median of the operators' ratios; 1 if none was timed."""
        return statistics.median(o.ratio for o in self.operators) if self.operators else 1.0

    def slower(self, bound: float) -> tuple[OperatorSlowdown, ...]:
        """Operators slower by more than `bound`, the slowest first."""
        slow = [o for o in self.operators if o.ratio > bound]
        return tuple(sorted(slow, key=lambda o: -o.ratio))

    def surely_slower(self, bound: float) -> tuple[OperatorSlowdown, ...]:
        """Those of `slower` whose lower quartile exceeds the bound too: beyond the noise of the machine."""
        return tuple(o for o in self.slower(bound) if o.lower > bound)

    @property
    def faster(self) -> tuple[OperatorSlowdown, ...]:
        """Operators whose upper quartile is below 1: faster on the target, beyond the noise."""
        return tuple(o for o in self.operators if o.upper < 1)


def _operator(op: str, measured: list[TimedCall], n_steps: int) -> OperatorSlowdown:
    ref = target = lower = upper = 0.0
    for m in measured:
        assert m.ref_us is not None
        assert m.target_us is not None
        assert m.ratio is not None
        # Weighted by calls: a slow shape that a program rarely uses must not dominate.
        spent = m.ref_us.median * m.call.n
        ref += spent
        target += m.target_us.median * m.call.n
        lower += spent * m.ratio.lower
        upper += spent * m.ratio.upper
    worst = max(measured, key=lambda m: m.ratio.median if m.ratio else 0.0)
    ratio, least, most = (x / ref if ref > 0 else 1.0 for x in (target, lower, upper))
    # Medians of times and quartiles of ratios are computed separately: with noise they may cross.
    return OperatorSlowdown(
        op, len(measured), sum(m.call.n for m in measured), ratio, min(least, ratio), max(most, ratio),
        (target - ref) / n_steps, worst,
    )  # fmt: skip
