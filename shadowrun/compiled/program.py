"""A function or model with its inputs, which can run any number of times from the same state.

Each run gets copies of model, inputs and optimizer and the same random state. The user's buffers and gradients stay as
they are.
"""

from __future__ import annotations

import contextlib
import copy
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.compiled import torchcompile
from shadowrun.compiled.graph import cuda_is_used, results_of, rng_state, set_rng_state
from shadowrun.compiled.rounding import (
    Float64Mode,
    PerturbedRounding,
    RandomRecorder,
    RandomResults,
    filled_memory,
    perturbed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.operators.case import Value

__all__ = ["GRADIENT", "Copy", "Program"]

GRADIENT: Final = "gradient of "
"""Names of gradients begin so."""
_STATE = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer)


class Program:
    """What is checked.

    Args:
        function: A function or a module.
        args: Its positional arguments.
        kwargs: Its arguments by name.
        train: Also compute gradients.

    Attributes:
        name: Of the function or model.
        train: Also compute gradients.
        mantissa: Bits of the shortest mantissa that runs with other roundings have met.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool
    ) -> None:
        self._function, self._args, self._kwargs = function, args, dict(kwargs)
        self.train = train
        self.mantissa = 52
        self._rng = rng_state()
        self.name = getattr(function, "__name__", type(function).__name__)

    def copy(self, *, wide: bool = False, generator: torch.Generator | None = None) -> Copy:
        """A copy to run.

        Args:
            wide: In float64.
            generator: With each number perturbed by about one unit in the last place.
        """
        memo: dict[int, Any] = {}
        # First, with one memo for all: a tensor that model and inputs share is one tensor in the copy too.
        function = _own(self._function, memo)
        args, kwargs = _copied((self._args, self._kwargs), memo)
        for _, t in _state(self._function, (*self._args, *self._kwargs.values())):
            if t.grad is not None and id(t) in memo:  # deepcopy leaves it out
                memo[id(t)].grad = t.grad.detach().clone()
        made = Copy(function, args, kwargs, self.train, self._rng)
        if wide or generator is not None:
            made.change(wide=wide, generator=generator)
        return made

    def eager(self) -> tuple[tuple[str, ...], tuple[Value, ...], RandomResults]:
        """Results of an eager run, and those of its random operators."""
        random_results = RandomResults()
        with RandomRecorder(random_results):
            names, values = self.copy().run()
        return names, values, random_results

    def truth(self, random_results: RandomResults) -> Sequence[Value] | None:
        """Results in float64; None where it does not run so."""
        try:
            whole = self.copy(wide=True)
            # An operator may lack a float64 kernel, and a program may insist on its dtype: then there is no oracle.
            with Float64Mode(random_results):
                return whole.run()[1]
        except Exception:
            return None

    def perturbed(self, generator: torch.Generator) -> Sequence[Value]:
        """Results of an eager run with other roundings."""
        whole = self.copy(generator=generator)
        with PerturbedRounding(generator) as mode:
            values = whole.run()[1]
        self.mantissa = min(self.mantissa, mode.mantissa)
        return values

    def filled(self, zeros: bool) -> Sequence[Value] | None:
        """Results of an eager run on `filled_memory`; None where it does not run so."""
        whole = self.copy()
        try:
            with filled_memory(0 if zeros else None):
                return whole.run()[1]
        except Exception:  # an operator may refuse NaN
            return None


class Copy:
    """One copy of a program, which keeps its own state."""

    def __init__(self, function: Any, args: Any, kwargs: Any, train: bool, rng: Any) -> None:
        self.function, self._args, self._kwargs = function, args, kwargs
        self._train, self._rng = train, rng
        self._holders = [function, args, kwargs]

    def run(self, function: Callable[..., Any] | None = None) -> tuple[tuple[str, ...], tuple[Value, ...]]:
        """Run once, forward and backward.

        Args:
            function: What to call instead of the function itself: its compiled form.

        Returns:
            Names and values of outputs, gradients and the state afterwards.
        """
        # Each run gets the random numbers of the first one.
        set_rng_state(self._rng)
        with torch.set_grad_enabled(self._train):
            called = self.function if function is None else function
            wanted = self._wanted()
            out = called(*self._args, **self._kwargs)
            results = dict(_tensors("output", out))
            if self._train:
                results |= self._gradients(results, wanted)
        # After the gradients: the state is what the program leaves behind, such as buffers of batch norm.
        for name, t in self._state():
            results[name] = t
            if t.grad is not None and t.is_leaf:
                results[f"{name}.grad"] = t.grad
        return tuple(results), tuple(results_of([*results.values()]))

    def seconds(self, function: Callable[..., Any]) -> float:
        """Time of one run, forward and backward."""
        began = time.perf_counter()
        with torch.set_grad_enabled(self._train):
            wanted = self._wanted()
            outputs = dict(_tensors("output", function(*self._args, **self._kwargs)))
            if self._train:
                self._gradients(outputs, wanted)
        if cuda_is_used():
            # Kernels run asynchronously: without the wait their launches would be timed.
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def change(self, *, wide: bool, generator: torch.Generator | None) -> None:
        """Widen or move all floating numbers in place."""
        with torch.no_grad():
            for _, t in self._state():
                # Put aside: torch refuses a gradient of another dtype than its tensor's.
                grad, t.grad = t.grad if t.is_leaf else None, None
                if wide and t.is_floating_point():
                    # By `.data`, since modules, optimizers and closures hold this very tensor.
                    t.data = t.data.to(torch.float64)
                    t.grad = None if grad is None else grad.to(torch.float64)
                elif generator is not None:
                    t.data = perturbed(t.data, generator)
                    t.grad = None if grad is None else perturbed(grad, generator)

    def _wanted(self) -> list[tuple[str, torch.Tensor]]:
        """What gradients are taken of: asked before the run, since an input that it writes to may require them then."""
        return [(name, t) for name, t in self._state() if t.requires_grad]

    def _gradients(
        self, results: dict[str, torch.Tensor], wanted: Sequence[tuple[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        outputs = [t for t in results.values() if t.requires_grad]
        if not outputs or not wanted:
            return {}
        # Random, not ones: a constant direction hides faults that move values between elements.
        along = _directions(outputs)
        try:
            with _without_autocast():
                # Not `backward()`: the gradients that the program keeps in `.grad` are a part of the compared state.
                grads = torch.autograd.grad(outputs, [t for _, t in wanted], along, allow_unused=True)
        except RuntimeError as error:
            if "second time" in str(error):  # the function called `backward` itself: its gradients are in `.grad`
                return {}
            raise
        gradients = {}
        for (name, _), g in zip(wanted, grads, strict=True):
            if isinstance(g, torch.Tensor):  # None where it does not depend on it
                gradients[f"{GRADIENT}{name}"] = g
        return gradients

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        return _state(self.function, (*self._args, *self._kwargs.values()))


def _directions(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Directions of the gradients, the same in each run; they move no random generator of the program."""
    generator = torch.Generator().manual_seed(0x5EED)
    with torchcompile.no_modes():
        # Numbers of bfloat16 are exact in every floating dtype, so float64 and 16-bit runs get the same direction.
        numbers = (torch.randn(t.shape, generator=generator).to(torch.bfloat16) for t in outputs)
        return [d.to(t.device, t.dtype) for d, t in zip(numbers, outputs, strict=True)]


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Backward passes run without: what compiled code does there was fixed when it was compiled."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _state(function: Any, inputs: tuple[Any, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, what an optimizer keeps, and tensors among the inputs, each once."""
    seen: set[int] = set()
    for holder in (*_holders(function), inputs):
        for name, t in _named(holder):
            # Tied weights are one tensor with two names.
            if id(t) not in seen:
                seen.add(id(t))
                yield name, t


