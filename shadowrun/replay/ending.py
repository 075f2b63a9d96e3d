"""What becomes of a call that ran twice on one device: a match, or a case for the judge."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shadowrun.intercept.own_call import own_call
from shadowrun.intercept.torchapi import unheard
from shadowrun.replay import results
from shadowrun.replay.mirror import overlaps_unnoticed
from shadowrun.replay.room import NO_ROOM, TOO_LARGE
from shadowrun.replay.stage import ONE_MEMORY

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Place
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.execution import Ran
    from shadowrun.replay.stage import Role, Stage

__all__ = ["WORTH_TIMING_NS", "Ending"]

WORTH_TIMING_NS = 1_000_000
"""Two runs that took less together are never slow."""


class Ending:
    """Records calls whose two runs are over."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def end(
        self, plan: OpPlan, context: int, pristine: Any, mine: Ran, theirs: Ran, role: Role, *, equal: bool
    ) -> None:
        """Record a call.

        Args:
            plan: The operator.
            context: Number of the call's context.
            pristine: Its inputs as they were before.
            mine: The user's own run.
            theirs: That on the other platform.
            role: What the device means.
            equal: All results have the same bits and strides.
        """
        actual, expected = (mine, theirs) if role.on_target else (theirs, mine)
        comparing = self._stage.comparing
        new = comparing.effects.concerns(plan, context)
        if equal and not new and not comparing.is_slow(actual.ns, expected.ns):
            if plan.index in comparing.suspects:
                comparing.remember_if_suspect(plan, results.values(plan, mine.args, mine.kwargs, mine.out))
            self._stage.recorder.match(context, expected.ns / 1000, actual.ns / 1000)
            return
        if not equal and plan.mutated and unheard(overlaps_unnoticed, (), (plan, mine.args, mine.kwargs)):
            self._stage.unverified(context, ONE_MEMORY, plan, None)
            return
        # A slow one is run again, and what comes back is compared again; a new one is looked at for effects on memory.
        unheard(comparing.conclude, (), (plan, context, pristine, actual, expected, None), {"shared": True})

    def without_copies(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place
    ) -> tuple[Any, int]:
        """Run a call for the user again, whose first run had no room beside the copies of its inputs."""
        start = time.perf_counter_ns()
        out = own_call(plan.run, args, kwargs)
        ns = time.perf_counter_ns() - start
        try:
            context = self._stage.recorder.context(plan, args, kwargs, place, role.device)
            self._stage.unverified(context, NO_ROOM, plan, None)
        except Exception as error:
            self.fail(plan, args, kwargs, role, place, error)
        return out, ns

    def too_large(self, plan: OpPlan, context: int) -> None:
        """Record a call beside whose results there shall be no others."""
        self._stage.unverified(context, TOO_LARGE, plan, None)

    def fail(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place, error: Exception
    ) -> None:
        """Record that the call could not be compared, since something of ours failed."""
        verdict = self._stage.harness("replaying", plan, error, (*args, *kwargs.values()))
        try:
            context = self._stage.recorder.context(plan, args, kwargs, place, role.device)
        except Exception:
            context = -1
        self._stage.unverified(context, verdict, plan, None)

    def unrecorded(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> None:
        """Record that a call, which was not to be compared, could not be recorded either."""
        verdict = self._stage.harness("recording", plan, error, (*args, *kwargs.values()))
        self._stage.unverified(-1, verdict, plan, None)
