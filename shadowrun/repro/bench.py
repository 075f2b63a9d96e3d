"""Runs one call again on both platforms of a run, and judges it as the run did."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Self

import torch

from shadowrun.analysis import without_numbers
from shadowrun.config import Config
from shadowrun.intercept.plan import OpPlan, make_plan
from shadowrun.intercept.untrusted import operator_named
from shadowrun.platforms import parse, sim
from shadowrun.platforms.device import resolve
from shadowrun.platforms.untrusted import simulated_flaws
from shadowrun.replay.comparing import Comparing, bytes_for_oracle
from shadowrun.replay.execution import Executor, Ran
from shadowrun.replay.judge import Judge
from shadowrun.replay.mirror import copy_mutated
from shadowrun.replay.recorder import Recorder
from shadowrun.replay.target_failure import TargetFailure
from shadowrun.types import Cause, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from shadowrun.replay.capturing import Kept
    from shadowrun.replay.case import Case
    from shadowrun.replay.finding import Finding
    from shadowrun.types import RunInfo

__all__ = ["Bench", "Judged", "operator"]

_OPTIONS = ("rtol", "atol", "slow_ratio", "max_bytes")
"""Options that a data file keeps as they were, and that decide about a verdict."""


@dataclasses.dataclass(frozen=True)
class Judged:
    """What became of one replay.

    Attributes:
        verdict: As a run would have recorded it.
        diffs: How the results differed.
        findings: Those that mismatched, element by element.
        case: The call; None where no results were compared.
        missing_kernel: What the target lacked.
    """

    verdict: Verdict
    diffs: tuple[TensorDiff, ...] = ()
    findings: tuple[Finding, ...] = ()
    missing_kernel: str = ""
    case: Case | None = None

    @property
    def kind(self) -> tuple[Status, Cause | None, str, str]:
        """Two replays of one kind show one fault."""
        verdict = self.verdict
        if verdict.status is Status.FALLBACK:  # vendors warn once per process: then it is silent
            return verdict.status, None, "", ""
        return verdict.status, verdict.cause, without_numbers(verdict.explanation), self.missing_kernel


class _Listener(Recorder):
    """Stands where a run has its recorder, and writes nothing."""

    def __init__(self) -> None:  # it has no data file
        self.heard: Judged | None = None

    def take(self) -> Judged | None:
        """What was heard since it was last asked."""
        heard, self.heard = self.heard, None
        return heard

    def match(self, context: int, ref_us: float, target_us: float, drift: tuple[float, float] = (-1.0, -1.0)) -> int:
        """The call was right."""
        del context, ref_us, target_us, drift
        self.heard = Judged(Verdict(Status.MATCH))
        return 0

    def verdict(
        self,
        context: int,
        verdict: Verdict,
        diffs: tuple[TensorDiff, ...] = (),
        missing_kernel: str = "",
        times: tuple[float, float] = (-1.0, -1.0),
        drift: tuple[float, float] = (-1.0, -1.0),
        captured: Kept | None = None,
    ) -> int:
        """Anything else."""
        del context, times, drift, captured
        self.heard = Judged(verdict, diffs, (), missing_kernel)
        return 0

    def keep(
        self, plan: OpPlan, verdict: Verdict, inputs: Any, written: Sequence[torch.Tensor] = (), severity: float = 0.0
    ) -> Kept | None:
        """Nothing is kept here."""
        del plan, verdict, inputs, written, severity
        return None


class _Judge(Judge):
    """Remembers the elements that mismatched."""

    case: Case | None = None
    found: tuple[Finding, ...] = ()

    def __call__(self, case: Case) -> tuple[Verdict, tuple[TensorDiff, ...]]:
        self.case = case
        verdict, diffs, self.found = self.examine(case)
        return verdict, diffs


class Bench:
    """Both platforms of a run, on this machine; use it in a ``with`` block.

    Args:
        info: The run: its platforms, the flaws of a simulated one, and its options.
        memory: Look at what each call does to memory.

    Raises:
        PlatformError: A platform is not here.
    """

    def __init__(self, info: RunInfo, *, memory: bool = False) -> None:
        self._flaws = simulated_flaws(info.target_fingerprint)
        if self._flaws is not None and not sim.is_enabled():
            sim.enable(parse(info.target).device_type)
        target, ref = resolve(info.target), resolve(info.ref)
        # Tolerances were those of the run; of its settings only what is printable is known.
        options = {k: v for k, v in info.config.items() if k in _OPTIONS and type(v) in (int, float) and v == v}  # noqa: PLR0124
        config = Config.make(settings=False, known=False, **options)
        self._stack = contextlib.ExitStack()
        self._max_bytes = config.max_bytes
        self.target, self.ref = Executor(target), Executor(ref)
        self._shared = target.same_device(ref)
        self._listener = _Listener()
        self._comparing = Comparing(config, self.target, self.ref, self._listener)
        self.tolerance = config.tolerance_on(str(target))
        self._judge = _Judge(tolerance=self.tolerance, max_bytes=bytes_for_oracle(config.max_bytes))
        self._comparing.judge_with(self._judge)
        self._comparing.effects.always = memory
        self._failure = TargetFailure(config, self.target, self.ref, self._listener)

    def __enter__(self) -> Self:
        if self._flaws is not None:  # the device as it was in the run
            self._stack.enter_context(sim.flaws(*self._flaws))
        for executor in (self.target, self.ref):
            self._stack.callback(executor.platform.stop)
            executor.platform.start()
        self._stack.callback(self.target.witness.stop)
        self.target.witness.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def judge(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Judged | None:
        """Replay a call; None if the reference cannot run it.

        Args:
            plan: The operator.
            args: Inputs on the CPU; they stay as they are.
            kwargs: Inputs by name.
        """
        with torch.no_grad():
            try:
                expected = self._run(self.ref, plan, args, kwargs)
            except Exception:
                return None
            self._listener.take()
            self._judge.case, self._judge.found = None, ()
            actual: Ran | None
            if self._shared:
                actual = self._run(self.target, plan, args, kwargs)
            else:
                actual = self._failure.attempt(0, plan, (args, kwargs))
            if actual is not None:
                here = None if self._shared else self.target.device
                self._comparing.conclude(
                    plan, 0, (args, kwargs), actual, expected, None, shared=self._shared, here=here
                )
        heard = self._listener.take()
        return None if heard is None else dataclasses.replace(heard, findings=self._judge.found, case=self._judge.case)

    def _run(self, executor: Executor, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        if not self._shared:
            return executor.run_mirrored(plan, args, kwargs, self._max_bytes)
        if plan.mutated:
            args, kwargs = copy_mutated(plan, args, kwargs, self._max_bytes)
        return executor.run(plan, args, kwargs)


def operator(name: str, *, checked: bool = True) -> OpPlan:
    """The plan of an operator that a file names.

    Args:
        name: ``aten::add.Tensor``.
        checked: Whether it must be one that a file may name; not needed where this process itself recorded it.

    Raises:
        AttributeError: This torch has no such operator.
        Refused: It does more than compute tensors.
    """
    return make_plan(operator_named(name, checked=checked), 0)
