"""Two platforms on one accelerator (``cuda[tf32=on]`` against ``cuda``): compared there, and asked about in batches.

Each call leaves one flag on the device: whether any bit differs. The flags of many calls are fetched at once; only of
a call that differs are inputs and results brought over, for the judge. Until then they wait on the device, as copies,
within a bound: where that is reached, the flags are fetched.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.own_call import own_call
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.intercept.torchapi import as_in_handler, unheard
from shadowrun.numerics.form import form_difference
from shadowrun.platforms.unsupported import classify, limit_of_host
from shadowrun.replay import results
from shadowrun.replay.across import is_certain
from shadowrun.replay.comparing import landed_elsewhere
from shadowrun.replay.execution import Executor, Ran
from shadowrun.replay.mirror import (
    OverBudget,
    as_given,
    copy_mutated,
    in_place,
    mirror,
    move,
    tensors_in,
    written_to,
)
from shadowrun.replay.refused import refused
from shadowrun.replay.room import NO_ROOM, TOO_LARGE, are_too_large, may_run_again
from shadowrun.replay.stage import BUDGET, CUSTOM, Role, Stage
from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    from shadowrun.intercept.attribution import Place
    from shadowrun.replay.case import Value
    from shadowrun.replay.mirror import Arguments

__all__ = ["OnDevicePath"]

_CPU = torch.device("cpu")
_MOST_WAITING = 256
_MOST_BYTES = 1 << 30
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class _Waiting:
    """A call whose flag lies on the device, with copies of what the judge would need.

    Attributes:
        flags: One for each result; None where the form differs already.
    """

    plan: OpPlan
    context: int
    pristine: Arguments
    actual: Ran
    expected: Ran
    flags: list[torch.Tensor] | None
    random: bool


class OnDevicePath:
    """Observes calls on an accelerator that is both target and reference."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._max_bytes = stage.config.max_bytes
        self._waiting: list[_Waiting] = []
        self._held = 0

    def observe(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], role: Role, place: Place
    ) -> tuple[Any, int]:
        """Run a call for the user, again on the other platform, and leave a flag."""
        stage = self._stage
        problem: Verdict | None = None
        pristine: Any = None
        platform = stage.target.platform
        random = plan.action is Action.RANDOM and not is_certain(plan, args, kwargs)
        generator, state = kwargs.get("generator") if random else None, None
        try:
            if plan.custom and not stage.selection.ops_named:
                problem = CUSTOM
            else:
                plan = as_given(plan, args, kwargs)
                written = written_to(plan, args, kwargs)
                pristine = unheard(mirror, (), (args, kwargs, role.device, self._max_bytes, in_place, written))
                if random:
                    state = platform.rng_state() if generator is None else generator.get_state()
        except OverBudget:
            problem = BUDGET
        except Exception as error:
            problem = stage.harness("copying the inputs of", plan, error, (*args, *kwargs.values()))
        runs = stage.target.run_user if role.on_target else stage.ref.run_user if role.on_ref else _plainly
        while True:
            try:
                own = runs(plan, args, kwargs)
                break
            except Exception as error:
                if not may_run_again(error, plan, args, kwargs, pristine):
                    raise
                pristine, problem = None, NO_ROOM
            self.flush()
            if state is not None:
                platform.set_rng_state(state) if generator is None else generator.set_state(state)
        if problem is None and are_too_large(plan, own.out, self._max_bytes):
            problem = TOO_LARGE
        context = -1
        try:
            context = stage.recorder.context(plan, args, kwargs, place, role.device)
            if problem is not None:
                stage.unverified(context, problem, plan, None)
                return own.out, own.ns
            after = None
            if random:
                after = platform.rng_state() if generator is None else generator.get_state()
            try:
                kept = unheard(self._kept, (), (plan, own, role))
                actual = kept if role.on_target else self._again(stage.target, plan, pristine, generator, state)
                expected = kept if role.on_ref else self._again(stage.ref, plan, pristine, generator, state)
            finally:
                if random:
                    platform.set_rng_state(after) if generator is None else generator.set_state(after)
            if isinstance(actual, Ran) and isinstance(expected, Ran):
                unheard(self._leave, (), (plan, context, pristine, actual, expected, random))
            else:
                self.flush()
                for why in (actual, expected):
                    if isinstance(why, Verdict):
                        stage.unverified(context, why, plan, None)
                        break
        except Exception as error:
            verdict = stage.harness("replaying", plan, error, (*args, *kwargs.values(), own.out))
            stage.unverified(context, verdict, plan, None)
        return own.out, own.ns

    def flush(self) -> None:
        """Fetch the flags, and record the calls that wait."""
        waiting, self._waiting, self._held = self._waiting, [], 0
        if not waiting:
            return
        with as_in_handler():
            flags = [flag.reshape(()) for call in waiting for flag in call.flags or ()]
            differ = iter(torch.stack(flags).tolist() if flags else ())
            for call in waiting:
                different = call.flags is None or sum(next(differ) for _ in call.flags) > 0
                self._record(call, different=different)

    def _again(
        self, executor: Executor, plan: OpPlan, pristine: Arguments, generator: Any, state: torch.Tensor | None
    ) -> Ran | Verdict:
        """Run a call on the other platform, or say why that is not possible."""
        try:
            if state is not None:
                executor.platform.set_rng_state(state) if generator is None else generator.set_state(state)
            args, kwargs = pristine
            if plan.mutated:
                args, kwargs = unheard(copy_mutated, (), (plan, args, kwargs, self._max_bytes))
            return executor.run(plan, args, kwargs)
        except Exception as error:
            if executor is self._stage.ref:
                verdict: Verdict = unheard(refused, (), (plan, *pristine, error))
                return verdict
            if limit_of_host(error):
                return Verdict(Status.UNVERIFIED, None, limit_of_host(error), str(error)[:300])
            failure = classify(error)
            return Verdict(Status.ERROR, failure.cause, type(error).__name__, failure.message)

    def _kept(self, plan: OpPlan, own: Ran, role: Role) -> Ran:
        """The user's run with copies of what it gave: he may write to it before it is looked at."""
        args: list[Any] = [None] * len(own.args)
        kwargs: dict[str, Any] = {}
        for a in plan.mutated:
            value = _copied(results.argument(a, own.args, own.kwargs))
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
        if role.on_target and fallback is None:
            fallback = landed_elsewhere(plan, own.out, role.device)
        return Ran(tuple(args), kwargs, out, own.ns, fallback)

    def _leave(self, plan: OpPlan, context: int, pristine: Arguments, actual: Ran, expected: Ran, random: bool) -> None:
        left = results.values(plan, actual.args, actual.kwargs, actual.out)
        right = results.values(plan, expected.args, expected.kwargs, expected.out)
        flags = _flags(left, right)
        copies = tensors_in((*pristine[0], *pristine[1].values(), *left, *right))
        self._held += sum(t.nbytes for t in copies if t.layout is torch.strided)
        self._waiting.append(_Waiting(plan, context, pristine, actual, expected, flags, random))
        if len(self._waiting) >= _MOST_WAITING or self._held > min(self._max_bytes, _MOST_BYTES):
            self.flush()

    def _record(self, call: _Waiting, *, different: bool) -> None:
        stage = self._stage
        try:
            new = stage.comparing.effects.concerns(call.plan, call.context)
            if not different and not new and call.actual.fallback is None:
                stage.recorder.match(call.context, call.expected.ns / 1000, call.actual.ns / 1000)
                return
            pristine = mirror(*call.pristine, _CPU, self._max_bytes, written=written_to(call.plan, *call.pristine))
            if call.random and different:
                stage.comparing.conclude_random(call.plan, call.context, pristine, call.actual)
                return
            concluded = (call.plan, call.context, pristine, call.actual, call.expected, None)
            unheard(stage.comparing.conclude, (), concluded, {"shared": False})
        except Exception as error:
            stage.unverified(call.context, stage.harness("comparing", call.plan, error), call.plan, None)


def _plainly(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ran:
    start = time.perf_counter_ns()
    out = own_call(plan.run, args, kwargs)
    return Ran(args, kwargs, out, time.perf_counter_ns() - start)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return move(value, value.device)
    if isinstance(value, (list, tuple)):
        return [_copied(v) for v in value]
    return value


def _flags(left: list[Value], right: list[Value]) -> list[torch.Tensor] | None:
    """Whether results differ, told by the device; None where that is known already, or takes a longer look."""
    if len(left) != len(right):
        return None
    flags = []
    for a, b in zip(left, right, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return None
        if a.layout is not torch.strided or a.is_nested or a.is_quantized or form_difference(a, b):
            return None
        if a.numel():
            flags.append((_ints(a) != _ints(b)).any())
    return flags


def _ints(t: torch.Tensor) -> torch.Tensor:
    t = t.resolve_conj().resolve_neg()
    if t.element_size() == 16:
        t = torch.view_as_real(t)
    return t.view(_INTS[t.element_size()])
