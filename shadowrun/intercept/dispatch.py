"""The dispatch mode: gets every operator call, finds its plan, and hands both to an observer."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from shadowrun import native
from shadowrun.intercept import higher_order, torch_operators, torchapi
from shadowrun.intercept.plan import OpKind, OpPlan, make_plan
from shadowrun.intercept.user_call import own_call
from shadowrun.torch_private import is_distributed

if TYPE_CHECKING:
    from collections.abc import Callable

    from shadowrun.intercept.attribution import Attribution

__all__ = ["ModeToggle", "Observer", "ShadowMode", "dispatch_overhead_ns", "plan_of"]

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_planning = threading.Lock()
# `inside`: a call with DTensors runs on this thread.
_distributed = threading.local()
_TRIALS, _CALLS = 5, 100


class Observer(Protocol):
    """What the mode hands calls to. `observe` and `run_and_count` run the call and return what the user gets.

    Attributes:
        plans: Plans by the id of their operator. The observer's, not the mode's: a comparison that is started again
            has a new mode, and what was noted by a plan's number must still mean the same operator.
        native_handler: The C handler that calls go through first; None without the part in C.
    """

    plans: dict[int, OpPlan]
    native_handler: Any

    @property
    def run_distributed(self) -> Callable[[Callable[[], Any], tuple[Any, ...], dict[str, Any]], Any] | None:
        """Runs a call with DTensors, from the call itself, `args` and `kwargs`.

        Its operators on local tensors are observed as any others; None where only these matter.
        """
        ...

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and compare it."""
        ...

    def run_and_count(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is never compared, and count it."""
        ...

    def count(self, name: str, reason: str) -> None:
        """Count a call that has no plan."""
        ...

    def add_operator(self, plan: OpPlan) -> None:
        """An operator has got its plan."""
        ...


class _DetachedObserver:
    """Runs calls and does nothing else."""

    native_handler = None
    run_distributed: None = None

    def __init__(self) -> None:
        self.plans: dict[int, OpPlan] = {}

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return own_call(plan.run, args, kwargs)

    run_and_count = observe

    def count(self, name: str, reason: str) -> None:
        pass

    def add_operator(self, plan: OpPlan) -> None:
        pass


_DETACHED = _DetachedObserver()


class ShadowMode(torchapi.DispatchMode):  # type: ignore[no-untyped-call]
    """Gets every operator call of its thread, and of autograd threads working for it."""

    __slots__ = ("_method",)  # in C, or None: see shadowrun/native/dispatch.c

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._method: Any = None
        self._observer = observer
        self._plans = observer.plans
        self.native_handler = observer.native_handler
        # Bound once: a look-up by torch for each call costs a new string, its hash and a search of the types.
        self._bind_native()

    def __enter__(self) -> Self:
        """Put it on the stack."""
        self._bind_native()  # again, where it was left for a while
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, exc_type: object, exc_value: object, traceback: object) -> None:
        """Take it off the stack."""
        self._unbind_native()
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]

    def _bind_native(self) -> None:
        if self.native_handler is not None:
            self._method = self.native_handler.bind(self)

    def _unbind_native(self) -> None:
        """Have all calls go through Python from here on; without its own method the mode is no cycle any more."""
        method, self._method = self._method, None
        if method is not None:
            method.leave()  # another thread may be about to call it

    @property
    def observes(self) -> bool:
        """Whether it still hands calls to its observer."""
        return self._observer is not _DETACHED

    def count(self, name: str, reason: str) -> None:
        """Count a call that this mode did not get."""
        self._observer.count(name, reason)

    def detach(self) -> None:
        """Only run calls from here on: a mode cannot be taken off the stack of another thread."""
        self._unbind_native()
        self.native_handler = None  # which holds all that the observer does
        self._observer = _DETACHED

    @staticmethod
    def forked() -> None:
        """In a forked child: a thread that was making a plan is not there any more."""
        global _planning  # noqa: PLW0603 - one for the process, since operators are its
        _planning = threading.Lock()

    @staticmethod
    def clear_detached() -> None:
        """Leave modes of this thread that another thread has ended."""
        # A mode cannot be taken off another thread's stack, so the thread does it when it comes by.
        while isinstance(mode := torchapi.top_mode(), ShadowMode) and mode._observer is _DETACHED:
            mode.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torchapi.has_function_mode() and isinstance(func, torch._ops.OpOverload):
            with torchapi.without_function_modes():  # a function mode of the user's must not see replays
                return self._handle(func, types, args, kwargs or {})
        return self._handle(func, types, args, kwargs or {})

    def _handle(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # By id: hashing an OpOverload calls Python. The plan holds the operator, so ids stay their own.
        plan = self._plans.get(id(func))
        if plan is None:
            plan = self._new_plan(func)
            if plan is None:
                return higher_order.run_observed(self, func, args, kwargs)
        for t in types:
            if t not in _PLAIN:
                # Fake tensors have no values, and tracing must see the call as it is.
                if torchapi.in_infra_mode():
                    break
                # `NotImplemented` has torch ask the subclass, which unwraps itself and calls plain operators.
                if t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                    wanted = self._observer.run_distributed if is_distributed(t) else None
                    if wanted is None or getattr(_distributed, "inside", False):
                        return NotImplemented
                    return wanted(lambda: self._call_again(plan, args, kwargs), args, kwargs)
                if issubclass(t, UninitializedTensorMixin):  # of lazy modules: no shape, no values yet
                    self._observer.count(plan.name, "uninitialized parameter")
                    return own_call(plan.run, args, kwargs)
        # Where autograd is off, composite operators arrive whole: the operators inside are what is compared.
        if plan.composite and (torch.is_inference_mode_enabled() or higher_order.is_inside()):
            torchapi.push_mode(self)
            try:
                return own_call(torch_operators.decomposition(func), args, kwargs)
            finally:
                torchapi.pop_mode(self)
        if plan.kind is OpKind.PASS:
            return self._observer.run_and_count(plan, args, kwargs)
        # The program's profiler must count its own calls only, and no replay.
        if torchapi.profiling():
            with torchapi.hidden_from_profiler(plan.run) as run:
                return self._observe(dataclasses.replace(plan, run=run), args, kwargs)
        return self._observe(plan, args, kwargs)

    def _call_again(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have torch ask the subclass, as `NotImplemented` does, and return the result to us."""
        _distributed.inside = True
        torchapi.push_mode(self)
        try:
            return own_call(plan.run, args, kwargs)
        finally:
            torchapi.pop_mode(self)
            _distributed.inside = False

    def _observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A FLOP counter below would count each replay.
        if torchapi.n_modes_below():
            return self._observe_above_modes(plan, args, kwargs)
        return self._observer.observe(plan, args, kwargs)

    def _observe_above_modes(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call with other dispatch modes below this one."""
        if torchapi.in_infra_mode():
            return self._observer.run_and_count(plan, args, kwargs)
        with torchapi.without_lower_modes(plan.run) as run:
            return self._observer.observe(dataclasses.replace(plan, run=run), args, kwargs)

    def _new_plan(self, func: Any) -> OpPlan | None:
        if not isinstance(func, torch._ops.OpOverload):
            if higher_order.is_observed_region(func):  # recorded as a whole
                return None
            self._observer.count(getattr(func, "name", lambda: str(func))(), higher_order.REASON)
            return None
        return plan_of(func, self._observer)


def plan_of(func: torch._ops.OpOverload, observer: Observer) -> OpPlan:
    """The plan of an operator; the observer learns a new one."""
    plans = observer.plans
    with _planning:  # two threads must not give two operators one number
        plan = plans.get(id(func))
        if plan is None:
            plan = plans[id(func)] = make_plan(func, len(plans))
            observer.add_operator(plan)
    return plan


if native.core is not None:
    native.core.install_dispatch_slot(ShadowMode)


class ModeToggle:
    """Puts the dispatch mode on the stack of the current thread, and takes it off.

    Attributes:
        on: Whether the mode is on the stack.
        kept_out: Whether it could not be put back at least once, since the program had entered another mode.
    """

    def __init__(self, mode: ShadowMode, attribution: Attribution) -> None:
        self._mode = mode
        self._attribution = attribution
        self._thread = threading.get_ident()
        self._below: list[Any] = []
        self.on = False
        self.kept_out = False

    def begin(self) -> None:
        """Put the mode on top of the stack."""
        self._mode.__enter__()
        self.on = True

    def end(self) -> None:
        """Take the mode off finally."""
        # The mode stack is thread-local: on another thread the mode stays on it, detached, and passes calls on.
        if self._thread != threading.get_ident():
            self._mode.detach()
        elif self.on:
            with torchapi.on_top(self._mode):  # a block may end within a mode that was entered in it
                self._mode.__exit__(None, None, None)
        self.on = False

    @property
    def can_leave(self) -> bool:
        """Whether the mode can be taken off: it is on top of the stack of this thread."""
        return self.on and torchapi.top_mode() is self._mode and self._thread == threading.get_ident()

    @property
    def can_toggle(self) -> bool:
        """Whether the mode can be taken off or put back now."""
        return self.can_leave if self.on else self._can_return

    @property
    def _can_return(self) -> bool:
        # `__exit__` of a mode pops the top of the stack without a check. If the program entered a mode in between, its
        # `__exit__` would pop ours.
        return self._thread == threading.get_ident() and _same(torchapi.modes(), self._below)

    def toggle(self, wanted: bool) -> bool:
        """Put the mode on or take it off, if possible.

        Returns:
            Whether the mode is on.
        """
        if wanted is self.on:
            return self.on
        if wanted:
            self._return()
        elif self.can_leave:
            self._mode.__exit__(None, None, None)
            self._attribution.pause()
            self._below = torchapi.modes()
            self.on = False
        return self.on

    def _return(self) -> None:
        if not self._can_return:
            self.kept_out = self.kept_out or self._thread == threading.get_ident()
            return
        self._attribution.resume()
        self.begin()


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def dispatch_overhead_ns() -> float:
    """Nanoseconds that torch takes to hand one call to a mode like this one; takes milliseconds to measure.

    The least of several trials, without the user's own modes: they must not see it.
    """
    run = torch_operators.raw_operator(torch.ops.aten.neg.default)
    make = torch_operators.raw_operator(torch.ops.aten.ones.default)

    def trial_ns(tensor: torch.Tensor) -> int:
        start = time.perf_counter_ns()
        for _ in range(_CALLS):
            torchapi.with_isolated_warnings(run, (), (tensor,), {})
        return time.perf_counter_ns() - start

    with torchapi.without_lower_modes(run), torch.no_grad():
        # On the CPU: the program may have set another default device.
        tensor: torch.Tensor = torchapi.with_isolated_warnings(make, (), ([1],), {"device": "cpu"})
        plain = min(trial_ns(tensor) for _ in range(_TRIALS))
        torchapi.push_mode(mode := ShadowMode(_DETACHED))
        try:
            # Not counted: the first call makes the plan of the operator.
            trial_ns(tensor)
            handed = min(trial_ns(tensor) for _ in range(_TRIALS))
        finally:
            torchapi.pop_mode(mode)
    return max(0.0, (handed - plain) / _CALLS)
