"""Two platforms on one accelerator (``cuda[tf32=on]`` against ``cuda``): compared there, and asked about in batches.

Each call leaves one flag on the device: whether any bit differs. The flags of many calls are fetched at once, which
saves a host sync for each; inputs and results of a call that differs are then copied to the host for the judge. Until
then they wait on the device, as copies, within a bound: where that is reached, the flags are fetched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from shadowrun.intercept.torchapi import as_in_handler, with_isolated_warnings
from shadowrun.judge.rounding.closeness import allowed_ulp, needs_judge, squared_arguments, sum_tolerance
from shadowrun.judge.rounding.rounding_bounds import reduction_length
from shadowrun.numerics.form import form_difference
from shadowrun.operators.facts import facts
from shadowrun.operators.vendor_ops import compared
from shadowrun.platforms.unsupported import classify, limit_of_host
from shadowrun.replay.call import CallRun, argument, run_own
from shadowrun.replay.context import BUDGET, CUSTOM, ReplayContext
from shadowrun.replay.copies import (
    OverBudget,
    arguments_by_name,
    copy_mutated,
    copy_on_device,
    mirror,
    move,
    plan_with_cpu_tensors,
    tensors_in,
    written_to,
)
from shadowrun.replay.executor import result_on_other_device
from shadowrun.replay.input_copies import TOO_LARGE, InputCopies, are_too_large, run_before_copies
from shadowrun.replay.paths.platform_runs import refused
from shadowrun.torch_private import schema_of
from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    from shadowrun.operators.case import Value
    from shadowrun.platforms.device import Platform
    from shadowrun.replay.call import Call
    from shadowrun.replay.copies import Arguments
    from shadowrun.replay.executor import Executor
    from shadowrun.replay.memory_effects import Looked

__all__ = ["TwoSettingsPath"]

_CPU = torch.device("cpu")
# Fetching one flag is a host sync; 256 calls share one.
_MAX_PENDING = 256
# Pending copies lie in the accelerator's memory, which the program needs.
_MAX_BYTES = 1 << 30
_NeedsJudge: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor], "torch.Tensor | None"]
"""Flag of a result by its number: whether the judge has to look; None where every bit counts."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class _Pending:
    """A call whose flag lies on the device, with copies of what the judge would need.

    Attributes:
        flags: One for each result; None where the form differs already.
        random: It draws random values.
    """

    call: Call
    pristine: Arguments
    actual: CallRun
    expected: CallRun
    flags: list[torch.Tensor] | None
    random: bool


class _RandomStream:
    """The random stream that a call draws from: the generator that was passed, or the device's own."""

    def __init__(self, platform: Platform, generator: torch.Generator | None) -> None:
        self._platform = platform
        self._generator = generator

    def state(self) -> Any:
        return self._platform.rng_state() if self._generator is None else self._generator.get_state()

    def set(self, state: Any) -> None:
        if self._generator is None:
            self._platform.set_rng_state(state)
        else:
            self._generator.set_state(state)


@dataclass(slots=True)
class _Replay:
    """What a second run of a call begins with."""

    pristine: Arguments
    stream: _RandomStream | None
    state: Any


