"""Which operators a function calls, with which inputs."""

from __future__ import annotations

from typing import Any

import torch

from shadowrun.intercept.plan import Action, OpPlan, make_plan
from shadowrun.intercept.torchapi import DispatchMode
from shadowrun.replay.case import exact_copy
from shadowrun.sweep.inputs import is_plain, leaves
from shadowrun.sweep.ways import mapped

__all__ = ["Calls"]


class Calls(DispatchMode):  # type: ignore[no-untyped-call]
    """Copies the calls of operators that return the same for the same inputs and write to nothing.

    Args:
        plans: Plans by operator; new ones are added.
    """

    def __init__(self, plans: dict[int, OpPlan]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._plans = plans
        self.found: list[tuple[OpPlan, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            plan = self._plans.get(id(func))
            if plan is None:
                plan = self._plans[id(func)] = make_plan(func, len(self._plans))
            tensors = list(leaves([args, kwargs]))
            if (
                _is_repeatable(plan)
                and tensors
                and all(is_plain(t) and not t.is_conj() and not t.is_neg() for t in tensors)
            ):
                self.found.append((plan, *mapped(args, kwargs, exact_copy)))
        return func(*args, **kwargs)


def _is_repeatable(plan: OpPlan) -> bool:
    named = plan.name.partition("::")[2]
    empty = named.startswith(("empty", "new_empty", "_local_scalar", "_fused_dropout"))
    replayed = plan.action is Action.REPLAY and not plan.mutated and not plan.unstable and not plan.custom
    return replayed and not empty and torch.Tag.nondeterministic_seeded not in plan.func.tags
