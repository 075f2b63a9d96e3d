"""What the loss would be if one operator were right: measured in chains of their own, a step for each operator.

In a trial step, up to the loss, the program's values at the start of the step are continued in chains (see `drift`): by
the target, by the reference, and by the target with each call of one operator on the reference. The deviation of the
first from the second, and of the third from the second, is taken at the last result before backward: the share by which
it falls is the operator's. Deviations of earlier steps are in none of the chains, since all begin with the same values.

The operators are those that were wrong in the steps before, the one with the greatest accumulated error first. Where a
chain has to take the program's values for its own, as after draws of the device, the trial is lost, and says why. The
program itself is not touched.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.plan import Action
from shadowrun.replay.drift import DriftChain, drift_error
from shadowrun.replay.executor import to_cpu
from shadowrun.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.intercept.plan import OpPlan
    from shadowrun.operators.case import Value
    from shadowrun.replay.call import Call, CallRun
    from shadowrun.replay.drift import RngState
    from shadowrun.replay.executor import Executor

__all__ = ["RepairTrials", "Repaired"]

_MAX_OPERATORS: Final = 12
_STEPS_EACH: Final = 3
# Elements of a result that is looked at as the loss: a larger one is none.
_MAX_LOSS: Final = 1 << 16
_MAX_LOST: Final = 200
_DROPOUT: Final = "aten::native_dropout"


@dataclass(slots=True)
class Repaired:
    """What was measured of an operator.

    Attributes:
        n_steps: Steps in which it was.
        n_calls: Its calls before the loss in these steps.
        error: Deviation of the target's loss from the reference's, summed over these steps.
        without: The same with this operator on the reference.
        lost: Operator at which a chain could not follow, so that a step was not measured.
    """

    n_steps: int = 0
    n_calls: int = 0
    error: float = 0.0
    without: float = 0.0
    lost: str = ""


class RepairTrials:
    """Chooses an operator for each step, and runs the trial.

    Args:
        target, ref: Run the chains.
        max_bytes: Bound of each chain.
        step: Gives the number of the current step.
    """

    def __init__(self, target: Executor, ref: Executor, max_bytes: int, step: Callable[[], int]) -> None:
        self._target, self._ref, self._max_bytes, self._step = target, ref, max_bytes, step
        self._suspects: dict[str, float] = {}
        self._found: dict[str, Repaired] = {}
        self._trial: _Trial | None = None
        self._at = -1

    def clear(self) -> None:
        """What the program did between two blocks was not seen: a trial in hand ends without a result."""
        self._trial, self._at = None, -1

    def suspect(self, op: str, error: float) -> None:
        """A call was wrong.

        Args:
            op: Its operator.
            error: Accumulated relative error of its result; -1 if not measured.
        """
        if self._trial is None:
            self._at = self._step()  # until here no call had to be followed, and a trial begins with a step
        if op in self._suspects or len(self._suspects) < _MAX_OPERATORS:
            self._suspects[op] = max(error, self._suspects.get(op, -1.0))

    @property
    def has_suspects(self) -> bool:
        """Whether there may be a trial in any step, for which each call is needed."""
        return bool(self._suspects)

    def take_inputs(self, call: Call) -> None:
        """As `Drift.take_inputs`."""
        if (step := self._step()) != self._at:
            self._end()
            self._at = step
            if (op := self._next()) is not None:
                self._trial = _Trial(op, self._target, self._ref, self._max_bytes)
        if self._trial is not None:
            self._try(self._trial.take_inputs, call)

    def after(self, plan: OpPlan, own: CallRun, rng: RngState | None) -> None:
        """As `Drift.after`."""
        if self._trial is not None:
            self._try(self._trial.after, plan, own, rng)

    def reseed(self, plan: OpPlan, own: CallRun, *, answered: bool = False) -> None:
        """As `Drift.reseed`.

        Args:
            plan: The operator.
            own: The program's own run.
            answered: The target lacks the operator, and the program got the reference's result.
        """
        if self._trial is not None:
            self._try(self._trial.reseed, plan, own, answered)

    def _try(self, follow: Callable[..., None], *args: Any) -> None:
        try:
            follow(*args)
        except Exception as error:  # the comparison goes on without this figure
            if self._trial is not None:
                self._trial.lose(f"{args[0]}: {type(error).__name__}"[:_MAX_LOST])

    def found(self) -> dict[str, dict[str, Any]]:
        """Operator to the fields of its `Repaired`."""
        self._end()
        return {op: asdict(repaired) for op, repaired in self._found.items()}

    def _next(self) -> str | None:
        tried = {op: self._found[op].n_steps if op in self._found else 0 for op in self._suspects}
        # A trial that is lost once is lost in the next step too.
        left = [op for op, n in tried.items() if n < _STEPS_EACH and not (op in self._found and self._found[op].lost)]
        return min(left, key=lambda op: (tried[op], -self._suspects[op]), default=None)

    def _end(self) -> None:
        trial, self._trial = self._trial, None
        if trial is None or (trial.loss is None and not trial.lost):
            return
        found = self._found.setdefault(trial.op, Repaired())
        if trial.lost or trial.loss is None:
            found.lost = trial.lost
            return
        found.n_steps += 1
        found.n_calls += trial.n_calls
        found.error += trial.loss[0]
        found.without += trial.loss[1]


class _Trial:
    """One operator in one step, up to the loss.

    Attributes:
        op: The operator.
        n_calls: Its calls so far.
        loss: Deviation of the last result, without and with the repair; None for none that is small enough.
        lost: Operator at which the chains took the program's values.
    """

    def __init__(self, op: str, target: Executor, ref: Executor, max_bytes: int) -> None:
        self.op = op
        self.n_calls = 0
        self.loss: tuple[float, float] | None = None
        self.lost = ""
        self._ref = ref
        self._of_target = _Chain(target, max_bytes)
        self._of_ref = _Chain(ref, max_bytes, ref.device)
        self._repaired = _Chain(target, max_bytes)
        self._chains = (self._of_target, self._of_ref, self._repaired)
        self._is_over = self._touches = self._counts = False

    def take_inputs(self, call: Call) -> None:
        if self._is_over or self.lost:
            return
        role, phase = call.role, call.origin[1]
        if phase == Phase.BACKWARD:  # the loss is known
            self._stop()
            return
        # As in `Drift.take_inputs`: what the program read back from the target continues in the reference's chain.
        read_back = role.on_ref and self._of_ref.has_input_of(call)
        on_target = role.on_target or read_back
        self._touches = self._repaired.has_input_of(call)
        # The gradient of the loss is a constant.
        self._counts = phase == Phase.FORWARD and call.plan.name != "aten::ones_like"
        is_repaired = call.plan.name == self.op
        self.n_calls += is_repaired
        self._repaired.other = self._ref if is_repaired or read_back else None
        follows = (not on_target, on_target or not role.on_ref, True)
        for chain, runs in zip(self._chains, follows, strict=True):
            if runs:
                chain.take_inputs(call)
            else:
                chain.leave_out()

    def after(self, plan: OpPlan, own: CallRun, rng: RngState | None) -> None:
        if self._is_over or self.lost:
            return
        found: list[Sequence[Value] | None] = []
        for chain in self._chains:
            if chain.follows:
                found.append(chain.after(plan, own, rng))
            else:
                chain.reseed(plan, own)
                found.append(own.values(plan))
        self._note(plan, own, found)

    def reseed(self, plan: OpPlan, own: CallRun, answered: bool) -> None:
        """The program's run is no plain one: it drew, was not compared, or the target lacks the operator."""
        if self._is_over or self.lost:
            return
        if not self._repaired.follows:  # the call was not compared, and its inputs were not laid out
            self._touches = any(self._repaired.has(a) for a in (*own.args, *own.kwargs.values()))
        found: list[Sequence[Value] | None] = []
        for chain in self._chains:
            if not chain.follows:
                chain.reseed(plan, own)
                found.append(own.values(plan))
            elif plan.name == _DROPOUT:
                found.append(chain.drop_as(plan, own))
            elif answered and plan.action is not Action.RANDOM:
                chain.other = self._ref
                found.append(chain.after(plan, own, None))
                chain.other = None
            else:
                chain.reseed(plan, own)
                found.append(None)
        self._note(plan, own, found)

    def _note(self, plan: OpPlan, own: CallRun, found: list[Sequence[Value] | None]) -> None:
        if any(values is None for values in found):
            # Fresh draws, such as those of a batch, are the same in all chains.
            if self._touches and any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in own.values(plan)):
                self.lose(plan.name)
            return
        actual, expected, repaired = (values or () for values in found)
        if not self._counts or not actual or _n_elements(actual[0]) > _MAX_LOSS:
            return
        self.loss = (
            drift_error(to_cpu(actual[0]), to_cpu(expected[0]))[0],
            drift_error(to_cpu(repaired[0]), to_cpu(expected[0]))[0],
        )

    def lose(self, why: str) -> None:
        """The result would be wrong."""
        self.lost = why
        self._stop()

    def _stop(self) -> None:
        self._is_over = True
        for chain in self._chains:
            chain.leave_out()
            chain.clear()


class _Chain(DriftChain):
    """A chain that may run a call on another platform.

    Attributes:
        other: Runs the next call; None for the chain's own platform.
    """

    other: Executor | None = None

    def _run(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], executor: Executor | None = None
    ) -> list[Value]:
        return super()._run(plan, args, kwargs, executor or self.other)

    def drop_as(self, plan: OpPlan, own: CallRun) -> list[Value] | None:
        """Follow a dropout: by the mask that the program drew."""
        args, kwargs = self.take_prepared_inputs()
        (out, mask), train = own.out, args[2] if len(args) > 2 else kwargs.get("train")
        if train is False or not isinstance(args[0], torch.Tensor):
            self.reseed(plan, own)
            return None
        kept = mask.to(args[0].device)
        dropped = args[0] * kept * (1.0 / (1.0 - args[1]) if args[1] < 1 else 0.0)
        self.adopt(out, dropped)
        self.adopt(mask, kept)
        return [dropped, kept]


def _n_elements(value: Value) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 1
