"""One call with its values, ready to be run again: what judges and hypotheses work on."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from shadowrun.operators.facts import facts
from shadowrun.strided import span
from shadowrun.torch_private import negated_view, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shadowrun.operators.facts import OpFacts

__all__ = ["Arguments", "Case", "Value", "exact_copy", "flat_results", "item_of", "tensors"]

Value: TypeAlias = "torch.Tensor | int | float | bool | complex | None"
Arguments: TypeAlias = "tuple[tuple[Any, ...], dict[str, Any]]"


@dataclass(frozen=True, slots=True)
class Case:
    """A call whose results differ on the two platforms.

    Attributes:
        func: The operator.
        args, kwargs: Its inputs as they were before the call, on the CPU, layouts exact. They must
            not be modified: run on `fresh_inputs()`.
        mutated: Names (in the schema) of the arguments that the call writes to.
        names: One for each result: ``output 0`` or the name of a mutated argument.
        actual, expected: The target's and the reference's results, on the CPU, in that order of names.
        run_target, run_reference: Run the operator there on CPU inputs (which they may modify) and give the
            results, on the CPU, in the same order. They raise what the platform raises.
        same_device: Both platforms are the CPU, with other settings.
        previous_actual: What the target returned to its previous call of this operator with results of
            the same form, if that is known.
        run_at_offsets: Like `run_target`, on copies at the storage offsets that the inputs of the call had; None
            where none had any.
    """

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mutated: tuple[str, ...]
    names: tuple[str, ...]
    actual: tuple[Value, ...]
    expected: tuple[Value, ...]
    run_target: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Value, ...]]
    run_reference: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Value, ...]]
    same_device: bool = False
    previous_actual: tuple[Value, ...] | None = field(default=None)
    run_at_offsets: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Value, ...]] | None = field(default=None)

    @property
    def op(self) -> str:
        """``aten::add.Tensor``."""
        return str(self.func.name())  # type: ignore[no-untyped-call]

    @property
    def facts(self) -> OpFacts:
        """The operator's row."""
        return facts(self.op)

    def arguments(self) -> dict[str, Any]:
        """Arguments by their names in the schema, defaults included."""
        named: dict[str, Any] = {}
        for i, (name, has_default, default) in enumerate(_parameters(self.func)):
            if i < len(self.args):
                named[name] = self.args[i]
            elif name in self.kwargs:
                named[name] = self.kwargs[name]
            elif has_default:
                named[name] = list(default) if isinstance(default, list) else default
        return named

    def fresh_inputs(self, convert: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Arguments:
        """Copy the inputs, keeping layouts and identity (`add_(x, x)` remains a call on one tensor).

        Args:
            convert: Applied to each tensor instead of an exact copy; it must return a new tensor.
        """
        memo: dict[int, torch.Tensor] = {}
        change = convert or exact_copy
        return tuple(_copied(a, memo, change) for a in self.args), {
            k: _copied(v, memo, change) for k, v in self.kwargs.items()
        }


@functools.lru_cache(maxsize=1024)
def _parameters(func: torch._ops.OpOverload) -> tuple[tuple[str, bool, Any], ...]:
    """Name of each argument, and its default, if it has any: reading a schema takes longer than the rest."""
    arguments = schema_of(func).arguments
    return tuple((a.name, a.has_default_value(), a.default_value) for a in arguments)


def item_of(name: str) -> int | None:
    """Which item of a list a result is: 3 for ``self[3]`` and ``output 0[3]``; None for others."""
    item = name.rpartition("[")[2].removesuffix("]")
    return int(item) if item.isdecimal() else None


def tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """All tensors among arguments, those in lists included."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (v for v in value if isinstance(v, torch.Tensor))


# At module level, not a closure that calls itself: that would be a reference cycle, and keep the user's tensors alive
# until the garbage collector runs (autograd then clones gradients that it would reuse).
def _copied(value: Any, memo: dict[int, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        # `add_(x, x)` must stay a call on one tensor: what it writes is what it reads.
        if id(value) not in memo:
            memo[id(value)] = change(value)
        return memo[id(value)]
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(v, memo, change) for v in value)
    return value


def exact_copy(t: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy a tensor with its strides, also where it is sliced or expanded (`clone` compacts those).

    Args:
        t: Any tensor.
        dtype: Of the copy, if another.
    """
    if t.is_conj() and t.layout == torch.strided:
        return exact_copy(t.conj(), dtype).conj()
    if t.is_neg() and t.layout == torch.strided:
        return negated_view(exact_copy(negated_view(t), dtype))
    if t.layout != torch.strided or t.is_contiguous():
        return t.detach().clone() if dtype is None else t.detach().to(dtype, copy=True)
    # The whole span of memory: kernels choose paths by strides, so the copy must have the same gaps.
    flat = t.detach().as_strided((span(t.shape, t.stride()),), (1,), t.storage_offset())
    copied = flat.clone() if dtype is None else flat.to(dtype, copy=True)
    return copied.as_strided(t.shape, t.stride(), 0)


def flat_results(
    func: torch._ops.OpOverload,
    mutated: Sequence[str],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    results: Any,
) -> tuple[tuple[str, ...], tuple[Value, ...]]:
    """List all values that a call produced: what it returned anew, then the arguments it wrote to.

    Returns:
        Names and values. A returned alias of a mutated argument is listed once, as the argument; a
        list argument gives ``self[0]``, ``self[1]``, ….
    """
    names: list[str] = []
    values: list[Value] = []
    for label, value in _fresh_returns(func, results):
        names.append(f"output {label}")
        values.append(value)
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.name not in mutated:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        if isinstance(value, (list, tuple)):
            names += [f"{argument.name}[{k}]" for k in range(len(value))]
            values += list(value)
        elif value is not None:
            names.append(argument.name)
            values.append(value)
    return tuple(names), tuple(values)


def _fresh_returns(func: torch._ops.OpOverload, results: Any) -> Iterator[tuple[str, Value]]:
    declared = schema_of(func).returns
    returned = results if len(declared) > 1 and isinstance(results, (tuple, list)) else (results,)
    for i, value in enumerate(returned):
        # Listed below as the argument that it aliases; twice would count a difference twice.
        if i < len(declared) and declared[i].alias_info is not None:
            continue
        if isinstance(value, (list, tuple)):
            yield from ((f"{i}[{k}]", v) for k, v in enumerate(value))
        elif value is not None:
            yield str(i), value
