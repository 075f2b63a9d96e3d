"""Calls on a device of its own: all inputs are mirrored to the CPU, and run from there on the other platform.

The mirror is also what the judge, the oracle and a fallback work on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.own_call import own_call
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.intercept.torchapi import shares_memory, unheard
from shadowrun.replay.aside import AsidePath
from shadowrun.replay.counterparts import for_reference
from shadowrun.replay.execution import Ran
from shadowrun.replay.mirror import OverBudget, as_given, mirror, written_to
from shadowrun.replay.refused import reference_raised, refused
from shadowrun.replay.room import NO_ROOM, TOO_LARGE, Draws, are_too_large, may_run_again
from shadowrun.replay.stage import BUDGET, CUSTOM, Role, Stage
from shadowrun.replay.target_failure import TargetFailure
from shadowrun.replay.views import ViewCheck
from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Place

__all__ = ["AcrossPath", "is_certain"]

_CPU = torch.device("cpu")
_clock = time.perf_counter_ns

Streams = tuple[torch.Tensor, torch.Tensor | None]
"""States that a random call began with: the CPU's own stream, and the generator's that was passed."""


class AcrossPath:
    """Observes calls on the target (replayed on the reference), on the reference, or on a third device."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._target = stage.target
        self._ref = stage.ref
        self._max_bytes = stage.config.max_bytes
        self.failure = TargetFailure(stage.config, stage.target, stage.ref, stage.recorder)
        # The target's own process is a CPU too: from the same state it may draw the same numbers.
        self._hands_over = stage.target.platform.remote is not None
        functional = stage.target.platform.functionalizes or stage.ref.platform.functionalizes
        self._views = ViewCheck(stage.recorder, strides=not functional)
        self._on_target = self._on_ref = None
        if stage.target.platform.functionalizes:
            self._on_target = AsidePath(stage, stage.target, self.failure.attempt, self._reference)
        if stage.ref.platform.functionalizes:
            self._on_ref = AsidePath(stage, stage.ref, self.failure.attempt, self._reference)

    def observe(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place, reason: str
    ) -> Ran:
        """Run a call for the user and elsewhere, and record the verdict; `reason` is set where it is not compared."""
        recorder = self._stage.recorder
        if role.device.type == "meta":
            recorder.skip(plan.name, "meta", "meta tensors: no values")
            return _plainly(plan, args, kwargs)
        problem: Verdict | None = None
        pristine: Any = None
        aside = self._on_target if role.on_target else self._on_ref if role.on_ref else None
        if role.on_target and aside is None:  # a graph would read later what the program may have written to by then
            plan = as_given(plan, args, kwargs)
        # A call that is not compared gives values to those that are.
        follows = aside is not None and self._stage.config.budget is None
        try:
            if plan.custom and not self._stage.selection.ops_named:
                problem = CUSTOM
            elif aside is not None and (follows or not reason):
                pristine = unheard(aside.before, (), (plan, args, kwargs))
            elif not reason:
                pristine = unheard(self._mirrored, (), (plan, args, kwargs))
        except OverBudget:
            problem = BUDGET
        except Exception as error:
            problem = Verdict(
                Status.UNVERIFIED, None, f"inputs cannot be copied: {type(error).__name__}", str(error)[:300]
            )
        streams = (
            _streams(kwargs) if self._hands_over and plan.action is Action.RANDOM and role.device == _CPU else None
        )
        drift = self._stage.drift if not reason and aside is None else None
        if drift is not None:
            unheard(drift.before, (), (role, args, kwargs))
        draws = None
        if plan.action is Action.RANDOM and pristine is not None:
            draws = Draws(self._target.platform if role.on_target else None, kwargs)
        runs = self._target.run_user if role.on_target else self._ref.run_user if role.on_ref else _plainly
        while True:
            try:
                own = runs(plan, args, kwargs)
                break
            except Exception as error:
                if aside is None and may_run_again(error, plan, args, kwargs, pristine):
                    problem, pristine = NO_ROOM, None
                elif not role.on_target:
                    raise
                else:
                    answer = self.failure.answer(plan, args, kwargs, pristine, role.device, place, error)
                    if answer is None:
                        raise
                    if drift is not None:
                        drift.reseed(plan, args, kwargs, answer.out)
                    if aside is not None:
                        unheard(aside.uncompared, (), (plan, answer, None))
                    return answer
            if draws is not None:
                draws.restore()
        if role.on_target and (pristine is not None or (own.fallback is not None and reason == plan.reason)):
            unheard(self._target.hear, (), (plan, own, pristine, self._max_bytes))
        try:
            if aside is None and problem is None and not reason and are_too_large(plan, own.out, self._max_bytes):
                problem = TOO_LARGE
            if aside is not None and (reason or problem is not None):
                unheard(aside.uncompared, (), (plan, own, pristine))
            if reason:
                if own.fallback is not None and reason == plan.reason:
                    self._fallen_view(plan, args, kwargs, own, role, place)
                    return own
                if plan.action is Action.VIEW:
                    self._views.check(plan, args, kwargs, own.out, place, role.device)
                recorder.skip(plan.name, str(role.device), reason)
                return own
            context = recorder.context(plan, args, kwargs, place, role.device)
            if problem is not None:
                self._stage.unverified(context, problem, plan, own)
                return own
            if aside is not None:
                drawn = plan.action is Action.RANDOM and not is_certain(plan, args, kwargs)
                unheard(aside.after, (), (plan, own, pristine, context, role), {"drawn": drawn})
                return own
            if plan.action is Action.RANDOM and not is_certain(plan, args, kwargs):
                draw = own if role.on_target else self._draw(context, plan, pristine, streams)
                if draw is not None and streams is not None and unheard(self._is_same, (), (plan, draw, own)):
                    concluded = (plan, context, pristine, draw, own, None)
                    unheard(self._stage.comparing.conclude, (), concluded, {"shared": False})
                elif draw is not None:
                    unheard(self._stage.comparing.conclude_random, (), (plan, context, pristine, draw))
                if drift is not None:
                    drift.reseed(plan, args, kwargs, own.out)
                return own
            self._replay(context, plan, args, kwargs, own, pristine, role)
        except Exception as error:
            self._failed(plan, args, kwargs, own, role, place, error)
        return own

    def conclude(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own: Ran,
        pristine: Any,
        role: Role,
        place: Place,
    ) -> None:
        """Replay a call of the target's that has run, and record the verdict."""
        try:
            context = self._stage.recorder.context(plan, args, kwargs, place, role.device)
            if plan.action is Action.RANDOM and not is_certain(plan, args, kwargs):
                unheard(self._stage.comparing.conclude_random, (), (plan, context, pristine, own))
            else:
                self._replay(context, plan, args, kwargs, own, pristine, role)
        except Exception as error:
            self._failed(plan, args, kwargs, own, role, place, error)

    def _replay(
        self,
        context: int,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own: Ran,
        pristine: Any,
        role: Role,
    ) -> None:
        actual = own if role.on_target else self.failure.attempt(context, plan, pristine)
        expected = own if role.on_ref else self._reference(context, plan, pristine, answered=actual is not None)
        drift, drifted = self._stage.drift, None
        if drift is not None:
            drifted = unheard(drift.after, (), (plan, args, kwargs, own.out, None, None))
        if actual is not None and expected is not None:
            concluded = (plan, context, pristine, actual, expected, drifted)
            here = role.device if role.on_target else None
            unheard(self._stage.comparing.conclude, (), concluded, {"shared": False, "here": here})

    def _failed(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own: Ran,
        role: Role,
        place: Place,
        error: Exception,
    ) -> None:
        context = self._stage.recorder.context(plan, (), {}, place, role.device)
        verdict = self._stage.harness("replaying", plan, error, (*args, *kwargs.values(), own.out))
        self._stage.unverified(context, verdict, plan, None)

    def _fallen_view(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], own: Ran, role: Role, place: Place
    ) -> None:
        """Record a call that is not compared, yet went to the CPU: a view of memory there is a copy for the program."""
        assert own.fallback is not None
        cause, evidence = own.fallback
        first = own.out[0] if isinstance(own.out, (list, tuple)) and own.out else own.out
        if plan.action is Action.VIEW and isinstance(first, torch.Tensor) and not shares_memory(first, args[0]):
            evidence += "; what should be a view is a copy: writing to it leaves its base as it is"
        context = self._stage.recorder.context(plan, args, kwargs, place, role.device)
        verdict = Verdict(Status.FALLBACK, cause, "computed on the CPU", evidence)
        captured = None if plan.mutated else self._stage.recorder.keep(plan, verdict, (args, kwargs))
        self._stage.recorder.verdict(context, verdict, captured=captured)

    def _mirrored(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Inputs on the CPU, as before the call; those that lie there are copied too: the call may write to them."""
        return mirror(args, kwargs, _CPU, self._max_bytes, written=written_to(plan, args, kwargs))

    def _reference(self, context: int, plan: OpPlan, pristine: Any, *, answered: bool = False) -> Ran | None:
        try:
            return self._ref.run_mirrored(for_reference(plan), pristine[0], pristine[1], self._max_bytes)
        except Exception as error:
            verdict = unheard(refused, (), (plan, *pristine, error)) if answered else reference_raised(error)
            self._stage.recorder.verdict(context, verdict, captured=self._stage.recorder.keep(plan, verdict, pristine))
            return None

    def _is_same(self, plan: OpPlan, drawn: Ran, own: Ran) -> bool:
        """Whether the target drew the user's own numbers."""
        pairs = zip(self._target.values(plan, drawn), self._ref.values(plan, own), strict=False)
        return all(self._stage.comparing.equal(a, b) for a, b in pairs)

    def _draw(self, context: int, plan: OpPlan, pristine: Any, streams: Streams | None) -> Ran | None:
        """Run a random operator on the target without moving its stream, or from where the user's call began."""
        platform = self._target.platform
        # Also the CPU's: a device without a generator of its own (lazy), or one that falls back, draws there.
        state, cpu_state = platform.rng_state(), torch.get_rng_state()
        generator = pristine[1].get("generator")
        own_state = generator.get_state() if isinstance(generator, torch.Generator) else None
        try:
            if streams is not None:
                torch.set_rng_state(streams[0])
                if streams[1] is not None:
                    generator.set_state(streams[1])
            return self.failure.attempt(context, plan, pristine)
        finally:
            platform.set_rng_state(state)
            torch.set_rng_state(cpu_state)
            if own_state is not None:
                generator.set_state(own_state)


def _plainly(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
    start = _clock()
    out = own_call(plan.run, args, kwargs)
    return Ran(args, kwargs, out, _clock() - start)


def _streams(kwargs: dict[str, Any]) -> Streams:
    generator = kwargs.get("generator")
    return torch.get_rng_state(), generator.get_state() if isinstance(generator, torch.Generator) else None


def is_certain(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a random operator draws nothing in this call (attention with dropout 0)."""
    if plan.dropout < 0:
        return False
    p = args[plan.dropout] if plan.dropout < len(args) else kwargs.get("dropout_p", 0.0)
    return not p
