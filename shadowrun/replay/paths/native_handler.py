"""The C handler of plain calls on the CPU: what it is taught of each operator, and what it leaves to Python.

See native/compare_handler.c.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from shadowrun.intercept import torchapi
from shadowrun.intercept.plan import OpKind
from shadowrun.intercept.torchapi import with_isolated_warnings
from shadowrun.native import core
from shadowrun.native.tensors import plainly_equal
from shadowrun.replay.call import OVER_BUDGET, Call, CallRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.attribution import Attribution, Origin
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.call import Role
    from shadowrun.replay.comparator import Comparator
    from shadowrun.replay.context import RunSink
    from shadowrun.replay.drift import Drift
    from shadowrun.replay.input_copies import CopyBuffer
    from shadowrun.replay.paths.same_device import SameDevicePath
    from shadowrun.schedule.budget import Budget
    from shadowrun.schedule.selection import Selection

__all__ = ["NativeHandler", "PassThrough"]


class NativeHandler:
    """Switches the C handler, which does nothing until then.

    Args:
        recorder: Where it records.
        selection: What the program wants compared.
        attribution: Finds where calls come from.
        comparator: Knows which operators are watched.
        same_device: The path that the C handler follows, in Python.
        role: What the CPU means.
        pass_through: Decides under an overhead budget which calls are passed on; all others are left to Python.

    Attributes:
        handler: The C handler; None without the part in C.
    """

    def __init__(
        self,
        recorder: RunSink,
        selection: Selection,
        attribution: Attribution,
        comparator: Comparator,
        same_device: SameDevicePath,
        role: Role,
        pass_through: PassThrough | None = None,
    ) -> None:
        # The C handler leaves every call that is not a plain match to these, so Python alone decides verdicts.
        self._path, self._fast = same_device, same_device.fast
        self._role = role
        self._passes = pass_through is not None
        self.handler: Any = None
        # Each of the three may be missing with some torch version: all calls then go through Python.
        if core is None or plainly_equal is None or attribution.native_origins is None:
            return
        self.handler = core.CompareHandler(
            n_modes_below=torchapi.n_modes_below,
            function_mode_on=torchapi.has_function_mode,
            profiler_on=torchapi.profiling,
            origins=attribution.native_origins,
            selection=selection if pass_through is None else pass_through,
            device=role.device,
            watched=comparator.watched,
            bounds=comparator.bounds.native,
            # C and Python use the same buffers, so the bound of 4 MiB holds for both together.
            buffers=self._fast.buffers.by_form,
            make_buffer=self._fast.buffers.make,
            replay=_replay,
            shares_memory=torchapi.shares_memory,
            conclude=self._conclude,
            failed=self._failed,
            unrecorded=self._unrecorded,
            too_large=self._is_too_large,
            acquire=None,
            release=None,
            waited_for=None,
            **recorder.native_parts(),
        )
        recorder.collect_from(self.handler.collect)
        self.handler.slow_ratio = comparator.slow_calls.ratio
        self.handler.max_bytes = self._fast.max_bytes
        self.handler.on_target = role.on_target

    @property
    def own_ns(self) -> int:
        """Nanoseconds spent in it, without the program's own operators."""
        return 0 if self.handler is None else self.handler.own_ns

    def guard(self, lock: Any, gate: Any) -> None:
        """Have it hold the lock for the length of a call, unless another thread waits at the gate."""
        if self.handler is not None:
            # The C handler takes the same lock as Python: settings and random stream belong to the process.
            self.handler.guard(lock.acquire, lock.release, gate.locked)

    def compare(self) -> None:
        """Have calls compared."""
        if core is not None and self.handler is not None:
            self.handler.state = core.COMPARING
            if os.environ.get("SHADOWRUN_KEEP_HEAP") != "0":  # see native/module.c for what it costs and saves
                core.keep_heap()

    def follow(self, drift: Drift) -> None:
        """Compare calls only while the chains have the program's values."""
        if self.handler is not None:
            self.handler.keeps_drift = True
            drift.notify(self._is_apart)

    def _is_apart(self, has_diverged: bool) -> None:
        self.handler.has_twins = has_diverged

    def pass_on(self) -> None:
        """Have calls passed on that the overhead budget leaves out."""
        if core is not None and self.handler is not None:
            self.handler.state = core.COMPARING

    def record(self) -> None:
        """Have calls recorded only."""
        if core is not None and self.handler is not None:
            self.handler.state = core.RECORDING

    def stop(self) -> None:
        """Leave all calls to Python."""
        if core is not None and self.handler is not None:
            # Other threads may still have a mode that calls the handler.
            self.handler.state = core.OFF

    def add_operator(self, plan: OpPlan) -> None:
        """Teach the C handler how calls of an operator are treated.

        `OpPlan.kind` decides. The handler leaves to Python what it has no code for: lists and keyword-only arguments
        that are written to, and calls that must not run under its lock, since custom operators may wait for another
        thread.
        """
        if core is None or self.handler is None:
            return
        kind = plan.kind
        # Composite operators are split in Python under inference mode.
        if plan.composite or (plan.custom and kind is not OpKind.PASS):
            return
        # From a tensor on the CPU, such a call may make one on the target, whose calls must be seen from then on.
        if self._passes and plan.has_device:
            return
        written = tuple(a.position for a in plan.mutated if not (a.is_list or a.kwarg_only))
        # Where calls are only passed on, Python does whatever C does not pass on.
        routes = (
            {}
            if self._passes
            else {
                OpKind.NO_VALUES: core.SILENT,
                OpKind.FUNCTIONAL: core.FRESH,
                OpKind.IN_PLACE: core.IN_PLACE,
                OpKind.SEVERAL: core.SEVERAL,
            }
        )
        route = core.PASSING if kind is OpKind.PASS else routes.get(kind, core.LONG)
        # C compares every result, so one without meaning would be a false difference.
        simple = not plan.uninitialised and len(written) == len(plan.mutated) <= core.MAX_COPIED
        if kind is OpKind.SEVERAL and not simple:
            route = core.LONG
        skipped = plan.name, "" if kind is OpKind.PASS else self._role.device_name, plan.reason
        copies = route in (core.IN_PLACE, core.SEVERAL)
        self.handler.add_operator(plan.func, plan, plan.run, plan.index, skipped, route, written if copies else ())

    def _call(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], context: int) -> Call:
        return Call(plan, args, kwargs, self._role, context=context)

    def _conclude(
        self,
        plan: OpPlan,
        context: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        again: Any,
        times: tuple[int, int],
        buffers: tuple[CopyBuffer | None, ...],
        other_args: tuple[Any, ...],
    ) -> None:
        """A call was slow, is new, or its results are not plainly equal."""
        call = self._call(plan, args, kwargs, context)
        own, replayed = CallRun(args, kwargs, out, times[0]), CallRun(other_args, kwargs, again, times[1])
        if plan.kind is OpKind.SEVERAL:
            before = list(args)
            for argument, buffer in zip(plan.mutated, buffers, strict=True):
                if buffer is not None:
                    before[argument.position] = buffer.before
                    self._fast.buffers.drop(buffer)  # it is needed longer than this call takes
            self._path.record_several(call, (tuple(before), kwargs), own, replayed)
        elif buffers and buffers[0] is not None:
            self._fast.record_in_place(call, own, replayed, buffers[0])
        else:
            # `equal=False` only means that C has not shown it: Python compares again.
            self._fast.record_functional(call, own, replayed, equal=False)

    def _is_too_large(self, plan: OpPlan, context: int, out: Any) -> bool:
        """Whether the results of a call take too much memory to be computed twice; records that."""
        return self._path.verdicts.is_too_large(self._call(plan, (), {}, context), out, self._fast.max_bytes)

    def _failed(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin, error: Exception
    ) -> None:
        if plan.mutated:
            self._fast.buffers.clear()  # the replay may have given one other memory
        self._path.verdicts.failed(Call(plan, args, kwargs, self._role, origin), error)

    def _unrecorded(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Origin, error: Exception
    ) -> None:
        self._path.verdicts.not_recorded(Call(plan, args, kwargs, self._role, origin), error)


