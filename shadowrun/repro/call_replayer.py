"""Runs one call again on both platforms of a run, and judges it as the run did."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Self

import torch

from shadowrun import sim
from shadowrun.analysis import without_numbers
from shadowrun.config import Config
from shadowrun.intercept.op_allowlist import operator_named
from shadowrun.intercept.plan import OpPlan, make_plan
from shadowrun.judge.judge import Judge
from shadowrun.platforms import parse
from shadowrun.platforms.device import resolve
from shadowrun.platforms.untrusted_specs import simulated_flaws
from shadowrun.replay.call import Call, Ran, Role
from shadowrun.replay.comparator import Comparator, bytes_for_oracle
from shadowrun.replay.copies import copy_mutated
from shadowrun.replay.executor import Executor
from shadowrun.replay.platform_runs import PlatformRuns
from shadowrun.types import Cause, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from types import TracebackType

    from shadowrun.judge.ladder import Trace
    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.operators.case import Case
    from shadowrun.replay.context import Kept
    from shadowrun.types import RunInfo

__all__ = ["CallReplayer", "ReplayOutcome", "operator"]

_OPTIONS = ("rtol", "atol", "slow_ratio", "max_bytes")
"""Options that a data file keeps as they were, and that decide about a verdict."""


@dataclasses.dataclass(frozen=True)
class ReplayOutcome:
    """The outcome of one replay.

    Attributes:
        verdict: As a run would have recorded it.
        diffs: How the results differed.
        findings: Those that mismatched, element by element.
        case: The call; None where no results were compared.
        missing_kernel: What the target lacked.
    """

    verdict: Verdict
    diffs: tuple[TensorDiff, ...] = ()
    findings: tuple[ResultDiff, ...] = ()
    missing_kernel: str = ""
    case: Case | None = None

    @property
    def kind(self) -> tuple[Status, Cause | None, str, str]:
        """Two replays of one kind show one fault."""
        verdict = self.verdict
        if verdict.status is Status.FALLBACK:  # vendors warn once per process: then it is silent
            return verdict.status, None, "", ""
        return verdict.status, verdict.cause, without_numbers(verdict.explanation), self.missing_kernel


class _CollectingSink:
    """A `RecordSink` that keeps the last record, for one call without a data file."""

    def __init__(self) -> None:
        self._outcome: ReplayOutcome | None = None

    def take(self) -> ReplayOutcome | None:
        """What was recorded since this was last asked."""
        outcome, self._outcome = self._outcome, None
        return outcome

    def context(self, call: Call) -> int:
        """There is one context."""
        call.context = 0
        return 0

    def match(self, *_: object) -> int:
        """The call was right."""
        self._outcome = ReplayOutcome(Verdict(Status.MATCH))
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
        at: tuple[int, int] | None = None,
    ) -> int:
        """Any other verdict."""
        del context, times, drift, captured, at
        self._outcome = ReplayOutcome(verdict, diffs, (), missing_kernel)
        return 0

    def reserve(self) -> tuple[int, int]:
        """Numbers mean nothing here."""
        return 0, 0

    def keep(self, *_: object) -> Kept | None:
        """Keep no inputs: the caller has them."""
        return None

    def room(self, *_: object) -> int | None:
        """Want no inputs."""
        return None

    def skip(self, *_: object) -> None:
        """Count nothing."""

    def flush(self) -> None:
        """Write nothing."""


class _ExaminingJudge:
    """Judges as a `Judge` does, and remembers the case and the elements that mismatched."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self.case: Case | None = None
        self.found: tuple[ResultDiff, ...] = ()

    def __call__(self, case: Case) -> tuple[Verdict, tuple[TensorDiff, ...]]:
        self.case = case
        verdict, diffs, self.found = self._judge.examine(case)
        return verdict, diffs

    def forget(self) -> None:
        """Before the next call."""
        self.case, self.found = None, ()


class CallReplayer:
    """Both platforms of a run, on this machine; use it in a ``with`` block.

    Args:
        info: The run: its platforms, the flaws of a simulated one, and its options.
        memory: Look at what each call does to memory.
        trace: Where the judge writes its steps down.

    Raises:
        PlatformError: A platform is not here.
    """

    def __init__(self, info: RunInfo, *, memory: bool = False, trace: Trace | None = None) -> None:
        self._flaws = simulated_flaws(info.target_fingerprint)
        if self._flaws is not None and not sim.is_enabled():
            # The finding may be one of a simulated device, which the process has to have under the name of the run.
            sim.enable(parse(info.target).device_type)
        target, ref = resolve(info.target), resolve(info.ref)
        # Tolerances were those of the run; of its settings only what is printable is known.
        options = {k: v for k, v in info.config.items() if k in _OPTIONS and type(v) in (int, float) and v == v}  # noqa: PLR0124
        config = Config.make(settings=False, known=False, **options)
        self._stack = contextlib.ExitStack()
        self._max_bytes = config.max_bytes
        self.target, self.ref = Executor(target), Executor(ref)
        self._shared = target.same_device(ref)
        self._role = Role(target.device, on_target=not self._shared, on_ref=False, shared=self._shared)
        self._sink = _CollectingSink()
        self.tolerance = config.tolerance_on(str(target))
        # The tolerances of the run: another bound would make another verdict.
        judge = Judge(tolerance=self.tolerance, max_bytes=bytes_for_oracle(config.max_bytes))
        judge.trace = trace
        self._judge = _ExaminingJudge(judge)
        self._comparator = Comparator(config, self.target, self.ref, self._sink, self._judge)
        # Memory effects are examined for some calls only; the one to be shown must be among them.
        self._comparator.effects.always = memory
        self._runs = PlatformRuns(config, self.target, self.ref, self._sink)

    def __enter__(self) -> Self:
        if self._flaws is not None:  # the device as it was in the run
            self._stack.enter_context(sim.flaws(*self._flaws))
        for executor in (self.target, self.ref):
            self._stack.callback(executor.platform.stop)
            executor.platform.start()
        self._stack.callback(self.target.fallback_detector.stop)
        self.target.fallback_detector.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def judge(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplayOutcome | None:
        """Replay a call; None if the reference cannot run it.

        Args:
            plan: The operator.
            args: Inputs on the CPU; they stay as they are.
            kwargs: Inputs by name.
        """
        with torch.no_grad():
            try:
                # The reference first: a call that it cannot run shows nothing about the target.
                expected = self._run(self.ref, plan, args, kwargs)
            except Exception:
                return None
            self._sink.take()
            self._judge.forget()
            call = Call(plan, args, kwargs, self._role, context=0)
            actual: Ran | None
            if self._shared:
                actual = self._run(self.target, plan, args, kwargs)
            else:
                actual = self._runs.run_target(call, (args, kwargs))
            if actual is not None:
                here = None if self._shared else self.target.device
                self._comparator.compare_and_record(
                    call, (args, kwargs), actual, expected, shared=self._shared, here=here
                )
        judged = self._sink.take()
        return (
            None if judged is None else dataclasses.replace(judged, findings=self._judge.found, case=self._judge.case)
        )

    def _run(self, executor: Executor, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
        if not self._shared:
            return executor.run_mirrored(plan, args, kwargs, self._max_bytes)
        # Replays repeat the same call, so its arguments must stay as they were captured.
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
