"""Calls on a device that both platforms share (the CPU under other settings).

Inputs are used as they are; only what the call writes to is copied. The plain calls, nearly all of a training
step, take a short way (`short.py`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.own_call import own_call
from shadowrun.intercept.torchapi import unheard
from shadowrun.numerics.bits import Uncomparable
from shadowrun.replay import results
from shadowrun.replay.ending import Ending
from shadowrun.replay.execution import Executor, Ran
from shadowrun.replay.mirror import OverBudget, copy_mutated
from shadowrun.replay.room import BYTES_PER_NS, NO_ROOM, TOO_LARGE, are_too_large, may_run_again
from shadowrun.replay.short import ShortWay
from shadowrun.replay.stage import BUDGET, CUSTOM, Role, Stage

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Place
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.case import Value
    from shadowrun.replay.mirror import Arguments
    from shadowrun.types import Verdict

__all__ = ["SharedPath"]

_clock = time.perf_counter_ns


class SharedPath:
    """Observes calls whose device is both target and reference.

    Attributes:
        short: The way of plain calls.
        ending: Records what became of a call.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._recorder = stage.recorder
        self._max_bytes = stage.config.max_bytes
        self._no_drift = stage.drift is None
        self._comparing = stage.comparing
        self.ending = Ending(stage)
        self.short = ShortWay(stage, self.ending)

    def observe(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place
    ) -> tuple[Any, int]:
        """Run a call for the user, again on the other platform, and record the verdict."""
        if self._no_drift and (role.on_target or role.on_ref):
            if plan.short:
                way = self.short.in_place if plan.mutated else self.short.fresh
                done = way(plan, args, kwargs, role, place)
                if done is not None:
                    return done
            if not (plan.random or plan.silent or plan.custom):
                done = self._observe_several(plan, args, kwargs, role, place)
                if done is not None:
                    return done
        ran = self._observe_any(plan, args, kwargs, role, place)
        return ran.out, ran.ns

    def _pristine(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Inputs that the call does not write to; None where the long way must say why there are none."""
        if not plan.mutated:
            return args, kwargs
        try:
            copied: Arguments = unheard(copy_mutated, (), (plan, args, kwargs, self._max_bytes))
        except Exception:
            return None
        return copied

    def _observe_several(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place
    ) -> tuple[Any, int] | None:
        """Several results, lists, numbers, any arguments that are written to; nothing drawn. None: nothing was done."""
        pristine = self._pristine(plan, args, kwargs)
        if pristine is None:
            return None
        try:
            start = _clock()
            out = own_call(plan.run, args, kwargs)
            ns = _clock() - start
        except Exception as error:
            if not plan.mutated or not may_run_again(error, plan, args, kwargs, pristine):
                raise
            pristine = None  # let go of the copies
        if pristine is None:
            return self.ending.without_copies(plan, args, kwargs, role, place)
        other = self._stage.ref if role.on_target else self._stage.target
        try:
            context = self._recorder.context(plan, args, kwargs, place, role.device)
            if ns * BYTES_PER_NS > self._max_bytes and are_too_large(plan, out, self._max_bytes):
                self._stage.unverified(context, TOO_LARGE, plan, None)
                return out, ns
            again = pristine
            if plan.mutated:
                again = unheard(copy_mutated, (), (plan, *pristine, self._max_bytes))
            start = _clock()
            theirs = unheard(plan.run, (), *again) if other.plain else other.call(plan, *again)
            other_ns = _clock() - start
            mine, replayed = Ran(args, kwargs, out, ns), Ran(*again, theirs, other_ns)
            self.end_several(plan, context, pristine, mine, replayed, role)
        except Exception as error:
            self.ending.fail(plan, args, kwargs, role, place, error)
        return out, ns

    def end_several(self, plan: OpPlan, context: int, pristine: Arguments, mine: Ran, theirs: Ran, role: Role) -> None:
        """Compare and record a call whose two runs are over."""
        actual = results.values(plan, mine.args, mine.kwargs, mine.out)
        equal = self._equal(actual, results.values(plan, theirs.args, theirs.kwargs, theirs.out))
        self.ending.end(plan, context, pristine, mine, theirs, role, equal=equal)

    def _equal(self, actual: list[Value], expected: list[Value]) -> bool:
        """Whether all results have the same bits and strides; False also where a kind cannot be compared."""
        try:
            return self._comparing.all_equal(actual, expected)
        except Uncomparable:  # the judge says so
            return False

    def _observe_any(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place
    ) -> Ran:
        """Any call: several results, lists, random draws, hidden mutations, drift, both platforms replayed."""
        stage = self._stage
        problem: Verdict | None = None
        pristine = (args, kwargs)
        generator = state = None
        context = -1
        try:
            context = self._recorder.context(plan, args, kwargs, place, role.device)
            if plan.custom and not stage.selection.ops_named:
                problem = CUSTOM
            elif plan.mutated:
                pristine = unheard(copy_mutated, (), (plan, args, kwargs, self._max_bytes))
            if (plan.random or plan.custom) and problem is None:
                generator = _generator(role.device, kwargs)
                state = generator.get_state()
        except OverBudget:
            problem = BUDGET
        except Exception as error:
            problem = stage.harness("copying the inputs of", plan, error, (*args, *kwargs.values()))
        drift = stage.drift
        if drift is not None:
            unheard(drift.before, (), (role, args, kwargs))
        while True:
            try:
                start = _clock()
                out = own_call(plan.run, args, kwargs)
                own = Ran(args, kwargs, out, _clock() - start)
                break
            except Exception as error:
                held = pristine if plan.mutated and problem is None else None
                if not may_run_again(error, plan, args, kwargs, held):
                    raise
                pristine, held, problem = (args, kwargs), None, NO_ROOM
            if generator is not None and state is not None:
                generator.set_state(state)
        if problem is None and are_too_large(plan, out, self._max_bytes):
            problem = TOO_LARGE
        if problem is not None:
            stage.unverified(context, problem, plan, own)
            return own
        try:
            after = generator.get_state() if generator is not None else None

            def again(executor: Executor) -> Ran:
                if generator is not None and state is not None:
                    generator.set_state(state)
                if not plan.mutated:
                    return executor.run(plan, args, kwargs)
                return executor.run(plan, *unheard(copy_mutated, (), (plan, *pristine, self._max_bytes)))

            try:
                actual = own if role.on_target else again(stage.target)
                expected = own if role.on_ref else again(stage.ref)
                drifted = None
                if drift is not None:
                    drifted = unheard(drift.after, (), (plan, args, kwargs, out, generator, state))
            finally:
                if generator is not None and after is not None:
                    generator.set_state(after)
            rng = (generator, state) if generator is not None and state is not None else None
            concluded = (plan, context, pristine, actual, expected, drifted)
            unheard(stage.comparing.conclude, (), concluded, {"shared": True, "rng": rng})
        except Exception as error:
            special = stage.harness("replaying", plan, error, (*args, *kwargs.values(), out))
            stage.unverified(context, special, plan, None)
        return own


def _generator(device: torch.device, kwargs: dict[str, Any]) -> torch.Generator:
    given = kwargs.get("generator")
    if isinstance(given, torch.Generator):
        return given
    if device.type == "cpu":
        return torch.default_generator
    generators: Any = getattr(torch, device.type).default_generators
    generator: torch.Generator = generators[device.index or 0]
    return generator