def _replay(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator once more: its warnings come at this line."""
    # Called from C without a Python frame, the warnings would come at the program's line.
    return with_isolated_warnings(run, (), args, kwargs)


# Has the C handler pass on the calls that an overhead budget leaves out.
#
# A watched step passes on most of its calls, since it may compare only a few. Each takes 11 µs more through Python, and
# 7 µs through the C handler, of which 5.5 µs are torch's own for any mode (MLP of 0.34 ms).

_clock = time.perf_counter_ns
# Reading a member of an enum takes ten times as long as a global name.
_NO_VALUES = OpKind.NO_VALUES
_CHARGE_EVERY = 16
_MAX_PASSED_NS = 10_000


class PassThrough:
    """What the C handler asks for each call in place of a `Selection`: whether the call is passed on.

    Args:
        budget: The overhead budget.
        selection: What the program wants compared.
        own_ns: Time that the C handler has spent so far.
        lock: The replayer's lock, which is another one after a fork.

    Attributes:
        everything: False, so that the C handler asks.
    """

    # native/dispatch.h reads the slot `everything`.
    __slots__ = ("_asked", "_budget", "_charged_ns", "_lock", "_n_passed", "_own_ns", "_selection", "everything")

    def __init__(
        self, budget: Budget, selection: Selection, own_ns: Callable[[], int], lock: Callable[[], Any]
    ) -> None:
        self.everything = False
        self._budget = budget
        self._selection = selection
        self._own_ns = own_ns
        self._lock = lock
        self._charged_ns = 0
        self._n_passed = 0
        self._asked = False

    def unwanted(self, plan: OpPlan) -> str:
        """Why the C handler passes this call on; empty where it leaves the call to Python, which may compare it."""
        # The C handler takes the lock after it has asked, and another thread may be in the budget.
        lock = self._lock()
        if not lock.acquire(False):
            return ""
        try:
            return self._reason(plan)
        finally:
            lock.release()

    def _reason(self, plan: OpPlan) -> str:
        budget, selection = self._budget, self._selection
        reason = "" if selection.everything else selection.unwanted(plan)
        if plan.kind is _NO_VALUES:
            budget.pass_view()
            self._n_passed += 1
            return reason or plan.reason
        # The clock of the budget may lag by a few calls.
        if self._n_passed >= _CHARGE_EVERY:
            self.charge()
        if budget.exhausted(_clock()) or reason:
            self._n_passed += 1
            return reason or OVER_BUDGET
        self.charge()
        self._asked = True
        return ""

    def exhausted(self, now: int) -> bool:
        """`Budget.exhausted` for a call that Python got, and that the budget may have been asked about already."""
        if self._asked:
            self._asked = False
            return False
        return self._budget.exhausted(now)

    def charge(self) -> None:
        """Count the time of the calls that were passed on since the last time."""
        n, self._n_passed = self._n_passed, 0
        if n:
            own_ns = self._own_ns()
            # The C handler's clock runs on while the thread waits for a processor: that is no overhead.
            self._budget.spend_on_passed(n, min(own_ns - self._charged_ns, n * _MAX_PASSED_NS))
            self._charged_ns = own_ns
