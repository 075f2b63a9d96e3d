"""The one dispatch mode: sees every operator call, decides by its plan, hands it to an observer."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any, Protocol

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from shadowrun.intercept import torchapi
from shadowrun.intercept.plan import Action, OpPlan, make_plan

__all__ = ["Observer", "ShadowMode"]

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_planning = threading.Lock()


class Observer(Protocol):
    """What the mode hands calls to. `observe` and `pass_by` run the call and return what the user gets.

    Attributes:
        plans: Plans by the id of their operator. The observer's, not the mode's: a comparison that is started again
            has a new mode, and what was noted by a plan's number must still mean the same operator.
    """

    plans: dict[int, OpPlan]

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

    def __init__(self) -> None:
        self.plans: dict[int, OpPlan] = {}

    def observe(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return plan.run(*args, **kwargs)

    pass_by = observe

    def count(self, name: str, reason: str) -> None:
        pass


_BLIND = _Blind()


class ShadowMode(torchapi.DispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator call of its thread, and of autograd threads working for it."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observer = observer
        self._plans = observer.plans

    def go_blind(self) -> None:
        """Let calls pass from here on: nobody can take the mode off the stack of another thread."""
        self._observer = _BLIND

    @staticmethod
    def clear_blind() -> None:
        """Leave modes of this thread that another thread has ended."""
        while isinstance(mode := torchapi.top_mode(), ShadowMode) and mode._observer is _BLIND:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # By id: hashing an OpOverload calls Python. The plan holds the operator, so ids stay their own.
        plan = self._plans.get(id(func))
        if plan is None:
            plan = self._new_plan(func)
            if plan is None:
                return func(*args, **(kwargs or {}))
        for t in types:
            if t not in _PLAIN:
                # A subclass with its own dispatch unwraps itself; its inner plain operators come back to us.
                if torchapi.in_infra_mode():
                    break
                if t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                    return NotImplemented
                if issubclass(t, UninitializedTensorMixin):  # of lazy modules: no shape, no values yet
                    self._observer.count(plan.name, "uninitialized parameter")
                    return plan.run(*args, **(kwargs or {}))
        if plan.composite and torch.is_inference_mode_enabled():
            torchapi.push_mode(self)
            try:
                return torchapi.run_composite(func, args, kwargs or {})
            finally:
                torchapi.pop_mode(self)
        if plan.action is Action.PASS:
            return self._observer.pass_by(plan, args, kwargs or {})
        if torchapi.n_modes_below():
            return self._above_others(plan, args, kwargs or {})
        return self._observer.observe(plan, args, kwargs or {})

    def _above_others(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Other dispatch modes lie below ours."""
        if torchapi.in_infra_mode():
            return self._observer.pass_by(plan, args, kwargs)
        with torchapi.modes_aside(plan.run) as run:
            return self._observer.observe(dataclasses.replace(plan, run=run), args, kwargs)

    def _new_plan(self, func: Any) -> OpPlan | None:
        if not isinstance(func, torch._ops.OpOverload):
            self._observer.count(getattr(func, "name", lambda: str(func))(), "higher-order operator")
            return None
        with _planning:  # two threads must not give two operators one number
            plan = self._plans.get(id(func))
            if plan is None:
                plan = self._plans[id(func)] = make_plan(func, len(self._plans))
        return plan
