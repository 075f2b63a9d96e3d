"""From two runs of a call to one recorded verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.numerics.bits import Uncomparable, bits_equal, plainly_equal
from shadowrun.numerics.form import form_difference
from shadowrun.replay import results
from shadowrun.replay.capturing import SLOW
from shadowrun.replay.case import Case, Value
from shadowrun.replay.counterparts import COUNTERPARTS, compared, for_reference
from shadowrun.replay.effects import OVERWRITTEN, MemoryEffects
from shadowrun.replay.equivalents import EQUIVALENTS
from shadowrun.replay.execution import Executor, Ran, to_cpu
from shadowrun.replay.judge import Judge
from shadowrun.replay.mirror import copy_mutated
from shadowrun.replay.offsets import at_offsets, offsets
from shadowrun.replay.randomness import implausible
from shadowrun.replay.room import n_bytes
from shadowrun.store.schema import severity
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.config import Config
    from shadowrun.replay.effects import Looked
    from shadowrun.replay.recorder import Recorder

__all__ = ["Comparing", "bytes_for_oracle", "landed_elsewhere"]

_MAX_REMEMBERED = 16
_MAX_REMEMBERED_BYTES = 8 << 20
_NO_DRIFT = (-1.0, -1.0)
_SLOW_NS = 1_000_000
_MAX_CONFIRMED = 8
_MAX_RERUNS = 3
_MAX_RERUN_NS = 50_000_000
_READS = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"})
"""Operators that hand a number to Python: that they end on the CPU is what they are for."""


class Comparing:
    """Compares the target's run with the reference's, and records what it means.

    Attributes:
        suspects: Numbers of the plans whose operators were wrong before.
        effects: Decides which calls are looked at for what they do to memory.
        watched: Numbers of the plans that no shortcut may pass by: suspects, and those due for such a look.
        slow_ratio: From which on an operator may be called slow.
    """

    def __init__(self, config: Config, target: Executor, ref: Executor, recorder: Recorder) -> None:
        self._target = target
        self._ref = ref
        self._recorder = recorder
        self._max_bytes = config.max_bytes
        tolerance = config.tolerance_on(str(target.platform))
        self._judge = Judge(tolerance=tolerance, max_bytes=bytes_for_oracle(config.max_bytes))
        self._ignore_strides = target.platform.functionalizes or ref.platform.functionalizes
        # The last right results of operators that were wrong before: a stale buffer repeats them.
        self.suspects: set[int] = set()
        self.effects = MemoryEffects(target, ref, config.max_bytes)
        self.watched: set[int] = set()
        recorder.at_times = self._at_times
        self._previous: dict[int, tuple[Value, ...]] = {}
        self.slow_ratio = config.slow_ratio
        self._slow: Counter[int] = Counter()

    def judge_with(self, judge: Judge) -> None:
        """Have calls judged by another judge, who sees what it judges."""
        self._judge = judge

    @property
    def sampled(self) -> bool:
        """Whether a call was judged by slices."""
        return self._judge.sampled

    def _at_times(self) -> None:
        """Have the next call of another operator looked at, about once a second."""
        index = self.effects.next_due()
        if index is not None:
            self.watched.add(index)

    def _effects_of(self, plan: OpPlan, context: int, pristine: Any) -> Looked | None:
        """What the target does to memory in this call and may not; None where it is not looked at."""
        wanted = self.effects.wants(plan, context, *pristine)
        if self.effects.always:
            self.watched.add(plan.index)
        elif plan.index in self.watched and plan.index not in self.suspects:
            self.watched.discard(plan.index)
        return self.effects.look(plan, pristine) if wanted else None

    def confirmed_ns(self, plan: OpPlan, actual_ns: int, expected_ns: int, again: Callable[[], Ran]) -> int:
        """Time of the target's run, measured again before an operator is called slow.

        The first of two runs wakes the thread pool, and on a busy machine waits for a processor: 12 ms for a
        call of 0.4 ms were seen. So a slow first run counts only if the runs after the reference's are slow too.

        Args:
            plan: The operator.
            actual_ns: Time of the target's run.
            expected_ns: Time of the reference's run.
            again: Runs the call once more on the target.
        """
        if not self.is_slow(actual_ns, expected_ns) or self._slow[plan.index] >= _MAX_CONFIRMED:
            return actual_ns
        best, spent = actual_ns, 0
        for _ in range(_MAX_RERUNS):
            ns = again().ns
            best, spent = min(best, ns), spent + ns
            if not self.is_slow(best, expected_ns):
                return best
            if spent > _MAX_RERUN_NS:
                break
        self._slow[plan.index] += 1
        return best

    def is_slow(self, actual_ns: int, expected_ns: int) -> bool:
        """Whether a call takes the target so long that its operator may be called slow."""
        return actual_ns >= max(self.slow_ratio * expected_ns, expected_ns + _SLOW_NS)

    def conclude(
        self,
        plan: OpPlan,
        context: int,
        pristine: Any,
        actual: Ran,
        expected: Ran,
        drifted: tuple[float, float] | None,
        *,
        shared: bool,
        rng: tuple[torch.Generator, torch.Tensor] | None = None,
        here: torch.device | None = None,
    ) -> None:
        """Compare and record.

        Args:
            plan: The operator.
            context: Number of the call's context.
            pristine: Inputs as before the call, on the CPU.
            actual: The target's run.
            expected: The reference's run.
            drifted: Accumulated error, if it is kept.
            shared: Both ran on one device.
            rng: Generator and state that the call began with, for random operators.
            here: Device that the target's results should lie on, where the user's program runs there.
        """
        actual_ns = actual.ns
        reruns: list[Ran] = []
        # Another call stood for this one: its layout is the device's own affair, its time includes another graph.
        counterpart = not shared and plan.name in COUNTERPARTS
        stand_in = counterpart or (not shared and plan.name in EQUIVALENTS)
        if plan.action is not Action.RANDOM and not stand_in:
            executor = self._target

            def again() -> Ran:
                args, kwargs = pristine
                if not shared:
                    ran = executor.run_mirrored(plan, args, kwargs, self._max_bytes)
                else:
                    if plan.mutated:
                        args, kwargs = copy_mutated(plan, args, kwargs, self._max_bytes)
                    ran = executor.run(plan, args, kwargs)
                if n_bytes(results.values(plan, ran.args, ran.kwargs, ran.out)) > _MAX_REMEMBERED_BYTES:
                    reruns.clear()
                reruns.append(ran)
                return ran

            actual_ns = self.confirmed_ns(plan, actual.ns, expected.ns, again)
        times = (expected.ns / 1000, -1.0 if stand_in else actual_ns / 1000)
        drift = drifted or _NO_DRIFT
        if counterpart:
            plan = compared(plan, expected.out)
        left, right = self._target.values(plan, actual), self._ref.values(plan, expected)
        # What stands for the call, or what a graph leaves undefined, gives the first results only.
        n = min(len(left), len(right)) if stand_in or self._ignore_strides else max(len(left), len(right))
        left, right = left[:n], right[:n]
        if stand_in:
            left, right = [_contiguous(v) for v in left], [_contiguous(v) for v in right]
        if plan.name in _READS:
            actual.fallback = None
        elif here is not None and actual.fallback is None:
            actual.fallback = landed_elsewhere(plan, actual.out, here)
        try:
            equal = self.all_equal(left, right)
            if equal and actual.fallback is None:  # a device may be wrong in every third call, and slow in any
                others = (self._target.values(plan, ran)[:n] for ran in reruns)
                wrong = next((values for values in others if not self.all_equal(values, right)), None)
                left, equal = (left, True) if wrong is None else (wrong, False)
        except Uncomparable as error:
            verdict = Verdict(Status.UNVERIFIED, None, str(error))
            self._recorder.verdict(context, verdict, times=times, drift=drift)
            return
        looked = None if stand_in else self._effects_of(plan, context, pristine)
        previous = self._previous.get(plan.index)
        if equal and looked is not None:
            captured = self._recorder.keep(plan, looked[0], pristine)
            self._recorder.verdict(context, *looked, times=times, drift=drift, captured=captured)
            return
        if equal:
            self.remember_if_suspect(plan, left)
            slow = self._recorder.keep(plan, SLOW, pristine) if self.is_slow(actual_ns, expected.ns) else None
            if actual.fallback is not None:
                cause, evidence = actual.fallback
                verdict = Verdict(Status.FALLBACK, cause, "computed on the CPU", evidence)
                captured = self._recorder.keep(plan, verdict, pristine) or slow
                self._recorder.verdict(context, verdict, times=times, drift=drift, captured=captured)
            elif slow is not None:
                self._recorder.verdict(context, Verdict(Status.MATCH), times=times, drift=drift, captured=slow)
            else:
                self._recorder.match(context, *times, drift)
            return
        laid = () if stand_in else offsets(actual.args, actual.kwargs)
        case = self._case(plan, pristine, left, right, expected, rng, previous, laid, shared=shared)
        verdict, diffs = self._judge(case)
        if verdict.status is Status.MISMATCH:
            if len(self.suspects) < _MAX_REMEMBERED:
                self.suspects.add(plan.index)
                self.watched.add(plan.index)
            if plan.unstable:
                verdict = Verdict(Status.UNVERIFIED, Cause.NON_DETERMINISM, plan.unstable, verdict.evidence)
        elif actual.fallback is not None:
            cause, evidence = actual.fallback
            verdict = Verdict(Status.FALLBACK, cause, "computed on the CPU", evidence)
        spoiled = shared and looked is not None and looked[0].explanation == OVERWRITTEN
        if looked is not None and verdict.status is Status.MISMATCH and not spoiled:
            verdict = replace(verdict, evidence=f"{verdict.evidence}; besides, {looked[0].evidence}")
        elif looked is not None:
            verdict, diffs = looked
        captured = self._recorder.keep(plan, verdict, pristine, (), max(map(severity, diffs), default=0.0))
        self._recorder.verdict(context, verdict, diffs, times=times, drift=drift, captured=captured)

    def conclude_random(self, plan: OpPlan, context: int, pristine: Any, drawn: Ran) -> None:
        """Record a random operator whose values were handed over to the reference."""
        left = self._target.values(plan, drawn)
        why = implausible(plan.func, pristine[0], pristine[1], left)
        if why:
            verdict = Verdict(Status.MISMATCH, Cause.RANDOMNESS, "implausible draws", why)
        else:
            verdict = Verdict(Status.UNVERIFIED, Cause.RANDOMNESS, "random: drawn values handed over to the reference")
        if drawn.fallback is not None and not why:
            verdict = Verdict(Status.FALLBACK, drawn.fallback[0], "computed on the CPU", drawn.fallback[1])
        self._recorder.verdict(context, verdict, times=(-1.0, drawn.ns / 1000))

    def all_equal(self, left: list[Value], right: list[Value]) -> bool:
        """Whether all results are `equal`.

        Raises:
            Uncomparable: There is a kind that cannot be compared.
        """
        return len(left) == len(right) and all(map(self.equal, left, right))

    def equal(self, actual: Value, expected: Value) -> bool:
        """Whether two results have the same bits and, where both have any, the same strides."""
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
        pristine: Any,
        left: list[Value],
        right: list[Value],
        expected: Ran,
        rng: tuple[torch.Generator, torch.Tensor] | None,
        previous: tuple[Value, ...] | None,
        laid: tuple[int, ...],
        *,
        shared: bool,
    ) -> Case:
        if self._ignore_strides:
            left, right = [_contiguous(v) for v in left], [_contiguous(v) for v in right]
        args, kwargs = pristine if not shared else _on_cpu(pristine)

        def runner(
            executor: Executor, plan: OpPlan, laid: tuple[int, ...] = ()
        ) -> Callable[[tuple[Any, ...], dict[str, Any]], tuple[Value, ...]]:
            def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Value, ...]:
                after = None
                if rng is not None:
                    after = rng[0].get_state()
                    rng[0].set_state(rng[1])
                try:
                    if laid:
                        if not shared:
                            args, kwargs = executor.to_device(plan, args, kwargs, executor.device, self._max_bytes)
                        args, kwargs = torchapi.unheard(at_offsets, (), (args, kwargs, laid))
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

        names = results.names(plan, expected.args, expected.kwargs, expected.out)[: len(left)]
        return Case(
            func=plan.func,
            args=args,
            kwargs=kwargs,
            mutated=plan.mutated_names,
            names=names,
            actual=tuple(left),
            expected=tuple(right),
            run_target=runner(self._target, plan),
            run_reference=runner(self._ref, plan if shared else for_reference(plan)),
            same_device=shared,
            previous_actual=previous,
            run_as_it_lay=runner(self._target, plan, laid) if any(laid) else None,
        )

    def remember_if_suspect(self, plan: OpPlan, values: list[Value]) -> None:
        """Keep the right results of an operator that was wrong before."""
        if plan.index not in self.suspects:
            return
        if n_bytes(values) > _MAX_REMEMBERED_BYTES:
            return
        self._previous[plan.index] = tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in values)


def bytes_for_oracle(max_bytes: int) -> int:
    """Of the memory that one call's copies may take, what the oracle may take besides: 1 GiB, or a quarter if more."""
    return max(min(max_bytes, 1 << 30), max_bytes // 4)


def landed_elsewhere(plan: OpPlan, out: Any, here: torch.device) -> tuple[Cause, str] | None:
    """Evidence of a fallback in where a result lies; None where it lies on the device, or may lie elsewhere."""
    if plan.has_device or plan.mutated:
        return None
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if isinstance(first, torch.Tensor) and first.device.type != here.type:
        return Cause.SILENT_FALLBACK, f"the result lies on {first.device}, not on {here}"
    return None


def _on_cpu(pristine: Any) -> Any:
    args, kwargs = pristine
    return tuple(_each_to_cpu(a) for a in args), {k: _each_to_cpu(v) for k, v in kwargs.items()}


def _each_to_cpu(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [to_cpu(v) for v in value]
    return to_cpu(value)


def _contiguous(value: Value) -> Value:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.contiguous()
    return value
