"""Two platforms on one accelerator (``cuda[tf32=on]`` against ``cuda``): compared there, and asked about in batches.

Each call leaves a few numbers on the device: how many elements differ, and how far. Those of many calls are fetched at
once, which saves a host sync for each. Where the reference computes in another dtype, results that differ are tested
for closeness on the device. What is not close, or differs under another setting, is copied to the host for the judge.
Until then inputs and results wait on the device, as copies, within a bound: where that is reached, the numbers are
fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.torchapi import as_in_handler, with_isolated_warnings
from shadowrun.judge.rounding.closeness import are_close
from shadowrun.numerics.device_statistics import PendingStatistics
from shadowrun.numerics.form import form_difference
from shadowrun.operators.case import Case
from shadowrun.operators.vendor_ops import compared
from shadowrun.platforms.device import device_settings
from shadowrun.platforms.unsupported import classify, limit_of_host
from shadowrun.replay.call import CallRun, argument, run_own
from shadowrun.replay.context import BUDGET, CUSTOM, ReplayContext
from shadowrun.replay.copies import (
    OverBudget,
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
from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Mapping

    from shadowrun.numerics.device_statistics import DeviceStatistics
    from shadowrun.operators.case import Value
    from shadowrun.platforms.device import Platform
    from shadowrun.replay.call import Call
    from shadowrun.replay.copies import Arguments
    from shadowrun.replay.executor import Executor
    from shadowrun.replay.memory_effects import Looked

__all__ = ["TwoSettingsPath"]

_CPU = torch.device("cpu")
# Fetching the numbers of one call is a host sync; 256 calls share one.
_MAX_PENDING = 256
# Pending copies lie in the accelerator's memory, which the program needs.
_MAX_BYTES = 1 << 30


@dataclass(slots=True)
class _Pending:
    """A call whose statistics lie on the device, with copies of what the judge would need.

    Attributes:
        counted: Which results they are of; None where the form differs already.
        random: It draws random values.
    """

    call: Call
    pristine: Arguments
    actual: CallRun
    expected: CallRun
    counted: tuple[int, ...] | None
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
        self._recomputes = bool(target.compute_dtype or ref.compute_dtype) and not own_rules
        self._statistics = PendingStatistics()
        # An exception at the very call needs its statistics at once.
        self._max_pending = 1 if context.config.stop_on else _MAX_PENDING

    def observe(self, call: Call) -> CallRun:
        """Run a call for the program, again on the other platform, and count on the device how they differ."""
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
                # All inputs are copied: the program may write to them before the statistics are fetched.
                to_mirror = (call.args, call.kwargs, role.device, self._max_bytes, copy_on_device, written)
                copies.pristine = with_isolated_warnings(mirror, (), to_mirror)
                if stream is not None:
                    state = stream.state()
        except OverBudget:
            copies.problem = BUDGET
        except Exception as error:
            copies.problem = context.internal_error("copying the inputs of", call.plan, error, call.tensors)

        def restore() -> None:
            # Pending calls hold copies on the device: fetching their statistics frees that memory.
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
                with_isolated_warnings(self._count, (), compared)
        except Exception as error:
            context.failed("replaying", call, error, own.out)
        return own

    def flush(self) -> None:
        """Fetch the statistics, and record the calls that wait for them."""
        pending, self._pending, self._held_bytes = self._pending, [], 0
        if not pending:
            return
        # `flush` is also called where the program calls us, under its own modes.
        with as_in_handler():
            fetched = iter(self._statistics.fetch())
            while pending:
                # In order, and none held longer than needed: to judge one takes memory too.
                one = pending.pop(0)
                found = None if one.counted is None else {position: next(fetched) for position in one.counted}
                self._record(one, found)

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

    def _count(self, call: Call, pristine: Arguments, actual: CallRun, expected: CallRun, random: bool) -> None:
        # Results that a counterpart of the operator lacks are not compared.
        plan = call.plan if expected.out is None else compared(call.plan, expected.out)
        actual_values, expected_values = actual.values(plan), expected.values(plan)
        pairs = _comparable(actual_values, expected_values)
        for pair in (pairs or {}).values():
            self._statistics.add(*pair)
        counted = None if pairs is None else tuple(pairs)
        copies = tensors_in((*pristine[0], *pristine[1].values(), *actual_values, *expected_values))
        self._held_bytes += sum(t.nbytes for t in copies if t.layout is torch.strided)
        self._pending.append(_Pending(call, pristine, actual, expected, counted, random))
        if len(self._pending) >= self._max_pending or self._held_bytes > min(self._max_bytes, _MAX_BYTES):
            self.flush()

    def _are_close(self, pending: _Pending, found: Mapping[int, DeviceStatistics]) -> bool:
        """Whether all that differs is close, tested on the device."""
        call, (args, kwargs) = pending.call, pending.pristine
        plan = call.plan if pending.expected.out is None else compared(call.plan, pending.expected.out)
        names, actual, expected = pending.actual.names(plan), pending.actual.values(plan), pending.expected.values(plan)
        case = Case(plan.func, args, kwargs, plan.mutated_names, names, tuple(actual), tuple(expected), _never, _never)
        try:
            # Squares of terms are added up there: that their inputs are rounded to tf32 moves a bound by 0.1 %.
            with torch.no_grad(), _fast_products(call.role.device):
                return with_isolated_warnings(are_close, (), (case, found, self._max_bytes))  # type: ignore[no-any-return]
        except Exception:  # the device lacks an operator, or memory: the judge looks
            return False

    def _record(self, pending: _Pending, found: Mapping[int, DeviceStatistics] | None) -> None:
        context, call = self._context, pending.call
        comparator, actual, expected = context.comparator, pending.actual, pending.expected
        try:
            different = found is None or any(one.n_different for one in found.values())
            may_be_close = different and found is not None and self._recomputes and not pending.random
            if may_be_close and actual.fallback is None and self._are_close(pending, found or {}):
                different = False
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


def _comparable(actual: list[Value], expected: list[Value]) -> dict[int, tuple[torch.Tensor, torch.Tensor]] | None:
    """Pairs of results that have elements; None where a form differs already, or the device cannot compare one."""
    if len(actual) != len(expected):
        return None
    found = {}
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(a, torch.Tensor) or not isinstance(e, torch.Tensor):
            return None
        # These kinds have no plain bits that a kernel could compare.
        if a.layout is not torch.strided or a.is_nested or a.is_quantized or form_difference(a, e):
            return None
        if a.numel():
            found[i] = a, e
    return found


def _fast_products(device: torch.device) -> contextlib.AbstractContextManager[None]:
    fast = (("tf32", True),) if device.type == "cuda" else ()
    return device_settings(device.type, fast)


def _never(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[Value, ...]:
    raise NotImplementedError  # closeness runs neither platform
