"""From two runs of a call to one recorded verdict."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.judge.cause.known_roundings import KnownRoundings
from shadowrun.judge.judge import Judge
from shadowrun.judge.random_values import implausible
from shadowrun.judge.remembered_bounds import RememberedBounds
from shadowrun.native import core
from shadowrun.numerics.bits import Uncomparable, bits_equal, plainly_equal
from shadowrun.numerics.form import form_difference
from shadowrun.operators.case import Case, Value
from shadowrun.operators.cpu_only_ops import EQUIVALENTS
from shadowrun.operators.vendor_ops import COUNTERPARTS, compared, for_reference
from shadowrun.replay.context import NO_CONTEXT, NO_DRIFT, SLOW
from shadowrun.replay.copies import at_offsets, copy_mutated, offsets
from shadowrun.replay.executor import inputs_to_cpu, result_on_other_device
from shadowrun.replay.input_copies import n_bytes
from shadowrun.replay.memory_effects import OVERWRITTEN, MemoryEffects
from shadowrun.replay.slow_calls import SlowCalls
from shadowrun.store.schema import severity
from shadowrun.store.write_buffer import tensor_key, verdict_key
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.config import Config
    from shadowrun.judge.judgement import Examined
    from shadowrun.judge.remembered_bounds import ContextBounds
    from shadowrun.platforms.fallback import Evidence
    from shadowrun.replay.call import Call, CallRun
    from shadowrun.replay.context import RecordSink
    from shadowrun.replay.copies import Arguments
    from shadowrun.replay.drift import RngState
    from shadowrun.replay.executor import CallRunner
    from shadowrun.replay.memory_effects import Looked
    from shadowrun.replay.postponed_calls import PostponedCalls
    from shadowrun.replay.timeline import Timeline
    from shadowrun.types import TensorDiff

    Judging = Callable[[Case], tuple[Verdict, tuple[TensorDiff, ...]]]
    """What a `Judge` is called as."""

__all__ = ["Comparator", "bytes_for_oracle"]

_MAX_REMEMBERED = 16
# Reruns and earlier results are extra copies that no caller has budgeted: the bound keeps memory stated.
_MAX_REMEMBERED_BYTES = 8 << 20


@dataclass(slots=True)
class _Unequal:
    """A call whose results differ, with what its record needs in addition to the verdict.

    Attributes:
        plan: Of what ran on the reference, which may stand for the call's own.
        looked: What the call does to memory and may not.
        at: Number and step that were reserved for a postponed verdict.
    """

    call: Call
    plan: OpPlan
    times: tuple[float, float]
    drift: tuple[float, float]
    looked: Looked | None
    fallback: Evidence | None
    shared: bool
    at: tuple[int, int] | None = None


class Comparator:
    """Compares the target's run with the reference's, and records the verdict.

    Args:
        config: Tolerances and bounds.
        target: Runs calls on the target.
        ref: Runs calls on the reference.
        recorder: Where verdicts go.
        judge: Judges results that differ; unless given, a `Judge` with the tolerances of `config`, and what it says of
            a context is remembered.
        postponed: Takes calls whose judgement the overhead budget defers.

    Attributes:
        suspects: Numbers of the plans whose operators were wrong before.
        effects: Decides which calls are looked at for what they do to memory.
        watched: Numbers of the plans that no shortcut may pass by: suspects, and those due for such a look.
        slow_calls: Decides which operators may be called slow.
        bounds: Within what the results of a context pass without the ladder of the judge.
        timeline: Notes when runs began; None: not asked.
        mismatched: Called with the operator and the accumulated relative error of each mismatch; None for nothing.
    """

    def __init__(
        self,
        config: Config,
        target: CallRunner,
        ref: CallRunner,
        recorder: RecordSink,
        judge: Judging | None = None,
        postponed: PostponedCalls | None = None,
    ) -> None:
        self._postponed = postponed
        self._target = target
        self._ref = ref
        self._recorder = recorder
        self._max_bytes = config.max_bytes
        tolerance = config.tolerance_on(str(target.platform))
        self._own_judge = Judge(tolerance=tolerance, max_bytes=bytes_for_oracle(config.max_bytes))
        self._given_judge = judge
        self.bounds = RememberedBounds(tolerance, None if core is None else core.CloseBounds)
        # A user's tolerance may pass what a cause explains.
        self._roundings = KnownRoundings() if tolerance is None else None
        # Lazy and XLA tensors have no strides: a difference there says nothing.
        self._ignore_strides = target.platform.functionalizes or ref.platform.functionalizes
        # The last right results of operators that were wrong before: a stale buffer repeats them.
        self.suspects: set[int] = set()
        self.effects = MemoryEffects(target, ref, config.max_bytes, spares_first=postponed is not None)
        self.watched: set[int] = set()
        self._previous: dict[int, tuple[Value, ...]] = {}
        self.slow_calls = SlowCalls(config.slow_ratio)
        self.mismatched: Callable[[str, float], None] | None = None
        self._holds = bool(config.stop_on)
        self._held: tuple[tuple[str, ...], list[Value], list[Value]] | None = None
        self.timeline: Timeline | None = None

    @property
    def sampled(self) -> bool:
        """Whether a call was judged by slices."""
        return self._own_judge.sampled

    def take_held(self) -> tuple[tuple[str, ...], list[Value], list[Value]] | None:
        """Names and results of the last call that differed, target and reference; once, and only with ``stop_on``."""
        held, self._held = self._held, None
        return held

    def forget_verdicts(self) -> None:
        """Have each call judged as if it were the first of its context."""
        self.bounds.by_context.clear()
        if self._roundings is not None:
            self._roundings = KnownRoundings()

    def every_second(self) -> None:
        """Have the next call of another operator looked at, about once a second."""
        index = self.effects.next_due()
        if index is not None:
            # The C handler and the fast path look here before they take a shortcut.
            self.watched.add(index)

    def memory_effect(self, call: Call, plan: OpPlan, pristine: Arguments) -> Looked | None:
        """A forbidden effect of a call on memory, on the target; None where there is none or none was looked for.

        Args:
            call: The call, with its context.
            plan: Of what runs on the target.
            pristine: Inputs as before the call, on the CPU or on the target's device.
        """
        wanted = self.effects.is_due(plan, call.context, *pristine)
        # With `always`, the plan has to stay watched, or the next call would take the fast path.
        if self.effects.always:
            self.watched.add(plan.index)
        elif plan.index in self.watched and plan.index not in self.suspects:
            self.watched.discard(plan.index)
        return self.effects.check(plan, pristine) if wanted else None

    def compare_and_record(
        self,
        call: Call,
        pristine: Arguments,
        actual: CallRun,
        expected: CallRun,
        drifted: tuple[float, float] | None = None,
        *,
        shared: bool,
        rng: RngState | None = None,
        here: torch.device | None = None,
    ) -> None:
        """Compare two runs of a call, and record the verdict.

        Args:
            call: The call, with its context.
            pristine: Inputs as before the call; on the CPU, unless the runs shared a device.
            actual: The target's run.
            expected: The reference's run.
            drifted: Accumulated error, where drift chains are kept.
            shared: Both ran on one device.
            rng: Generator and state that a random call began with.
            here: Device that the target's results should lie on, where the program's own run is the target's.
        """
        plan, context = call.plan, call.context
        if self.timeline is not None:
            self.timeline.ran(actual, expected)
        actual_ns, expected_ns = actual.ns, expected.ns
        reruns: list[CallRun] = []
        # Another call stood for this one: its layout is the device's own affair, its time includes another graph.
        # On a shared device both sides run the vendor's own kernel, so no stand-in is needed.
        counterpart = not shared and plan.name in COUNTERPARTS
        stand_in = counterpart or (not shared and plan.name in EQUIVALENTS)
        # A rerun of a random call would draw other numbers; that of a stand-in would time another kernel.
        if plan.action is not Action.RANDOM and not stand_in:

            def rerun(executor: CallRunner, plan: OpPlan) -> CallRun:
                args, kwargs = pristine
                if not shared:
                    return executor.run_mirrored(plan, args, kwargs, self._max_bytes)
                if plan.mutated:
                    # The pristine inputs are needed by the judge afterwards: a rerun must not write to them.
                    args, kwargs = copy_mutated(plan, args, kwargs, self._max_bytes)
                return executor.run(plan, args, kwargs)

            def again() -> CallRun:
                ran = rerun(self._target, plan)
                # Large reruns are kept one at a time.
                if n_bytes(ran.values(plan)) > _MAX_REMEMBERED_BYTES:
                    reruns.clear()
                reruns.append(ran)
                return ran

            def reference_again() -> CallRun:
                return rerun(self._ref, plan if shared else for_reference(plan))

            actual_ns, expected_ns = self.slow_calls.confirmed(plan, actual.ns, expected.ns, again, reference_again)
        # The time of a stand-in is not that of the program's kernel and would give a wrong slowdown.
        times = (expected_ns / 1000, -1.0 if stand_in else actual_ns / 1000)
        drift = drifted or NO_DRIFT
        if counterpart:
            plan = compared(plan, expected.out)
        a, e = self._target.values(plan, actual), self._ref.values(plan, expected)
        # What stands for the call, or what a graph leaves undefined, gives the first results only.
        n = min(len(a), len(e)) if stand_in or self._ignore_strides else max(len(a), len(e))
        a, e = a[:n], e[:n]
        if stand_in:
            a, e = [_contiguous(v) for v in a], [_contiguous(v) for v in e]
        # A number has to reach the host: its way through the CPU is no fallback.
        if plan.returns_number:
            actual.fallback = None
        elif here is not None and actual.fallback is None:
            actual.fallback = result_on_other_device(plan, actual.out, here)
        try:
            equal = self.all_equal(a, e)
            if equal and actual.fallback is None:  # a device may be wrong in every third call, and slow in any
                others = (self._target.values(plan, ran)[:n] for ran in reruns)
                wrong = next((values for values in others if not self.all_equal(values, e)), None)
                a, equal = (a, True) if wrong is None else (wrong, False)
        except Uncomparable as error:
            verdict = Verdict(Status.UNVERIFIED, None, str(error))
            self._recorder.verdict(context, verdict, times=times, drift=drift)
            return
        # The look runs the program's own operator, which the schema describes; a stand-in is another operator.
        looked = None if stand_in else self.memory_effect(call, plan, pristine)
        previous = self._previous.get(plan.index)
        if equal and looked is not None:
            # Equal values do not acquit: a kernel that overwrites an input returns the right result.
            captured = self._recorder.keep_inputs(plan, looked[0], pristine)
            self._recorder.verdict(context, *looked, times=times, drift=drift, captured=captured)
            return
        if equal:
            # A stale buffer returns the result of an earlier call: the judge needs that one to name the cause.
            self.remember_if_suspect(plan, a)
            is_slow = self.slow_calls.is_confirmed(plan, actual_ns, expected_ns)
            slow = self._recorder.keep_inputs(plan, SLOW, pristine) if is_slow else None
            if actual.fallback is not None:
                cause, evidence = actual.fallback
                verdict = Verdict(Status.FALLBACK, cause, "computed on the CPU", evidence)
                captured = self._recorder.keep_inputs(plan, verdict, pristine) or slow
                self._recorder.verdict(context, verdict, times=times, drift=drift, captured=captured)
            elif slow is not None:
                self._recorder.verdict(context, Verdict(Status.MATCH), times=times, drift=drift, captured=slow)
            else:
                self._recorder.match(context, *times, drift)
            return
        if (
            looked is None
            and actual.fallback is None
            and rng is None
            and self.record_if_close(context, a, e, times, drift)
        ):
            return
        bounds = self.bounds.by_context.get(context)
        # Some kernels ignore the storage offset; the copies begin at 0 and would hide that.
        laid = () if stand_in else offsets(actual.args, actual.kwargs)
        names = expected.names(plan)[: len(a)]
        case = self._case(plan, pristine, (a, e, names), rng, previous, laid, shared=shared)
        if self._holds:
            self._held = names, a, e
        unequal = _Unequal(call, plan, times, drift, looked, actual.fallback, shared=shared)
        postponed = self._postponed
        if self._given_judge is not None:
            self._record_unequal(unequal, pristine, *self._given_judge(case))
            return
        if self._roundings is not None and looked is None and actual.fallback is None and rng is None:
            known = self._roundings.judge(context, case)
            if known is not None:
                self._record_unequal(unequal, pristine, *known)
                return
        # Generator states and drift chains belong to this moment: such a call cannot be judged later.
        if postponed is not None and rng is None and drifted is None and postponed.can_postpone(case):
            # The number is reserved now, so that records keep the order of the calls.
            unequal.call, unequal.at = call.without_arguments(), self._recorder.reserve()

            def conclude(held: Case, examined: Examined) -> None:
                self._learn(context, held, *examined[:2])
                self._record_unequal(unequal, (held.args, held.kwargs), *examined[:2])

            postponed.add(case, functools.partial(self._own_judge.parts, bounds=bounds), conclude)
            return
        judged = self._own_judge(case, bounds)
        self._learn(context, case, *judged)
        self._record_unequal(unequal, pristine, *judged)

    def record_if_close(
        self,
        context: int,
        actual: list[Value],
        expected: list[Value],
        times: tuple[float, float],
        drift: tuple[float, float] = NO_DRIFT,
    ) -> bool:
        """Record a call whose results differ, if they are within what was found for its context; whether they are."""
        bounds = self.bounds.by_context.get(context)
        close = None if bounds is None else bounds.judge(actual, expected)
        if bounds is None or close is None:
            return False
        self.teach_native(bounds, actual, *close)
        self._recorder.verdict(context, *close, times=times, drift=drift)
        return True

    def teach_native(
        self, bounds: ContextBounds, actual: Sequence[Value], verdict: Verdict, diffs: tuple[TensorDiff, ...]
    ) -> None:
        """Have C record the next call that passes these bounds as this one does."""
        native = bounds.native
        if native is None:
            return
        positions = {bound.name: k for k, bound in enumerate(bounds.results)}
        for d in diffs:
            native.learn_form(positions[d.name], actual[positions[d.name]], d.actual.stride, tensor_key(d))
        native.learn_verdict(positions[diffs[0].name], diffs[0].max_ulp, verdict_key(verdict))

    def _learn(self, context: int, case: Case, verdict: Verdict, diffs: tuple[TensorDiff, ...]) -> None:
        if context == NO_CONTEXT:
            return
        self.bounds.learn(context, case, verdict, diffs)
        if self._roundings is not None:
            self._roundings.learn(context, case, verdict, diffs)

    def _record_unequal(
        self, unequal: _Unequal, inputs: Arguments, verdict: Verdict, diffs: tuple[TensorDiff, ...]
    ) -> None:
        """Record a call whose results differ, once it is judged."""
        plan, looked = unequal.plan, unequal.looked
        if verdict.status is Status.MISMATCH:
            if self.mismatched is not None and not plan.unstable:
                self.mismatched(unequal.call.plan.name, unequal.drift[1])
            # Each suspect keeps results of up to 8 MiB: the number of suspects bounds that memory.
            if len(self.suspects) < _MAX_REMEMBERED:
                self.suspects.add(plan.index)
                self.watched.add(plan.index)
            # Two correct runs of such an operator differ, so a difference proves nothing.
            if plan.unstable:
                verdict = Verdict(Status.UNVERIFIED, Cause.NON_DETERMINISM, plan.unstable, verdict.evidence)
        elif unequal.fallback is not None:
            cause, evidence = unequal.fallback
            verdict = Verdict(Status.FALLBACK, cause, "computed on the CPU", evidence)
        # On a shared device the reference got the overwritten input too: the values say nothing any more.
        spoiled = unequal.shared and looked is not None and looked[0].explanation == OVERWRITTEN
        if looked is not None and verdict.status is Status.MISMATCH and not spoiled:
            verdict = replace(verdict, evidence=f"{verdict.evidence}; in addition, {looked[0].evidence}")
        elif looked is not None:
            verdict, diffs = looked
        captured = self._recorder.keep_inputs(plan, verdict, inputs, (), max(map(severity, diffs), default=0.0))
        times, drift, at = unequal.times, unequal.drift, unequal.at
        self._recorder.verdict(unequal.call.context, verdict, diffs, "", times, drift, captured, at)

    def compare_and_record_random(self, call: Call, pristine: Arguments, drawn: CallRun) -> None:
        """Record a random call whose values were copied to the reference: only their distribution can be checked."""
        plan = call.plan
        if self.timeline is not None:
            self.timeline.ran(drawn, None)
        values = self._target.values(plan, drawn)
        why = implausible(plan.func, *pristine, values)
        if why:
            verdict = Verdict(Status.MISMATCH, Cause.RANDOMNESS, "implausible draws", why)
        else:
            verdict = Verdict(Status.UNVERIFIED, Cause.RANDOMNESS, "random: drawn values handed over to the reference")
        if drawn.fallback is not None and not why:
            verdict = Verdict(Status.FALLBACK, drawn.fallback[0], "computed on the CPU", drawn.fallback[1])
        self._recorder.verdict(call.context, verdict, times=(-1.0, drawn.ns / 1000))

    def all_equal(self, actual: list[Value], expected: list[Value]) -> bool:
        """Whether all results are `equal`.

        Raises:
            Uncomparable: There is a kind that cannot be compared.
        """
        return len(actual) == len(expected) and all(map(self.equal, actual, expected))

    def equal(self, actual: Value, expected: Value) -> bool:
        """Whether two results have the same bits and, where both have any, the same strides."""
        # This one test decides nearly all calls; the rest is for numbers, lists, layouts and NaN.
        if type(actual) is type(expected) is torch.Tensor and plainly_equal(actual, expected):
            return True
        if not bits_equal(actual, expected):
            return False
        if self._ignore_strides or not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
            return True
        if actual.layout is not torch.strided or actual.is_nested or actual.stride() == expected.stride():
            return True
        return not form_difference(actual, expected)

    def _case(
        self,
        plan: OpPlan,
        pristine: Arguments,
        results: tuple[list[Value], list[Value], tuple[str, ...]],
        rng: RngState | None,
        previous: tuple[Value, ...] | None,
        laid: tuple[int, ...],
        *,
        shared: bool,
    ) -> Case:
        actual, expected, names = results
        if self._ignore_strides:
            actual, expected = [_contiguous(v) for v in actual], [_contiguous(v) for v in expected]
        # The judge and the oracle compute on the CPU, whatever the shared device is.
        args, kwargs = pristine if not shared else inputs_to_cpu(pristine)

        def runner(
            executor: CallRunner, plan: OpPlan, laid: tuple[int, ...] = ()
        ) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Value, ...]]:
            def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Value, ...]:
                after = None
                if rng is not None:
                    # The judge runs the call many times: each run draws what the program drew, and the stream is put
                    # back.
                    after = rng[0].get_state()
                    rng[0].set_state(rng[1])
                try:
                    if laid:
                        if not shared:
                            args, kwargs = executor.to_device(plan, args, kwargs, executor.device, self._max_bytes)
                        args, kwargs = torchapi.with_isolated_warnings(at_offsets, (), (args, kwargs, laid))
                    ran = (
                        executor.run(plan, args, kwargs)
                        if shared or laid
                        else executor.run_mirrored(plan, args, kwargs, self._max_bytes)
                    )
                finally:
                    if rng is not None and after is not None:
                        rng[0].set_state(after)
                values = executor.values(plan, ran)
                return tuple(_contiguous(v) for v in values) if self._ignore_strides else tuple(values)

            return run

        return Case(
            func=plan.func,
            args=args,
            kwargs=kwargs,
            mutated=plan.mutated_names,
            names=names,
            actual=tuple(actual),
            expected=tuple(expected),
            run_target=runner(self._target, plan),
            run_reference=runner(self._ref, plan if shared else for_reference(plan)),
            same_device=shared,
            previous_actual=previous,
            run_at_offsets=runner(self._target, plan, laid) if any(laid) else None,
        )

    def remember_if_suspect(self, plan: OpPlan, values: list[Value]) -> None:
        """Keep the right results of an operator that was wrong before."""
        if plan.index not in self.suspects:
            return
        if n_bytes(values) > _MAX_REMEMBERED_BYTES:
            return
        self._previous[plan.index] = tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in values)


def bytes_for_oracle(max_bytes: int) -> int:
    """What the oracle may take beyond the copies of a call: 1 GiB or, if that is more, a quarter of `max_bytes`."""
    # A quarter of a small `max_bytes` would be too little for an oracle in float64.
    return max(min(max_bytes, 1 << 30), max_bytes // 4)


def _contiguous(value: Value) -> Value:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.contiguous()
    return value
