"""Calls on a device that both platforms share (the CPU under other settings).

Inputs are used as they are; only what the call writes to is copied. The plain calls, nearly all of a training
step, take a short way: every microsecond here is paid thousands of times a second.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept import torchapi
from shadowrun.intercept.torchapi import unheard
from shadowrun.numerics.bits import Uncomparable, plainly_equal
from shadowrun.replay import results
from shadowrun.replay.capturing import SLOW
from shadowrun.replay.execution import Executor, Ran
from shadowrun.replay.mirror import OverBudget, copy_mutated
from shadowrun.replay.stage import BUDGET, CUSTOM, Role, Stage
from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Place
    from shadowrun.intercept.plan import OpPlan
    from shadowrun.replay.case import Value
    from shadowrun.replay.mirror import Arguments

__all__ = ["SharedPath"]

_clock = time.perf_counter_ns
_WORTH_TIMING_NS = 1_000_000
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class SharedPath:
    """Observes calls whose device is both target and reference."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._recorder = stage.recorder
        self._max_bytes = stage.config.max_bytes
        self._no_drift = stage.drift is None
        self._comparing = stage.comparing
        self._suspects = stage.comparing.suspects

    def observe(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place
    ) -> tuple[Any, int]:
        """Run a call for the user, again on the other platform, and record the verdict."""
        if self._no_drift and (role.on_target or role.on_ref):
            if plan.short:
                if not plan.mutated:
                    return self._observe_fresh(plan, args, kwargs, role, place)
                before = self._before(args)
                if before is not None:
                    return self._observe_in_place(plan, args, kwargs, role, place, before)
            elif not (plan.random or plan.silent or plan.custom):
                pristine = self._pristine(plan, args, kwargs)
                if pristine is not None:
                    return self._observe_several(plan, args, kwargs, role, place, pristine)
        ran = self._observe_any(plan, args, kwargs, role, place)
        return ran.out, ran.ns

    def _before(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Copy of the first argument; None where that is not all that the call could write to."""
        first = args[0]
        try:
            if type(first) not in _PLAIN or not first.is_contiguous() or _may_alias(args):
                return None
            copy: torch.Tensor = first.clone()
        except Exception:  # the long way copies with more care, and records why it cannot
            return None
        return copy if copy.nbytes <= self._max_bytes else None

    def _pristine(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Inputs that the call does not write to; None where the long way must say why there are none."""
        if not plan.mutated:
            return args, kwargs
        try:
            copied: Arguments = unheard(copy_mutated, (), (plan, args, kwargs, self._max_bytes))
        except Exception:
            return None
        return copied

    def _observe_fresh(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place
    ) -> tuple[Any, int]:
        """One new tensor comes back, nothing is written to."""
        start = _clock()
        out = plan.run(*args, **kwargs)
        ns = _clock() - start
        other = self._stage.ref if role.on_target else self._stage.target
        try:
            context = self._recorder.context(plan, args, kwargs, place, role.device)
            start = _clock()
            plain = other.plain and not torchapi.n_modes_below()
            theirs = unheard(plan.run, (), args, kwargs) if plain else other.call(plan, args, kwargs)
            other_ns = _clock() - start
            if type(out) is torch.Tensor and (plainly_equal(out, theirs) or self._comparing.equal(out, theirs)):
                self._match(plan, context, ns, other_ns, role, (args, kwargs), [out])
                return out, ns
            self._conclude(
                plan, context, (args, kwargs), Ran(args, kwargs, out, ns), Ran(args, kwargs, theirs, other_ns), role
            )
        except Exception as error:
            self._failed(plan, args, kwargs, role, place, error)
        return out, ns

    def _observe_in_place(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        role: Role,
        place: Place,
        before: torch.Tensor,
    ) -> tuple[Any, int]:
        """The first argument is written to, and shares its memory with no other."""
        start = _clock()
        out = plan.run(*args, **kwargs)
        ns = _clock() - start
        other = self._stage.ref if role.on_target else self._stage.target
        try:
            context = self._recorder.context(plan, args, kwargs, place, role.device)
            mine = args[0]
            copy = before.clone()
            other_args = (copy, *args[1:])
            start = _clock()
            plain = other.plain and not torchapi.n_modes_below()
            theirs = unheard(plan.run, (), other_args, kwargs) if plain else other.call(plan, other_args, kwargs)
            other_ns = _clock() - start
            pristine = ((before, *args[1:]), kwargs)
            if plainly_equal(mine, copy) or self._comparing.equal(mine, copy):
                self._match(plan, context, ns, other_ns, role, pristine, [mine])
                return out, ns
            theirs_ran = Ran(other_args, kwargs, theirs, other_ns)
            self._conclude(plan, context, pristine, Ran(args, kwargs, out, ns), theirs_ran, role)
        except Exception as error:
            self._failed(plan, args, kwargs, role, place, error)
        return out, ns

    def _observe_several(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        role: Role,
        place: Place,
        pristine: Arguments,
    ) -> tuple[Any, int]:
        """Several results, lists, numbers, any arguments that are written to; nothing is drawn."""
        start = _clock()
        out = plan.run(*args, **kwargs)
        ns = _clock() - start
        other = self._stage.ref if role.on_target else self._stage.target
        try:
            context = self._recorder.context(plan, args, kwargs, place, role.device)
            again = pristine
            if plan.mutated:
                again = unheard(copy_mutated, (), (plan, *pristine, self._max_bytes))
            start = _clock()
            plain = other.plain and not torchapi.n_modes_below()
            theirs = unheard(plan.run, (), *again) if plain else other.call(plan, *again)
            other_ns = _clock() - start
            mine = results.values(plan, args, kwargs, out)
            if self._all_equal(mine, results.values(plan, *again, theirs)):
                self._match(plan, context, ns, other_ns, role, pristine, mine)
                return out, ns
            self._conclude(plan, context, pristine, Ran(args, kwargs, out, ns), Ran(*again, theirs, other_ns), role)
        except Exception as error:
            self._failed(plan, args, kwargs, role, place, error)
        return out, ns

    def _all_equal(self, actual: list[Value], expected: list[Value]) -> bool:
        """Whether all results have the same bits and strides; False also where a kind cannot be compared."""
        if len(actual) != len(expected):
            return False
        try:
            for a, e in zip(actual, expected, strict=True):
                plain = type(a) in _PLAIN and type(e) in _PLAIN and plainly_equal(a, e)  # type: ignore[arg-type]
                if not plain and not self._comparing.equal(a, e):
                    return False
        except Uncomparable:
            return False
        return True

    def _match(
        self,
        plan: OpPlan,
        context: int,
        ns: int,
        other_ns: int,
        role: Role,
        pristine: Arguments,
        mine: list[Value],
    ) -> None:
        if plan.index in self._suspects:
            self._comparing.remember_if_suspect(plan, mine)
        if ns + other_ns > _WORTH_TIMING_NS:
            self._match_timed(plan, context, ns, other_ns, role, pristine)
        elif role.on_target:
            self._recorder.match(context, other_ns / 1000, ns / 1000)
        else:
            self._recorder.match(context, ns / 1000, other_ns / 1000)

    def _match_timed(self, plan: OpPlan, context: int, ns: int, other_ns: int, role: Role, pristine: Any) -> None:
        target_ns, ref_ns = (ns, other_ns) if role.on_target else (other_ns, ns)

        def again() -> Ran:
            args, kwargs = pristine
            if plan.mutated:
                args, kwargs = copy_mutated(plan, args, kwargs, self._max_bytes)
            return self._stage.target.run(plan, args, kwargs)

        target_ns = self._comparing.confirmed_ns(plan, target_ns, ref_ns, again)
        times = (ref_ns / 1000, target_ns / 1000)
        slow = self._recorder.keep(plan, SLOW, pristine) if self._comparing.is_slow(target_ns, ref_ns) else None
        if slow is None:
            self._recorder.match(context, *times)
        else:
            self._recorder.verdict(context, Verdict(Status.MATCH), times=times, captured=slow)

    def _conclude(self, plan: OpPlan, context: int, pristine: Any, mine: Ran, theirs: Ran, role: Role) -> None:
        actual, expected = (mine, theirs) if role.on_target else (theirs, mine)
        conclude = self._stage.comparing.conclude
        unheard(conclude, (), (plan, context, pristine, actual, expected, None), {"shared": True})

    def _failed(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place, error: Exception
    ) -> None:
        verdict = self._stage.harness("replaying", plan, error, (*args, *kwargs.values()))
        try:
            context = self._recorder.context(plan, args, kwargs, place, role.device)
        except Exception:
            context = -1
        self._stage.unverified(context, verdict, plan, None)

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
            unheard(drift.before, (), (args, kwargs))
        start = _clock()
        out = plan.run(*args, **kwargs)
        own = Ran(args, kwargs, out, _clock() - start)
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


def _may_alias(args: tuple[Any, ...]) -> bool:
    """Whether another argument is or shares memory with the first, or is no plain tensor or number."""
    first = args[0]
    for a in args[1:]:
        kind = type(a)
        if kind in _PLAIN:
            if torchapi.shares_memory(first, a):
                return True
        elif kind is list or kind is tuple:
            return True
    return False


def _generator(device: torch.device, kwargs: dict[str, Any]) -> torch.Generator:
    given = kwargs.get("generator")
    if isinstance(given, torch.Generator):
        return given
    if device.type == "cpu":
        return torch.default_generator
    generators: Any = getattr(torch, device.type).default_generators
    generator: torch.Generator = generators[device.index or 0]
    return generator