def _named(holder: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(holder, torch.nn.Module):
        yield from holder.named_parameters()
        yield from holder.named_buffers()
    elif isinstance(holder, torch.optim.Optimizer):
        # An optimizer holds its parameters without names.
        parameters = [p for group in holder.param_groups for p in group["params"]]
        for i, p in enumerate(parameters):
            yield f"parameter {i}", p
            yield from _tensors(f"state of parameter {i}", holder.state.get(p, {}))
    elif isinstance(holder, torch.Tensor):
        yield "captured", holder
    else:
        yield from _tensors("input", holder)


def _holders(function: Any) -> Iterator[Any]:
    """The function's state: itself, what it is bound to, and what it has captured."""
    if isinstance(function, _STATE):
        yield function
    elif isinstance(function, types.MethodType):
        yield function.__self__
    elif isinstance(function, types.FunctionType):
        cells = [c.cell_contents for c in function.__closure__ or ()]
        # A function at the top of a script uses its model as a global.
        names = [function.__globals__.get(n) for n in function.__code__.co_names]
        for value in (*cells, *names):
            if isinstance(value, _STATE):
                yield value


def _own(function: Any, memo: dict[int, Any]) -> Any:
    """A function with copies of the state that it refers to."""
    # `deepcopy` returns a function itself, with the very model that it has captured.
    if not isinstance(function, types.FunctionType):
        return _copied(function, memo)
    cells = tuple(types.CellType(_copied(c.cell_contents, memo)) for c in function.__closure__ or ())
    met: dict[str, Any] = {n: function.__globals__.get(n) for n in function.__code__.co_names}
    state = {n: v for n, v in met.items() if isinstance(v, _STATE)}
    # Only where a global is state: a copied namespace does not see what the module assigns later.
    spaces = {**function.__globals__, **{n: _copied(v, memo) for n, v in state.items()}} if state else None
    if not cells and spaces is None:
        return function
    made = types.FunctionType(
        function.__code__,
        function.__globals__ if spaces is None else spaces,
        function.__name__,
        function.__defaults__,
        cells or None,
    )
    # The constructor takes these from Python 3.13 on.
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    # `deepcopy` refuses tensors that are no leaves of the graph.
    if isinstance(value, torch.Tensor) and not value.is_leaf:
        if id(value) not in memo:
            memo[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return memo[id(value)]
    # A named tuple takes its fields one by one: `deepcopy` below rebuilds it.
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_copied(v, memo) for v in value)
    if isinstance(value, dict):
        return {k: _copied(v, memo) for k, v in value.items()}
    if isinstance(value, types.FunctionType):
        return _own(value, memo)
    return copy.deepcopy(value, memo)


def _tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors in nested results, with names."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _tensors(f"{name}[{k!r}]", v)
    elif isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            yield from _tensors(f"{name}[{i}]", v)
