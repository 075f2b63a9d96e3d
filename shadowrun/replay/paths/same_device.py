"""Calls on a device that both platforms share, as the CPU under other settings.

Both runs get the program's own inputs; only what the call writes to is copied. Nearly all calls of a training step
return one new tensor, or write to their first argument and return it: they take the fast path, where each microsecond
is paid thousands of times a second. It returns None before it has done anything where a call needs more care.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.plan import Action, OpKind
from shadowrun.intercept.torchapi import shares_memory, with_isolated_warnings
from shadowrun.intercept.user_call import own_call
from shadowrun.numerics import bits
from shadowrun.numerics.bits import Uncomparable, plainly_equal
from shadowrun.replay.call import Call, CallRun, run_own
from shadowrun.replay.context import BUDGET, CUSTOM, ReplayContext
from shadowrun.replay.copies import OverBudget, copy_mutated
from shadowrun.replay.input_copies import (
    BYTES_PER_NS,
    TOO_LARGE,
    CopyBuffer,
    CopyBuffers,
    InputCopies,
    are_too_large,
    may_run_again,
    run_before_copies,
)
from shadowrun.replay.paths.same_device_verdicts import SameDeviceVerdicts
from shadowrun.replay.slow_calls import WORTH_TIMING_NS

if TYPE_CHECKING:
    from shadowrun.operators.case import Value
    from shadowrun.replay.copies import Arguments
    from shadowrun.replay.drift import RngState
    from shadowrun.replay.executor import Executor

__all__ = ["FastPath", "SameDevicePath"]

_clock = time.perf_counter_ns
_FEW = bits.FEW
_FRESH = frozenset({torch.Tensor, float, int, bool, complex})
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({float, int, bool, type(None)})  # `isinstance(a, torch.Tensor)` of one of these takes 0.5 µs
_FUNCTIONAL, _IN_PLACE, _SPECIAL = OpKind.FUNCTIONAL, OpKind.IN_PLACE, OpKind.SPECIAL


class FastPath:
    """Observes plain calls on the CPU, where the program's own run is the target's or the reference's.

    Args:
        context: The parts of the comparison.
        verdicts: Records calls that are no plain match.

    Attributes:
        buffers: Memory that is kept for copies.
        max_bytes: Bound of the results of a call that is replayed.
    """

    def __init__(self, context: ReplayContext, verdicts: SameDeviceVerdicts) -> None:
        self._target, self._ref = context.target, context.ref
        self._recorder = context.recorder
        self._comparator = context.comparator
        self._watched = context.comparator.watched
        self._effects = context.comparator.effects
        self._no_drift = context.drift is None
        self._verdicts = verdicts
        self.buffers = CopyBuffers(context.config.max_bytes)
        # A bound attribute less per call.
        self._by_form = self.buffers.by_form
        self.max_bytes = context.config.max_bytes

    def functional(self, call: Call) -> CallRun | None:
        """Observe a call that returns one new tensor or number, and writes to nothing.

        Returns:
            The program's own run; None where nothing was done.
        """
        try:
            context = call.context if call.context >= 0 else self._recorder.context(call)
        except Exception:  # the general path records why
            return None
        plan, args, kwargs = call.plan, call.args, call.kwargs
        run = plan.run
        # Nothing but the call lies between the two clocks: what is added there would be the operator's time.
        start = _clock()
        out = own_call(run, args, kwargs)
        ended = _clock()
        ns = ended - start
        own = CallRun(args, kwargs, out, ns)
        on_target = call.role.on_target
        other = self._ref if on_target else self._target
        try:
            # The elapsed time bounds the bytes written, which spares asking most results for their size.
            if ns * BYTES_PER_NS > self.max_bytes and self._verdicts.is_too_large(call, out, self.max_bytes):
                return own
            # The inputs are used as they are: a functional call writes to none of them.
            again = with_isolated_warnings(run, (), args, kwargs) if other.plain else other.call(plan, args, kwargs)
            other_ns = _clock() - ended
            # Numbers and subclasses take the slower test in `record_functional`.
            equal = type(out) is torch.Tensor and plainly_equal(out, again)
            # One comparison of integers stands for the look-ups that a known call does not need.
            known = context <= self._effects.newest and plan.index not in self._watched
            if equal and known and ns + other_ns < WORTH_TIMING_NS and self._no_drift:
                # Written out for speed: this path is taken thousands of times a second.
                if on_target:
                    self._recorder.match(context, other_ns / 1000, ns / 1000)
                else:
                    self._recorder.match(context, ns / 1000, other_ns / 1000)
            else:
                self.record_functional(call, own, CallRun(args, kwargs, again, other_ns), equal=equal)
        except Exception as error:
            self._verdicts.failed(call, error)
        return own

    def record_functional(self, call: Call, own: CallRun, replayed: CallRun, *, equal: bool) -> None:
        """Record a call of `functional` that took long, is new, or returned no equal tensors: numbers, say."""
        plan = call.plan
        if not equal and self._verdicts.record_close(call, own, replayed, (own.out,), (replayed.out,)):
            return
        equal = equal or (type(own.out) in _FRESH and self._comparator.equal(own.out, replayed.out))
        known = call.context <= self._effects.newest and plan.index not in self._watched
        if equal and known and own.ns + replayed.ns < WORTH_TIMING_NS and self._no_drift:
            expected, actual = (replayed, own) if call.role.on_target else (own, replayed)
            self._recorder.match(call.context, expected.ns / 1000, actual.ns / 1000)
            return
        self._verdicts.record(call, (own.args, own.kwargs), own, replayed, equal=equal)

    def in_place(self, call: Call) -> CallRun | None:
        """Observe a call that writes to its first argument and returns it.

        Returns:
            The program's own run; None where nothing was done: the argument shares its memory with another, say.
        """
        plan, args, kwargs = call.plan, call.args, call.kwargs
        first = args[0]
        try:
            shape = first.shape
            # An allocation takes longer than the copy of a small tensor.
            buffer = self._by_form.get((first.dtype, shape)) or self.buffers.make(first)
            address = first.data_ptr()
            # `memmove` copies one block: gaps between strides would be overwritten in the copy and compared.
            if buffer is None or not address or not first.is_contiguous() or first.is_neg():
                return None
            for a in args[1:]:
                kind = type(a)
                if kind in _PLAIN or (kind not in _NUMBERS and isinstance(a, torch.Tensor)):
                    # The replay would read the program's result in place of the value from before the call.
                    if shares_memory(first, a):
                        return None
                # Tensors inside would have to be searched, which the general path does.
                elif kind is list or kind is tuple:
                    return None
            # Before the call, which may resize its argument: the context has the shapes that went in.
            context = self._recorder.context(call)
            work, work_address, n_bytes = buffer.work, buffer.work_at, buffer.n_bytes
            if n_bytes <= _FEW:
                # Releasing the GIL costs more than moving a few bytes.
                move, differs = bits.memmove_with_gil, bits.memcmp_with_gil
            else:
                move, differs = bits.memmove, bits.memcmp
            # By address: a copy by torch would be an operator call.
            move(buffer.before_at, address, n_bytes)
        except Exception:  # the general path copies with more care, and records why it cannot
            return None
        run = plan.run
        try:
            start = _clock()
            out = own_call(run, args, kwargs)
            ns = _clock() - start
        except Exception as error:
            self.buffers.drop(buffer)
            before = ((buffer.before, *args[1:]), kwargs)
            if not may_run_again(error, call, before):
                raise
            buffer = None
            # Local names would hold the buffer while the program's call runs again.
            del before, work  # free the copies
        if buffer is None:
            return self._verdicts.run_without_copies(call)
        own = CallRun(args, kwargs, out, ns)
        on_target = call.role.on_target
        other = self._ref if on_target else self._target
        try:
            # The values from before stay in the buffer: the judge needs them if the results differ.
            move(work_address, buffer.before_at, n_bytes)
            other_args = (work, *args[1:])
            start = _clock()
            again = (
                with_isolated_warnings(run, (), other_args, kwargs)
                if other.plain
                else other.call(plan, other_args, kwargs)
            )
            other_ns = _clock() - start
            if (
                # A call may resize either tensor or give it other memory: the former may have been freed.
                first.data_ptr() == address
                and work.data_ptr() == work_address
                and first.shape == shape == work.shape
                and not differs(address, work_address, n_bytes)
                and ns + other_ns < WORTH_TIMING_NS
                and self._no_drift
                and context <= self._effects.newest
                and plan.index not in self._watched
            ):
                if on_target:
                    self._recorder.match(context, other_ns / 1000, ns / 1000)
                else:
                    self._recorder.match(context, ns / 1000, other_ns / 1000)
                return own
            self.record_in_place(call, own, CallRun(other_args, kwargs, again, other_ns), buffer)
        except Exception as error:
            self.buffers.drop(buffer)  # the replay may have given it other memory
            self._verdicts.failed(call, error)
        return own

    def record_in_place(self, call: Call, own: CallRun, replayed: CallRun, buffer: CopyBuffer) -> None:
        """Record a call of `in_place` that took long, is new, or whose results are not equal."""
        first, work = own.args[0], buffer.work
        if (
            work.data_ptr() == buffer.work_at
            and _is_apart(first, own.args)
            and self._verdicts.record_close(call, own, replayed, (first,), (work,))
        ):
            return
        self.buffers.drop(buffer)  # it is needed longer than this call takes
        pristine = ((buffer.before, *own.args[1:]), own.kwargs)
        equal = plainly_equal(first, work) or self._comparator.equal(first, work)
        self._verdicts.record(call, pristine, own, replayed, equal=equal)


class SameDevicePath:
    """Observes calls whose device is both target and reference.

    Attributes:
        fast: The fast path of plain calls.
        verdicts: Records calls.
    """

    def __init__(self, context: ReplayContext) -> None:
        self._context = context
        self._recorder = context.recorder
        self._max_bytes = context.config.max_bytes
        self._drift = context.drift
        self._comparator = context.comparator
        self.verdicts = SameDeviceVerdicts(context)
        self.fast = FastPath(context, self.verdicts)
        self._is_timed = context.timeline is not None

    def observe(self, call: Call) -> CallRun:
        """Run a call for the program, again on the other platform, and record the verdict."""
        role = call.role
        # Chains that know an input need all of them laid out before the call, and on a third device both platforms
        # replay.
        if (self._drift is None or not self._drift.must_follow(call)) and (role.on_target or role.on_ref):
            kind, ran = call.plan.kind, None
            if self._is_timed:  # the fast path does not note when its runs begin
                pass
            elif kind is _FUNCTIONAL:
                ran = self.fast.functional(call)
            elif kind is _IN_PLACE:
                ran = self.fast.in_place(call)
            # None means that nothing was done yet: the call may still take another path.
            if ran is None and kind is not _SPECIAL:
                ran = self._observe_several(call)
            if ran is not None:
                return ran
        return self._observe_general(call)

    def _copied(self, call: Call, arguments: Arguments) -> Arguments:
        """Arguments of a call, with copies in place of those that it writes to."""
        if not call.plan.mutated:
            return arguments
        copied: Arguments = with_isolated_warnings(copy_mutated, (), (call.plan, *arguments, self._max_bytes))
        return copied

    def _observe_several(self, call: Call) -> CallRun | None:
        """Observe a call with several results, lists, numbers, or any arguments that are written to; nothing random.

        Returns:
            The program's own run; None where nothing was done: the general path records why.
        """
        plan = call.plan
        try:
            pristine: Arguments | None = self._copied(call, (call.args, call.kwargs))
        except Exception:
            return None
        try:
            own = run_own(call.plan, call.args, call.kwargs)
        except Exception as error:
            # A call that writes to nothing has no copies whose memory could help.
            if not plan.mutated or not may_run_again(error, call, pristine):
                raise
            pristine = None  # free the copies
        if pristine is None:
            return self.verdicts.run_without_copies(call)
        other = self._context.ref if call.role.on_target else self._context.target
        try:
            self._recorder.context(call)
            if own.ns * BYTES_PER_NS > self._max_bytes and self.verdicts.is_too_large(call, own.out, self._max_bytes):
                return own
            # The judge gets `pristine`; the replay writes to copies of it.
            inputs = self._copied(call, pristine)
            start = _clock()
            again = with_isolated_warnings(plan.run, (), *inputs) if other.plain else other.call(plan, *inputs)
            replayed = CallRun(*inputs, again, _clock() - start, None, start)
            self.record_several(call, pristine, own, replayed)
        except Exception as error:
            self.verdicts.failed(call, error)
        return own

    def record_several(self, call: Call, pristine: Arguments, own: CallRun, replayed: CallRun) -> None:
        """Compare and record a call whose two runs are over."""
        equal = self._equal(own.values(call.plan), replayed.values(call.plan))
        self.verdicts.record(call, pristine, own, replayed, equal=equal)

    def _equal(self, actual: list[Value], expected: list[Value]) -> bool:
        """Whether all results have the same bits and strides; False also where a kind cannot be compared."""
        try:
            return self._comparator.all_equal(actual, expected)
        except Uncomparable:  # the judge says so
            return False

    def _observe_general(self, call: Call) -> CallRun:
        """Observe any call: several results, lists, random values, hidden mutations, drift, two replays."""
        context, plan, role = self._context, call.plan, call.role
        copies, rng = InputCopies(), None
        try:
            self._recorder.context(call)
            if not context.may_replay(plan):
                copies.problem = CUSTOM
            else:
                if plan.mutated:
                    # Before the call: it writes to its arguments.
                    copies.pristine = self._copied(call, (call.args, call.kwargs))
                # A custom operator may draw without a tag that says so.
                if plan.action is Action.RANDOM or plan.custom:
                    generator = _generator(role.device, call.kwargs)
                    rng = (generator, generator.get_state())
        except OverBudget:
            copies.problem = BUDGET
        except Exception as error:
            tensors = call.tensors
            copies.pristine, copies.problem = (
                None,
                context.internal_error("copying the inputs of", plan, error, tensors),
            )
        drift = context.drift
        # Until a chain has a value of its own, it would run what is replayed.
        follows = drift is not None and (drift.must_follow(call) or not (role.on_target or role.on_ref))
        if drift is not None and follows:
            with_isolated_warnings(drift.take_inputs, (), (call,))
        # Without the restore, a second run after a lack of memory would draw other numbers.
        own = run_before_copies(run_own, call, copies, None if rng is None else lambda: _restore(rng))
        if copies.problem is None and are_too_large(plan, own.out, self._max_bytes):
            copies.problem = TOO_LARGE
        if copies.problem is not None:
            context.unverified(call, copies.problem, own)
            return own
        pristine = copies.pristine or (call.args, call.kwargs)
        try:
            # The program's stream has moved once; the replays must not move it again.
            after = rng[0].get_state() if rng is not None else None

            def again(executor: Executor) -> CallRun:
                if rng is not None:
                    _restore(rng)
                return executor.run(plan, *self._copied(call, pristine))

            try:
                actual = own if role.on_target else again(context.target)
                expected = own if role.on_ref else again(context.ref)
                drifted = None
                if drift is not None and not follows:
                    drifted = with_isolated_warnings(
                        drift.diverge, (), (call, own, expected if role.on_target else actual)
                    )
                elif drift is not None:
                    drifted = with_isolated_warnings(drift.after, (), (plan, own, rng))
            finally:
                if rng is not None and after is not None:
                    rng[0].set_state(after)
            runs = (call, pristine, actual, expected, drifted)
            with_isolated_warnings(context.comparator.compare_and_record, (), runs, {"shared": True, "rng": rng})
        except Exception as error:
            context.failed("replaying", call, error, own.out)
        return own


def _is_apart(first: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether it is clear that no other argument has the memory of the first, by another storage."""
    begin = first.data_ptr()
    end = begin + first.nbytes
    for a in args[1:]:
        if type(a) in _PLAIN:
            # Tensors of sparse layouts and of oneDNN have no address.
            if a.layout is not torch.strided or not a.is_contiguous():
                return False
            at = a.data_ptr()
            if at < end and begin < at + a.nbytes:
                return False
        elif type(a) not in _NUMBERS:
            return False
    return True


def _restore(rng: RngState) -> None:
    generator, state = rng
    generator.set_state(state)


def _generator(device: torch.device, kwargs: dict[str, Any]) -> torch.Generator:
    given = kwargs.get("generator")
    if isinstance(given, torch.Generator):
        return given
    if device.type == "cpu":
        return torch.default_generator
    # Each device index has a generator of its own.
    generators: Any = getattr(torch, device.type).default_generators
    generator: torch.Generator = generators[device.index or 0]
    return generator
