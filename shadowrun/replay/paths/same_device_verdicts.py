"""Verdicts on calls that ran twice on one device, and on those that could not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shadowrun.intercept.torchapi import with_isolated_warnings
from shadowrun.replay.call import Call, CallRun, run_own
from shadowrun.replay.context import NO_DRIFT, NO_ERROR, ONE_MEMORY, ReplayContext
from shadowrun.replay.copies import overlaps_unnoticed
from shadowrun.replay.input_copies import NO_ROOM, TOO_LARGE, are_too_large

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.operators.case import Value
    from shadowrun.replay.copies import Arguments

__all__ = ["SameDeviceVerdicts"]


class SameDeviceVerdicts:
    """Records calls of this path: those whose two runs are over, and those that could not run twice."""

    def __init__(self, context: ReplayContext) -> None:
        self._context = context

    def record(self, call: Call, pristine: Arguments, own: CallRun, replayed: CallRun, *, equal: bool) -> None:
        """Record a call.

        Args:
            call: The call, with its context.
            pristine: Its inputs as they were before.
            own: The program's own run.
            replayed: The run on the other platform.
            equal: All results have the same bits and strides.
        """
        plan = call.plan
        actual, expected = (own, replayed) if call.role.on_target else (replayed, own)
        if self._context.timeline is not None:
            self._context.timeline.ran(actual, expected)
        comparator = self._context.comparator
        drifted = self._drifted(call, own, replayed, equal=equal)
        # The first calls of a context are looked at for effects on memory, however equal their results.
        new = comparator.effects.may_be_due(plan, call.context)
        if equal and not new and not comparator.slow_calls.is_slow(actual.ns, expected.ns):
            if plan.index in comparator.suspects:
                # The judge recognises a stale buffer by the last right results.
                comparator.remember_if_suspect(plan, own.values(plan))
            self._context.recorder.match(call.context, expected.ns / 1000, actual.ns / 1000, drifted)
            return
        # Two tensors over one numpy array: the copy did not follow the write, so the difference is ours.
        if not equal and plan.mutated and with_isolated_warnings(overlaps_unnoticed, (), (plan, own.args, own.kwargs)):
            self._context.unverified(call, ONE_MEMORY, own)
            return
        # A slow call runs again and is compared again; a new one is checked for effects on memory.
        runs = (call, pristine, actual, expected, None if self._context.drift is None else drifted)
        with_isolated_warnings(comparator.compare_and_record, (), runs, {"shared": True})

    def _drifted(self, call: Call, own: CallRun, replayed: CallRun, *, equal: bool) -> tuple[float, float]:
        """Accumulated error of a call whose inputs had no twin."""
        drift = self._context.drift
        if drift is None:
            return NO_DRIFT
        if equal and not drift.has_diverged:
            return NO_ERROR
        found: tuple[float, float] = with_isolated_warnings(drift.diverge, (), (call, own, replayed))
        return found

    def record_close(
        self, call: Call, own: CallRun, replayed: CallRun, mine: Sequence[Value], others: Sequence[Value]
    ) -> bool:
        """Record a call whose results differ within what its context passes; False where the judge has to look.

        Args:
            call: The call, with its context.
            own: The program's own run.
            replayed: The run on the other platform.
            mine: Results of the program's own run.
            others: Those of the replay.
        """
        comparator, plan = self._context.comparator, call.plan
        bounds = comparator.bounds.by_context.get(call.context)
        if bounds is None or comparator.effects.may_be_due(plan, call.context) or plan.index in comparator.watched:
            return False
        on_target = call.role.on_target
        actual, expected = (own, replayed) if on_target else (replayed, own)
        if comparator.slow_calls.is_slow(actual.ns, expected.ns):
            return False
        results = (mine, others) if on_target else (others, mine)
        close = bounds.judge(*results)
        if close is None:
            return False
        comparator.teach_native(bounds, results[0], *close)
        drift = self._drifted(call, own, replayed, equal=False)
        times = expected.ns / 1000, actual.ns / 1000
        self._context.recorder.verdict(call.context, *close, times=times, drift=drift)
        return True

    def run_without_copies(self, call: Call) -> CallRun:
        """Run a call for the program again that ran out of memory at first; its copies have been freed."""
        own = run_own(call.plan, call.args, call.kwargs)
        try:
            self._context.recorder.context(call)
            self._context.unverified(call, NO_ROOM)
        except Exception as error:
            self._context.failed("replaying", call, error)
        return own

    def is_too_large(self, call: Call, out: Any, max_bytes: int) -> bool:
        """Whether the results take too much memory to be computed twice; records that."""
        if not are_too_large(call.plan, out, max_bytes):
            return False
        self._context.unverified(call, TOO_LARGE)
        return True

    def not_recorded(self, call: Call, error: Exception) -> None:
        """Count a call that was only to be recorded, and could not be."""
        verdict = self._context.internal_error("recording", call.plan, error, call.tensors)
        self._context.unverified(Call(call.plan, (), {}, call.role), verdict)

    def failed(self, call: Call, error: Exception) -> None:
        """Record that something of shadowrun failed in a replay."""
        self._context.failed("replaying", call, error)
