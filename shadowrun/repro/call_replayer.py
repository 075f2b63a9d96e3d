"""Runs one call again on both platforms of a run, and judges it as the run did.

`CallReplayer` does it, `load_captured` and `captured_plan` read the call from a data file, and `explain` lists the
steps of the judge.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Self

import torch

from shadowrun import sim
from shadowrun.analysis import without_numbers
from shadowrun.config import Config
from shadowrun.current_folder import in_empty_folder
from shadowrun.errors import DataFileError, ShadowrunError, UsageError
from shadowrun.intercept.plan import Action, OpPlan, make_plan
from shadowrun.intercept.torchapi import as_in_handler
from shadowrun.intercept.untrusted.checked_calls import check_call, graphs_of_file
from shadowrun.intercept.untrusted.op_allowlist import Refused, operator_named
from shadowrun.judge.decision_trace import Trace, recorded_steps
from shadowrun.judge.judge import Judge
from shadowrun.limits import bounded_memory, current_call
from shadowrun.operators.vendor_ops import COUNTERPARTS, for_reference
from shadowrun.platforms import parse
from shadowrun.platforms.device import resolve
from shadowrun.platforms.untrusted_specs import simulated_flaws
from shadowrun.replay.call import Call, CallRun, Role
from shadowrun.replay.comparator import Comparator, bytes_for_oracle
from shadowrun.replay.copies import copy_mutated
from shadowrun.replay.executor import Executor
from shadowrun.replay.paths.platform_runs import PlatformRuns
from shadowrun.repro.platform_setup import allowed_platforms, check_harmless
from shadowrun.store import captured_inputs
from shadowrun.types import Cause, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from types import TracebackType

    from shadowrun.judge.decision_trace import Step
    from shadowrun.judge.result_diff import ResultDiff
    from shadowrun.operators.case import Case
    from shadowrun.replay.context import InputsFile
    from shadowrun.store.datafile import DataFile
    from shadowrun.types import OpRecord, Permissions, RunInfo

__all__ = ["CallReplayer", "Explanation", "ReplayOutcome", "captured_plan", "explain", "load_captured", "operator"]

# Options that a data file keeps as they were, and that decide about a verdict.
_OPTIONS = ("rtol", "atol", "slow_ratio", "max_bytes")


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
        context: int,  # noqa: ARG002 - there is one
        verdict: Verdict,
        diffs: tuple[TensorDiff, ...] = (),
        missing_kernel: str = "",
        *_: Any,
        **__: Any,
    ) -> int:
        """Any other verdict."""
        self._outcome = ReplayOutcome(verdict, diffs, (), missing_kernel)
        return 0

    def reserve(self) -> tuple[int, int]:
        """Numbers mean nothing here."""
        return 0, 0

    def keep_inputs(self, *_: object) -> InputsFile | None:
        """Keep no inputs: the caller has them."""
        return None

    def bytes_for_inputs(self, *_: object) -> int | None:
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
        self.mismatched: tuple[ResultDiff, ...] = ()

    def __call__(self, case: Case) -> tuple[Verdict, tuple[TensorDiff, ...]]:
        self.case = case
        verdict, diffs, self.mismatched = self._judge.examine(case)
        return verdict, diffs

    def forget(self) -> None:
        """Before the next call."""
        self.case, self.mismatched = None, ()


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
        target, ref = resolve(info.target, for_comparison=True), resolve(info.ref, for_comparison=True)
        # Tolerances were those of the run; of its settings only what is printable is known.
        options = {k: v for k, v in info.config.items() if k in _OPTIONS and type(v) in (int, float) and v == v}  # noqa: PLR0124
        config = Config.from_options(settings=False, known=False, **options)
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
        self._stack.enter_context(in_empty_folder())
        if self._flaws is not None:  # the device as it was in the run
            self._stack.enter_context(sim.flaws(*self._flaws))
        for executor in (self.target, self.ref):
            # Before `start`: a platform that fails half-way is stopped too.
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
        # The run compared operators below autograd.
        with torch.no_grad():
            try:
                # The reference first: a call that it cannot run shows nothing about the target.
                expected = self._run(self.ref, plan, args, kwargs)
            except Exception:
                return None
            call = self._begin(plan, args, kwargs)
            actual: CallRun | None
            if self._shared:
                actual = self._run(self.target, plan, args, kwargs)
            else:
                actual = self._runs.run_target(call, (args, kwargs))
            if actual is not None:
                self._compare(call, actual, expected)
        return self._judged()

    def run(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallRun | None, ReplayOutcome | None]:
        """Run a call on the target, and judge it where the reference can run it and is another platform.

        Args:
            plan: The operator.
            args: Inputs on the CPU; they stay as they are.
            kwargs: Inputs by name.

        Returns:
            The target's run, None where it raised; and the verdict, None where there is none.
        """
        with torch.no_grad():
            call = self._begin(plan, args, kwargs)
            actual = self._runs.run_target(call, (args, kwargs))
            if actual is not None and str(self.target.platform) != str(self.ref.platform):
                try:
                    expected = self.ref.run_mirrored(for_reference(plan), args, kwargs, self._max_bytes)
                except Exception:  # what the reference cannot run, it cannot judge
                    return actual, None
                self._compare(call, actual, expected)
        return actual, self._judged()

    def _begin(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        self._sink.take()
        self._judge.forget()
        return Call(plan, args, kwargs, self._role, context=0)

    def _compare(self, call: Call, actual: CallRun, expected: CallRun) -> None:
        here = None if self._shared else self.target.device
        inputs = call.args, call.kwargs
        self._comparator.compare_and_record(call, inputs, actual, expected, shared=self._shared, here=here)

    def _judged(self) -> ReplayOutcome | None:
        judged = self._sink.take()
        if judged is None:
            return None
        return dataclasses.replace(judged, findings=self._judge.mismatched, case=self._judge.case)

    def _run(self, executor: Executor, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRun:
        if not self._shared:
            return executor.run_mirrored(plan, args, kwargs, self._max_bytes)
        # Replays repeat the same call, so its arguments must stay as they were captured.
        if plan.mutated:
            args, kwargs = copy_mutated(plan, args, kwargs, self._max_bytes)
        return executor.run(plan, args, kwargs)


def operator(name: str, *, checked: bool = True, index: int = 0) -> OpPlan:
    """The plan of an operator that a file names.

    Args:
        name: ``aten::add.Tensor``.
        index: Number of the plan: each operator that one `CallReplayer` runs needs its own.
        checked: Whether it must be one that a file may name; not needed where this process itself recorded it.

    Raises:
        AttributeError: This torch has no such operator.
        Refused: It does more than compute tensors.
    """
    return make_plan(operator_named(name, checked=checked), index)


def load_captured(data: DataFile, record: OpRecord) -> captured_inputs.StoredCall:
    """What was kept of a call.

    Raises:
        DataFileError: It cannot be read, or is that of another operator.
    """
    name = captured_inputs.captured_calls(data)[record.call.seq][2]
    call = captured_inputs.load(data.tensors, name)
    # The folder may be of another run: its files have the same names in each.
    if call.op != record.call.op:
        raise DataFileError(
            f"The captured inputs {name!r} are those of {ascii(call.op)[1:-1]}.", slug="captured-inputs"
        )
    return call


def captured_plan(call: captured_inputs.StoredCall, *, checked: bool) -> OpPlan:
    """The operator, with arguments that fit its schema."""
    try:
        plan = operator(call.op, checked=checked)
    except Refused as why:
        raise UsageError(f"No script is written: {why}.", slug="operator-refused") from None
    except (AttributeError, RuntimeError):
        raise UsageError(
            f"This torch has no operator {call.op}: import the library that brings it, or use the version of the run.",
            slug="no-repro",
        ) from None
    current_call.begin(-1, plan.name)
    try:
        with in_empty_folder():  # a look at what is inside makes calls, too
            check_call(plan.func, call.args, call.kwargs, checked=checked, stand_in=COUNTERPARTS.get(plan.name))
    except Refused as why:
        raise DataFileError(f"The captured inputs do not fit {call.op}: {why}.", slug="captured-inputs") from None
    if plan.action in (Action.PASS, Action.EMPTY):
        raise DataFileError(f"The captured inputs do not fit {call.op}.", slug="captured-inputs")
    return plan


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """How a call came to its verdict.

    Attributes:
        record: The call as it was recorded.
        recorded: What the record says of the steps.
        verdict: The verdict of the call run again; None where it was not.
        steps: Its steps.
        note: Why it was not run again, or what the second verdict means.
    """

    record: OpRecord
    recorded: tuple[Step, ...]
    verdict: Verdict | None = None
    steps: tuple[Step, ...] = ()
    note: str = ""


def explain(data: DataFile, record: OpRecord, *, kept: bool, allowed: Permissions) -> Explanation:
    """Explain the verdict of a call.

    Args:
        data: The run's data file.
        record: The call.
        kept: Whether its inputs were kept: then it is run and judged again.
        allowed: What the data file may have started.
    """
    recorded = tuple(recorded_steps(record.verdict, record.diffs))
    if not kept:
        return Explanation(record, recorded, note="its inputs were not kept: it cannot be judged again")
    trace = Trace()
    try:
        verdict = _judged_again(data, record, allowed, trace)
    except ShadowrunError as error:
        return Explanation(record, recorded, note=f"not judged again: {error}")
    if verdict is None:
        return Explanation(record, recorded, note="not judged again: the reference cannot run it here")
    same = (verdict.status, verdict.cause) == (record.verdict.status, record.verdict.cause)
    note = "" if same else "another verdict than in the run: it depends on earlier calls, on this machine, or on chance"
    return Explanation(record, recorded, verdict, tuple(trace), note)


def _judged_again(data: DataFile, record: OpRecord, allowed: Permissions, trace: Trace) -> Verdict | None:
    info = allowed_platforms(data.info, allowed)
    check_harmless(info, allowed)
    call = load_captured(data, record)
    plan = captured_plan(call, checked=not allowed.modules)
    # A call from an untrusted file must not take all memory.
    bound = contextlib.nullcontext() if allowed.modules else bounded_memory()
    looks = contextlib.nullcontext() if allowed.modules else graphs_of_file()
    # A comparison may be running: this is none of its calls.
    with bound, as_in_handler(), looks, CallReplayer(info, trace=trace) as replayer:
        judged = replayer.judge(plan, call.args, call.kwargs)
    return None if judged is None else judged.verdict
