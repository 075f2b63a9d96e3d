"""What a call produced: the values to compare, by plan; and how to hand another device's results back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from shadowrun.intercept.plan import Argument, OpPlan
    from shadowrun.replay.case import Value

__all__ = ["argument", "hand_back", "values"]


def argument(a: Argument, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value passed for a schema argument."""
    if a.kwarg_only or a.position >= len(args):
        return kwargs.get(a.name)
    return args[a.position]


def values(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Value]:
    """Fresh returns, then mutated arguments, in the order of `case.flat_results`."""
    found: list[Value] = []
    if plan.n_returns == 1:
        if plan.fresh:
            _extend(found, out)
    else:
        for i in plan.fresh:
            if i not in plan.uninitialised:
                _extend(found, out[i])
    for a in plan.mutated:
        value = argument(a, args, kwargs)
        if isinstance(value, (list, tuple)):
            found.extend(value)
        elif value is not None:
            found.append(value)
    return found


def _extend(found: list[Value], value: Any) -> None:
    if isinstance(value, (list, tuple)):
        found.extend(value)
    elif value is not None:
        found.append(value)


def names(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[str, ...]:
    """Names for `values`, in the same order: ``output 0``, ``self``, ``self[2]``."""
    found: list[str] = []
    returned = (out,) if plan.n_returns == 1 else out
    for i in plan.fresh:
        if plan.n_returns > 1 and i in plan.uninitialised:
            continue
        value = returned[i]
        if isinstance(value, (list, tuple)):
            found += [f"output {i}[{k}]" for k in range(len(value))]
        elif value is not None:
            found.append(f"output {i}")
    for a in plan.mutated:
        value = argument(a, args, kwargs)
        if isinstance(value, (list, tuple)):
            found += [f"{a.name}[{k}]" for k in range(len(value))]
        elif value is not None:
            found.append(a.name)
    return tuple(found)


def hand_back(
    plan: OpPlan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: tuple[tuple[Any, ...], dict[str, Any], Any],
    device: torch.device,
) -> Any:
    """Give the user the results of a run elsewhere as his device would have: fresh ones moved, mutated ones written.

    Args:
        plan: The operator.
        args: The user's own positional arguments.
        kwargs: The user's own arguments by name.
        run: Arguments and result of the run elsewhere.
        device: Where the user's program runs.
    """
    other_args, other_kwargs, out = run
    for a in plan.mutated:
        mine, theirs = argument(a, args, kwargs), argument(a, other_args, other_kwargs)
        pairs = zip(mine, theirs, strict=True) if isinstance(mine, (list, tuple)) else ((mine, theirs),)
        for to, by in pairs:
            if to is not None:
                if to.shape != by.shape:
                    to.resize_(by.shape)
                to.copy_(by)
    returns = plan.func._schema.returns
    if not returns:
        return None
    results = (out,) if len(returns) == 1 else out
    handed = []
    for declared, value in zip(returns, results, strict=True):
        if declared.alias_info is not None and declared.alias_info.is_write:
            handed.append(_aliased(plan, declared.alias_info.before_set, args, kwargs))
        else:
            handed.append(_moved(value, device))
    return handed[0] if len(returns) == 1 else tuple(handed)


def _aliased(plan: OpPlan, alias_set: set[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    schema = plan.func._schema.arguments
    for a in plan.mutated:
        info = schema[a.position].alias_info
        if info is not None and info.before_set & alias_set:
            return argument(a, args, kwargs)
    raise LookupError(f"{plan.name}: no argument for a returned alias")


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        moved = value.to(device)
        # What a worker process returned may lie in memory that it shares, and that cannot grow.
        return moved.clone() if moved is value else moved
    if isinstance(value, (list, tuple)):
        return [_moved(v, device) for v in value]
    return value
