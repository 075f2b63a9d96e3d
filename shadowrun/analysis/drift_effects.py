"""How far an error reaches: the accumulated error at the loss and the gradients, and the calls at which it rises."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.types import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shadowrun.types import RunInfo

__all__ = ["DriftTrace", "Effects", "Repair", "StepEnd", "read_repairs"]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The accumulated error where a step ends.

    Attributes:
        step: Number of the step.
        loss_seq: Its last call before backward, or its last call if it has no backward; its result is the loss.
        loss_context: Number of that call's context; -1 if its error was not measured.
        loss_abs, loss_rel: Accumulated error of its result.
        grad_context: Context of the call of backward with the greatest error; -1 without one.
        grad_rel: That error.
    """

    step: int
    loss_seq: int
    loss_context: int
    loss_abs: float
    loss_rel: float
    grad_context: int
    grad_rel: float


@dataclass(frozen=True, slots=True)
class Effects:
    """What ``drift=True`` recorded of how errors spread.

    Attributes:
        rise: Context and outcome of calls to the rise of the accumulated relative error at them, in a step on average:
            above everything before in the same step and phase. An error that a call merely hands on is no rise.
        reach: Context and outcome to the greatest accumulated relative error of their results.
        ends: The ends of the first step, of that with the greatest error at the loss, and of the last one.
    """

    rise: Mapping[tuple[int, int], float]
    reach: Mapping[tuple[int, int], float]
    ends: tuple[StepEnd, ...]


@dataclass(frozen=True, slots=True)
class Repair:
    """What the loss would be with one operator right, measured in some steps of a run with ``drift=True``.

    Attributes:
        op: The operator, whose calls ran on the reference in the target's chain.
        n_steps, n_calls: The steps, and its calls before the loss in them.
        error: Deviation of the target's loss from the reference's, on average over these steps.
        without: The same with this operator right.
        lost: Where a step could not be measured: the operator at which a chain could not follow.
    """

    op: str
    n_steps: int
    n_calls: int
    error: float
    without: float
    lost: str

    @property
    def share(self) -> float | None:
        """Share of the error that is gone, negative if it grows; None if it was not measured, or there is no error."""
        if not self.n_steps or not self.n_calls or not 0 < self.error < math.inf or not math.isfinite(self.without):
            return None
        return 1 - self.without / self.error


def read_repairs(info: RunInfo) -> dict[str, Repair]:
    """Repairs by operator; entries of a file that are none are left out."""
    found = {}
    for op, entry in info.repairs.items():
        if not isinstance(entry, dict):
            continue
        numbers = [entry.get(name) for name in ("n_steps", "n_calls", "error", "without")]
        if any(isinstance(n, bool) or not isinstance(n, (int, float, str)) for n in numbers):
            continue
        try:
            n_steps, n_calls, error, without = map(float, numbers)  # type: ignore[arg-type]
            n = max(1, int(n_steps))
            found[op] = Repair(op, int(n_steps), int(n_calls), error / n, without / n, str(entry.get("lost", "")))
        except (ValueError, OverflowError):  # a text that is no number, or an infinite count
            continue
    return found


class DriftTrace:
    """Follows the accumulated error along the calls of a run, in their order."""

    def __init__(self) -> None:
        self._rise: dict[tuple[int, int], float] = defaultdict(float)
        self._reach: dict[tuple[int, int], float] = {}
        self._step: tuple[int, int] | None = None
        self._greatest: dict[Phase, float] = {}
        self._loss = (-1, -1, -1.0, -1.0)
        self._grad = (-1, -1.0)
        self._ends: dict[str, StepEnd] = {}
        self._n_steps = 0

    def add(
        self,
        step: tuple[int, int],
        phase: Phase,
        seq: int,
        key: tuple[int, int],
        drift: tuple[float, float],
        *,
        is_root: bool = False,
    ) -> None:
        """A call whose accumulated error was measured.

        Args:
            step: Number of its run in a combined file, and of its step.
            phase: Its phase.
            seq: Its number.
            key: Its context and outcome.
            drift: Absolute and relative error.
            is_root: The call may be the one that makes the gradient of the loss, a constant, which follows the loss.
        """
        # Calls come in the order of the file, in which all calls of a step of one run follow each other.
        if step != self._step:
            self._end()
            self._step, self._greatest = step, {}
            self._loss, self._grad = (-1, -1, -1.0, -1.0), (-1, -1.0)
        relative = drift[1]
        before = self._greatest.get(phase, 0.0)
        # Infinite and NaN errors reach everything, but have no rise that could be added up.
        if math.isfinite(relative):
            self._rise[key] += max(0.0, relative - before)
        if _size(relative) > _size(before):
            self._greatest[phase] = relative
        if _size(relative) > _size(self._reach.get(key, -1.0)):
            self._reach[key] = relative
        # The last forward call before the first gradient is the loss. `ones_like`, the gradient that `backward()`
        # starts with, is called before autograd runs a node, so that its phase is forward too.
        if phase == Phase.FORWARD and self._grad[0] < 0 and not is_root:
            self._loss = (seq, key[0], *drift)
        if phase == Phase.BACKWARD and _size(relative) > _size(self._grad[1]):
            self._grad = (key[0], relative)

    def effects(self) -> Effects:
        """The result, once all calls were added."""
        self._end()
        self._step = None
        n = max(1, self._n_steps)
        ends = {end.step: end for end in self._ends.values()}
        return Effects(
            {key: rise / n for key, rise in self._rise.items()},
            self._reach,
            tuple(ends[step] for step in sorted(ends)),
        )

    def _end(self) -> None:
        if self._step is None:
            return
        self._n_steps += 1
        end = StepEnd(self._step[1], *self._loss, *self._grad)
        # Three steps are kept, whatever their number: a run may have millions.
        self._ends.setdefault("first", end)
        self._ends["last"] = end
        worst = self._ends.get("worst")
        if worst is None or _size(end.loss_rel) > _size(worst.loss_rel):
            self._ends["worst"] = end


def _size(value: float) -> float:
    """For comparisons: NaN is as bad as infinity."""
    return math.inf if math.isnan(value) else value
