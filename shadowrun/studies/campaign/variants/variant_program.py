"""A variant as a program: its inputs on a device, and a function that runs it there and returns all results."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.torch_operators import unwrapped
from shadowrun.replay.copies import move, tensors_in
from shadowrun.studies.zoo.graph import Graph, Input, Runner
from shadowrun.studies.zoo.input_values import make_input, make_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shadowrun.studies.campaign.variants.variant import Variant

    Call = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]

__all__ = ["DevicePlacement", "exact_results", "program_of"]

_CPU: Final = torch.device("cpu")


def program_of(
    variant: Variant,
    call: Call | None = None,
    on_backward: Callable[[], None] = lambda: None,
) -> Callable[[torch.device], Callable[[], list[Any]]]:
    """A variant as a program: inputs on a device, and a function that runs there and returns all results.

    Args:
        variant: The variant.
        call: Calls an operator; None for the usual way.
        on_backward: Called before a backward pass.
    """
    graph, seed = variant.graph, variant.recipe.seed
    values = make_inputs(graph.inputs, seed)

    def prepare(device: torch.device) -> Callable[[], list[Any]]:
        with torch.no_grad():
            inputs = [move(v, device) if device.type != "cpu" else _copy(v) for v in values]
        if variant.execution.backward:
            for described, value in zip(graph.inputs, inputs, strict=True):
                value.requires_grad_(described.requires_grad)
        runner = Runner(graph, device, call)
        return lambda: _results(variant, runner, inputs, device, on_backward)

    return prepare


def _results(
    variant: Variant,
    runner: Runner,
    inputs: list[torch.Tensor],
    device: torch.device,
    on_backward: Callable[[], None],
) -> list[Any]:
    """Outputs, gradients, and the inputs that were written to."""
    how = variant.execution
    autocast = torch.autocast(device.type, getattr(torch, how.autocast)) if how.autocast else contextlib.nullcontext()
    with autocast, contextlib.nullcontext() if how.backward else torch.no_grad():
        # An in-place call on a leaf raises: the program of a user writes to results of other calls, too.
        given = [v.clone() if v.requires_grad and variant.graph.writes else v for v in inputs]
        out = runner(given)
    results = [t for t in out if isinstance(t, torch.Tensor)]
    if not how.backward:
        return [*results, *(inputs if variant.graph.writes else ())]
    wanted = [v for v in inputs if v.requires_grad]
    loss = [t for t in results if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if not wanted or not loss:
        return results
    directions = [
        make_input(Input(f"direction {k}", tuple(t.shape), t.dtype), variant.recipe.seed).to(device)
        for k, t in enumerate(loss)
    ]
    on_backward()
    return [*results, *torch.autograd.grad(loss, wanted, directions, allow_unused=True)]


def _copy(t: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and offset."""
    if t.is_contiguous() and not t.storage_offset():
        return t.clone()
    whole = t.as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0).clone()
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


def exact_results(variant: Variant) -> list[torch.Tensor] | None:
    """Results of the reference in float64; None where the program does not run in it."""
    try:
        wide = replace(variant, graph=_in_float64(variant.graph), execution=replace(variant.execution, autocast=""))
        return [t for t in program_of(wide)(_CPU)() if isinstance(t, torch.Tensor)]
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return None


def _in_float64(graph: Graph) -> Graph:
    """The graph with float64 in the place of each other real floating-point dtype, in inputs and arguments."""

    def widened(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(widened(v) for v in value)
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    return Graph(
        tuple(replace(i, dtype=widened(i.dtype)) for i in graph.inputs),
        tuple(
            replace(n, args=widened(n.args), kwargs=tuple((k, widened(v)) for k, v in n.kwargs)) for n in graph.nodes
        ),
        graph.outputs,
    )


# Results that a device leaves elsewhere, and the later calls that raise because of them.
#
# The lazy device returns lists of tensors on the CPU: each later call with one of them and a tensor of the device
# raises. These exceptions are effects of one fault, so they are counted for the operator whose result lies elsewhere.


class DevicePlacement:
    """Watches where results of a program's calls lie.

    Args:
        call: Calls an operator.
        device: Where each result should lie.

    Attributes:
        origin: Operator whose result, which lies elsewhere, an argument of the call that raised comes from; empty
            where there is none.
        where: Device of that result.
    """

    def __init__(self, call: Call, device: torch.device) -> None:
        self._call, self._device = call, device
        self._elsewhere: dict[int, tuple[torch.Tensor, str, str]] = {}
        """By id, each kept so that its id stays its own: with the operator at fault, and the device."""
        self.origin = self.where = ""

    def __call__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator."""
        given = (self._elsewhere.get(id(t)) for t in tensors_in((*args, *kwargs.values())))
        wrong = next(filter(None, given), None)
        try:
            out = self._call(op, args, kwargs)
        except Exception:
            if wrong is not None:
                _, self.origin, self.where = wrong
            raise
        for t in tensors_in([out]):
            # The wrapper of functionalization reports the device of the program, not that of what it wraps.
            device = unwrapped(t).device
            if device.type != self._device.type:
                self._elsewhere[id(t)] = (t, *(wrong[1:] if wrong is not None else (op.name(), str(device))))
        return out