class TwoSettingsPath:
    """Observes calls on an accelerator that is both target and reference."""

    def __init__(self, context: ReplayContext) -> None:
        self._context = context
        self._max_bytes = context.config.max_bytes
        self._pending: list[_Pending] = []
        self._held_bytes = 0
        target, ref = context.target.platform, context.ref.platform
        # A tolerance of the user decides alone.
        own_rules = context.config.tolerance_on(str(target)) is not None
        self._wide = context.ref if ref.compute_dtype else context.target
        self._recomputes = bool(target.compute_dtype or ref.compute_dtype) and not own_rules
        # An exception at the very call needs its flag at once.
        self._max_pending = 1 if context.config.stop_on else _MAX_PENDING

    def observe(self, call: Call) -> CallRun:
        """Run a call for the program, again on the other platform, and leave a flag."""
        context, role, copies = self._context, call.role, InputCopies()
        random = call.is_random
        stream = _RandomStream(context.target.platform, call.kwargs.get("generator")) if random else None
        state: Any = None
        try:
            if not context.may_replay(call.plan):
                copies.problem = CUSTOM
            else:
                plan = call.plan = plan_with_cpu_tensors(call.plan, call.args, call.kwargs)
                written = written_to(plan, call.args, call.kwargs)
                # All inputs are copied: the program may write to them before the flags are fetched.
                to_mirror = (call.args, call.kwargs, role.device, self._max_bytes, copy_on_device, written)
                copies.pristine = with_isolated_warnings(mirror, (), to_mirror)
                if stream is not None:
                    state = stream.state()
        except OverBudget:
            copies.problem = BUDGET
        except Exception as error:
            copies.problem = context.internal_error("copying the inputs of", call.plan, error, call.tensors)

        def restore() -> None:
            # Pending calls hold copies on the device: fetching their flags frees that memory.
            self.flush()
            if stream is not None and state is not None:
                stream.set(state)

        run = context.target.run_user if role.on_target else context.ref.run_user if role.on_ref else run_own
        own = run_before_copies(run, call, copies, restore)
        if copies.problem is None and are_too_large(call.plan, own.out, self._max_bytes):
            copies.problem = TOO_LARGE
        try:
            context.recorder.context(call)
            if copies.problem is not None or copies.pristine is None:
                context.unverified(call, copies.problem or BUDGET)
                return own
            replay = _Replay(copies.pristine, stream, state)
            # The replay draws from the same state, and the program's stream must have moved once only.
            after = stream.state() if stream is not None else None
            try:
                copied = with_isolated_warnings(self._copy_results, (), (call, own))
                actual = copied if role.on_target else self._replay(context.target, call, replay)
                expected = copied if role.on_ref else self._replay(context.ref, call, replay)
            finally:
                if stream is not None:
                    stream.set(after)
            failures = [run for run in (actual, expected) if isinstance(run, Verdict)]
            if failures:
                self.flush()
                context.unverified(call, failures[0])
            else:
                compared = (call.without_arguments(), copies.pristine, actual, expected, random)
                with_isolated_warnings(self._leave_flag, (), compared)
        except Exception as error:
            context.failed("replaying", call, error, own.out)
        return own

    def flush(self) -> None:
        """Fetch the flags, and record the calls that wait for them."""
        pending, self._pending, self._held_bytes = self._pending, [], 0
        if not pending:
            return
        # `flush` is also called where the program calls us, under its own modes.
        with as_in_handler():
            flags = [flag.reshape(()) for one in pending for flag in one.flags or ()]
            # One copy for all flags, so one host sync.
            differ = iter(torch.stack(flags).tolist() if flags else ())
            for one in pending:
                different = one.flags is None or sum(next(differ) for _ in one.flags) > 0
                self._record(one, different=different)

    def _replay(self, executor: Executor, call: Call, replay: _Replay) -> CallRun | Verdict:
        """Run a call on the other platform, or give the verdict on why that is not possible."""
        plan = call.plan
        try:
            if replay.stream is not None and replay.state is not None:
                replay.stream.set(replay.state)
            args, kwargs = replay.pristine
            if plan.mutated:
                args, kwargs = with_isolated_warnings(copy_mutated, (), (plan, args, kwargs, self._max_bytes))
            return executor.run(plan, args, kwargs)
        except Exception as error:
            if executor is self._context.ref:
                # The target answered what the reference refuses: the call may be invalid.
                verdict: Verdict = with_isolated_warnings(refused, (), (plan, *replay.pristine, error))
                return verdict
            if limit_of_host(error):
                return Verdict(Status.UNVERIFIED, None, limit_of_host(error), str(error)[:300])
            failure = classify(error)
            return Verdict(Status.ERROR, failure.cause, type(error).__name__, failure.message)

    def _copy_results(self, call: Call, own: CallRun) -> CallRun:
        """The program's run with copies of its results: the program may write to them before they are compared."""
        plan = call.plan
        args: list[Any] = [None] * len(own.args)
        kwargs: dict[str, Any] = {}
        for a in plan.mutated:
            value = _copied(argument(a, own.args, own.kwargs))
            if a.kwarg_only or a.position >= len(args):
                kwargs[a.name] = value
            else:
                args[a.position] = value
        out: Any = None
        if plan.n_returns == 1:
            out = _copied(own.out) if plan.fresh else None
        elif plan.n_returns:
            out = tuple([_copied(v) if i in plan.fresh else None for i, v in enumerate(own.out)])
        fallback = own.fallback
        if call.role.on_target and fallback is None:
            fallback = result_on_other_device(plan, own.out, call.role.device)
        return CallRun(tuple(args), kwargs, out, own.ns, fallback, own.began)

    def _leave_flag(self, call: Call, pristine: Arguments, actual: CallRun, expected: CallRun, random: bool) -> None:
        # Results that a counterpart of the operator lacks are not compared.
        plan = call.plan if expected.out is None else compared(call.plan, expected.out)
        actual_values, expected_values = actual.values(plan), expected.values(plan)
        far = self._far(call, pristine, expected_values) if self._recomputes and not random else None
        flags = _flags(actual_values, expected_values, far)
        copies = tensors_in((*pristine[0], *pristine[1].values(), *actual_values, *expected_values))
        self._held_bytes += sum(t.nbytes for t in copies if t.layout is torch.strided)
        self._pending.append(_Pending(call, pristine, actual, expected, flags, random))
        if len(self._pending) >= self._max_pending or self._held_bytes > min(self._max_bytes, _MAX_BYTES):
            self.flush()

    def _far(self, call: Call, pristine: Arguments, expected: list[Value]) -> _NeedsJudge:
        """What says, on the device, which results the judge has to look at."""
        plan, row, named = call.plan, facts(call.plan.name), arguments_by_name(call.plan, *pristine)
        allowed = [
            allowed_ulp(plan.name, v, i, named) if isinstance(v, torch.Tensor) else 0 for i, v in enumerate(expected)
        ]
        tolerances: list[torch.Tensor | None] = [None] * len(expected)
        # In a sum whose terms cancel, many elements are further apart than their own size explains.
        if row.n_factors and any(allowed) and not plan.mutated:
            floats = [t.numel() for t in tensors_in((*pristine[0], *pristine[1].values())) if t.is_floating_point()]
            with contextlib.suppress(Exception):  # without one, the judge looks
                names = [a.name for a in schema_of(plan.func).arguments]
                ran = self._wide.run(plan, *squared_arguments(names, *pristine))
                for i, (squared, e) in enumerate(zip(ran.values(plan), expected, strict=True)):
                    if allowed[i] and isinstance(squared, torch.Tensor) and isinstance(e, torch.Tensor):
                        tolerances[i] = sum_tolerance(squared, e, reduction_length(floats, e.numel()))
        by_rows = row.norm == "row"

        def far(i: int, actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor | None:
            if not allowed[i]:
                return None
            return needs_judge(
                actual.resolve_neg(), expected.resolve_neg(), allowed[i], by_rows=by_rows, tolerance=tolerances[i]
            )

        return far

    def _record(self, pending: _Pending, *, different: bool) -> None:
        context, call = self._context, pending.call
        comparator, actual, expected = context.comparator, pending.actual, pending.expected
        try:
            # A match leaves all copies on the device: to look at memory they are as good there.
            if not different and actual.fallback is None:
                times = expected.ns / 1000, actual.ns / 1000
                looked: Looked | None = None
                if comparator.effects.may_be_due(call.plan, call.context):
                    looked = with_isolated_warnings(comparator.memory_effect, (), (call, call.plan, pending.pristine))
                if looked is None:
                    context.recorder.match(call.context, *times)
                else:
                    captured = context.recorder.keep_inputs(call.plan, looked[0], pending.pristine)
                    context.recorder.verdict(call.context, *looked, times=times, captured=captured)
                return
            written = written_to(call.plan, *pending.pristine)
            pristine = mirror(*pending.pristine, _CPU, self._max_bytes, written=written)
            # Other settings may choose a kernel that draws in another order: no mismatch follows.
            if pending.random and different:
                comparator.compare_and_record_random(call, pristine, actual)
                return
            runs = (call, pristine, actual, expected)
            with_isolated_warnings(comparator.compare_and_record, (), runs, {"shared": False})
        except Exception as error:
            context.failed("comparing", call, error)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return move(value, value.device)
    if isinstance(value, (list, tuple)):
        return [_copied(v) for v in value]
    return value


def _flags(actual: list[Value], expected: list[Value], far: _NeedsJudge | None) -> list[torch.Tensor] | None:
    """Whether results differ, as flags on the device; None where that is known already, or the judge must look."""
    if len(actual) != len(expected):
        return None
    flags = []
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(a, torch.Tensor) or not isinstance(e, torch.Tensor):
            return None
        # These kinds have no plain bits that a kernel could compare.
        if a.layout is not torch.strided or a.is_nested or a.is_quantized or form_difference(a, e):
            return None
        if a.numel():
            flag = None if far is None else far(i, a, e)
            flags.append((_as_integers(a) != _as_integers(e)).any() if flag is None else flag)
    return flags


def _as_integers(t: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor: as numbers, two NaN would differ."""
    t = t.resolve_conj().resolve_neg()
    if t.element_size() == 16:
        # No integer has 16 bytes.
        t = torch.view_as_real(t)
    return t.view(_INTEGERS[t.element_size()])
