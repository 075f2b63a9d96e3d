"""The one dispatch mode: sees every operator call, decides by its plan, hands it to an observer."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any, Protocol, Self

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from shadowrun import native
from shadowrun.intercept import higher_order, torchapi
from shadowrun.intercept.own_call import own_call
from shadowrun.intercept.plan import OpPlan, make_plan

__all__ = ["Observer", "ShadowMode", "handing_over_ns"]

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_planning = threading.Lock()
_TRIALS, _CALLS = 5, 100


class Observer(Protocol):
    """What the mode hands calls to. `observe` and `pass_by` run the call and return what the user gets.

    Attributes:
        plans: Plans by the id of their operator. The observer's, not the mode's: a comparison that is started again
            has a new mode, and what was noted by a plan's number must still mean the same operator.
        quick: A compiled handler that calls go through first, if there is one.
    """

    plans: dict[int, OpPlan]
    quick: Any

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and compare it."""
        ...

    def pass_by(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is not compared, and count it."""
        ...

    def count(self, name: str, reason: str) -> None:
        """Count a call that has no plan."""
        ...


class _Blind:
    """Runs calls and does nothing else."""

    quick = None

    def __init__(self) -> None:
        self.plans: dict[int, OpPlan] = {}

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return own_call(plan.run, args, kwargs)

    pass_by = observe

    def count(self, name: str, reason: str) -> None:
        pass


_BLIND = _Blind()


class ShadowMode(torchapi.DispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator call of its thread, and of autograd threads working for it."""

    __slots__ = ("_method",)  # in C, or None: see shadowrun/native/bound.c

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._method: Any = None
        self._observer = observer
        self._plans = observer.plans
        self.quick = observer.quick
        self._enter_quick()

    def __enter__(self) -> Self:
        """Put it on the stack."""
        self._enter_quick()  # again, where it was left for a while
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, exc_type: object, exc_value: object, traceback: object) -> None:
        """Take it off the stack."""
        self._leave_quick()
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]

    def _enter_quick(self) -> None:
        if self.quick is not None:
            self._method = self.quick.bind(self)

    def _leave_quick(self) -> None:
        """Have all calls go through Python from here on; without its own method the mode is no cycle any more."""
        method, self._method = self._method, None
        if method is not None:
            method.leave()  # another thread may be about to call it

    @property
    def sees(self) -> bool:
        """Whether it has not gone blind."""
        return self._observer is not _BLIND

    def count(self, name: str, reason: str) -> None:
        """Count a call that went by."""
        self._observer.count(name, reason)

    def go_blind(self) -> None:
        """Let calls pass from here on: nobody can take the mode off the stack of another thread."""
        self._leave_quick()
        self.quick = None  # which holds all that the observer does
        self._observer = _BLIND

    @staticmethod
    def forked() -> None:
        """In a forked child: a thread that was making a plan is not there any more."""
        global _planning  # noqa: PLW0603 - one for the process, since operators are its
        _planning = threading.Lock()

    @staticmethod
    def clear_blind() -> None:
        """Leave modes of this thread that another thread has ended."""
        while isinstance(mode := torchapi.top_mode(), ShadowMode) and mode._observer is _BLIND:
            mode.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torchapi.asks_functions() and isinstance(func, torch._ops.OpOverload):
            with torchapi.asking_nobody():  # a function mode of the user's shall not see what we do
                return self._handle(func, types, args, kwargs or {})
        return self._handle(func, types, args, kwargs or {})

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # By id: hashing an OpOverload calls Python. The plan holds the operator, so ids stay their own.
        plan = self._plans.get(id(func))
        if plan is None:
            plan = self._new_plan(func)
            if plan is None:
                return higher_order.run_seen(self, func, args, kwargs)
        for t in types:
            if t not in _PLAIN:
                # A subclass with its own dispatch unwraps itself; its inner plain operators come back to us.
                if torchapi.in_infra_mode():
                    break
                if t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                    return NotImplemented
                if issubclass(t, UninitializedTensorMixin):  # of lazy modules: no shape, no values yet
                    self._observer.count(plan.name, "uninitialized parameter")
                    return own_call(plan.run, args, kwargs)
        if plan.composite and (torch.is_inference_mode_enabled() or higher_order.is_inside()):
            torchapi.push_mode(self)
            try:
                return own_call(torchapi.decomposition(func), args, kwargs)
            finally:
                torchapi.pop_mode(self)
        if plan.passes:
            return self._observer.pass_by(plan, args, kwargs)
        if torchapi.profiling():
            with torchapi.unrecorded(plan.run) as run:
                return self._observe(dataclasses.replace(plan, run=run), args, kwargs)
        return self._observe(plan, args, kwargs)

    def _observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torchapi.n_modes_below():
            return self._above_others(plan, args, kwargs)
        return self._observer.observe(plan, args, kwargs)

    def _above_others(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Other dispatch modes lie below ours."""
        if torchapi.in_infra_mode():
            return self._observer.pass_by(plan, args, kwargs)
        with torchapi.modes_aside(plan.run) as run:
            return self._observer.observe(dataclasses.replace(plan, run=run), args, kwargs)

    def _new_plan(self, func: Any) -> OpPlan | None:
        if not isinstance(func, torch._ops.OpOverload):
            if higher_order.is_observed_region(func):  # recorded as a whole
                return None
            self._observer.count(getattr(func, "name", lambda: str(func))(), higher_order.REASON)
            return None
        with _planning:  # two threads must not give two operators one number
            plan = self._plans.get(id(func))
            if plan is None:
                plan = self._plans[id(func)] = make_plan(func, len(self._plans))
                if self.quick is not None:
                    _learn(self.quick, native.core, plan)
        return plan


if native.core is not None:
    native.core.quicken(ShadowMode)


def _learn(quick: Any, core: Any, plan: OpPlan) -> None:
    """Tell the compiled handler of a plan, unless calls by it have to be looked at."""
    if plan.composite or (plan.custom and not plan.passes):  # custom ones may wait for another thread
        return
    way, written = core.LONG, tuple(a.position for a in plan.mutated if not (a.is_list or a.kwarg_only))
    if plan.passes:
        way = core.PASSING
    elif plan.silent:
        way = core.SILENT
    elif plan.short:
        way = core.IN_PLACE if plan.mutated else core.FRESH
    elif not (plan.random or plan.uninitialised) and len(written) == len(plan.mutated) <= core.MOST_WRITTEN:
        way = core.SEVERAL
    skipped = plan.name, "" if plan.passes else "cpu", plan.reason
    looks = way in (core.IN_PLACE, core.SEVERAL)
    quick.learn(plan.func, plan, plan.run, plan.index, skipped, way, written if looks else ())


def handing_over_ns() -> float:
    """What torch takes to hand one call to a mode like ours and to go on, in nanoseconds (milliseconds to measure).

    The least of several trials, without the user's own modes: they shall not see it.
    """
    run = torchapi.raw_operator(torch.ops.aten.neg.default)
    make = torchapi.raw_operator(torch.ops.aten.ones.default)

    def trial(tensor: torch.Tensor) -> int:
        start = time.perf_counter_ns()
        for _ in range(_CALLS):
            torchapi.unheard(run, (), (tensor,), {})
        return time.perf_counter_ns() - start

    with torchapi.modes_aside(run), torch.no_grad():
        tensor: torch.Tensor = torchapi.unheard(make, (), ([1],), {"device": "cpu"})
        plain = min(trial(tensor) for _ in range(_TRIALS))
        torchapi.push_mode(mode := ShadowMode(_BLIND))
        try:
            trial(tensor)
            handed = min(trial(tensor) for _ in range(_TRIALS))
        finally:
            torchapi.pop_mode(mode)
    return max(0.0, (handed - plain) / _CALLS)
