"""One of Dynamo's graphs, forward and backward together, as the program has it compiled.

The regions of the graph are judged one by one in `regions`. What a backend does to forward and backward together (its
partition, its compiler for backward graphs, its decompositions) shows only in results and gradients of the whole graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.compiled import torchcompile
from shadowrun.compiled.full_program import EagerResults
from shadowrun.compiled.graph import Graph, Snapshot, copy_graph, preserved_rng
from shadowrun.compiled.probe_graphs import ValueRecorder, with_random_inputs
from shadowrun.compiled.program import Copy, Program
from shadowrun.compiled.rounding import perturbed
from shadowrun.operators.case import exact_copy
from shadowrun.torch_private import version_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from shadowrun.compiled.accuracy import JudgedResult
    from shadowrun.types import Verdict

__all__ = ["DynamoGraphRun", "EagerFailed"]


class EagerFailed(Exception):  # noqa: N818 - no fault of what is checked
    """A graph that does not run eagerly by itself."""


class DynamoGraphRun(Program):
    """A graph of Dynamo's on the inputs of one call.

    Args:
        module: The graph.
        args: Its inputs; copied, before the graph writes to them.

    Attributes:
        snapshot: What the call began with; any tensor may be written to.
        has_sizes: Some inputs are sizes.
        is_random: Eager used random numbers when it was judged.
        has_ties: Whether a dropout keeps an element depends on the precision in which that is decided.
    """

    def __init__(self, module: fx.GraphModule, args: Sequence[Any]) -> None:
        # Under no_grad the program computes no gradients, whatever its parameters ask for.
        wanted = torch.is_grad_enabled()
        self._needs_grad = {k for k, t in enumerate(args) if wanted and _differentiable(t)}
        super().__init__(module.forward, (), {}, train=bool(self._needs_grad))
        self._module, self._forward = module, module.forward
        self._names = tuple(n.name for n in module.graph.nodes if n.op == "placeholder")
        plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        # All inputs count as written: a backend's code may write to any of them, whatever the graph says.
        self.snapshot = Snapshot.take(plain, [k for k, a in enumerate(plain) if isinstance(a, torch.Tensor)])
        self.is_random = self.has_ties = False
        self.has_sizes = any(type(a) is int for a in plain)
        # In the program they are results of operators, which may be written to where leaves may not.
        shared = {k for group in self.snapshot.shared if len(group) > 1 for k in group}
        # Clones would part tensors that share memory: those stay as they are.
        self._results = {k for k in self._needs_grad if not args[k].is_leaf} - shared

    def copy(self, *, wide: bool = False, generator: torch.Generator | None = None) -> Copy:
        """A copy to run, as `Program.copy` gives it."""

        def change(t: torch.Tensor) -> torch.Tensor:
            if wide:
                return _wide(exact_copy(t))
            return exact_copy(t) if generator is None else perturbed(exact_copy(t), generator)

        leaves = self.inputs(change)
        return _Leaves(self._called(self._forward), self._names, leaves, self.train, self.snapshot.rng)

    def judge(self, code: Callable[..., Any]) -> tuple[Verdict, tuple[JudgedResult, ...]]:
        """Run what was compiled, and judge it by eager.

        Args:
            code: What the backend returned for the graph.

        Raises:
            EagerFailed: The graph does not run eagerly.
            Exception: What the compiled code raised.
        """
        with preserved_rng(), torchcompile.no_modes():
            try:
                expected = EagerResults(self)
                self.is_random = bool(expected.random_results.kept)
            except Exception as error:
                raise EagerFailed(f"{type(error).__name__}: {error}") from error
            names, actual = self.copy().run(self._called(code))
            return expected.judge(names, actual)

    def module(self) -> fx.GraphModule:
        """A copy of the graph."""
        return copy_graph(self._module)

    def inputs(self, change: Callable[[torch.Tensor], torch.Tensor] = exact_copy) -> list[Any]:
        """Inputs for one run, each changed in some way."""
        with torch.no_grad():
            fresh = self.snapshot.fresh(change)
        return [t.requires_grad_() if k in self._needs_grad else t for k, t in enumerate(fresh)]

    def use_random_numbers(self, random_numbers: Sequence[torch.Tensor], *, rounded: bool = False) -> bool:
        """Have eager use the random numbers of Inductor's code.

        Args:
            random_numbers: Those of Inductor's code, in order.
            rounded: To the dtype of the result, before a dropout compares it with its rate.

        Returns:
            Whether it is known which random numbers are of which of eager's calls.
        """
        graph = Graph(self._module)
        with torch.no_grad(), preserved_rng(), torchcompile.no_modes():
            run = _RandomNodeRecorder(graph.module)
            run.run(*self.snapshot.fresh(), enable_io_processing=False)
        shapes = [
            tuple(v.shape) if isinstance(v := run.values[n.name], torch.Tensor) else None for n in run.random_nodes
        ]
        # An in-place random operator writes to its argument: its numbers cannot be handed over as a value.
        known = not run.in_place and all(n.target in _WITH_NUMBERS for n in run.random_nodes)
        # Numbers are assigned by order; other shapes show that Inductor has another order.
        if not known or shapes != [tuple(t.shape) for t in random_numbers]:
            return False
        for k, (n, numbers) in enumerate(zip(run.random_nodes, random_numbers, strict=True)):
            graph.module.register_buffer(name := f"_drawn_{k}", numbers)
            with graph.module.graph.inserting_before(n):
                given = graph.module.graph.get_attr(name)
            value = run.values[n.name]
            if n.target in _DROPOUT:
                # Rounding can move a number across the rate, so the two precisions keep other elements.
                short, rate = numbers.to(value.dtype), _rate(n)
                # Inductor chooses the precision in which it decides, for each dropout.
                kept = numbers > rate
                self.has_ties |= any(bool((kept != (t > rate)).any()) for t in (short, short.to(numbers.dtype)))
                setattr(graph.module, name, short if rounded else numbers)
            like = {} if n.target in _DROPOUT else {"dtype": value.dtype}
            n.args, n.kwargs, n.target = (given, *n.args), {**n.kwargs, **like}, _WITH_NUMBERS[n.target]
        graph.module.recompile()
        self._forward = graph.module.forward
        return True

    def with_eager_random_numbers(self) -> DynamoGraphRun | None:
        """The graph with eager's random numbers as further inputs: a compiler may generate others.

        Returns:
            None without random operators, or where one writes to a tensor.
        """
        graph = Graph(self._module)
        with torch.no_grad(), preserved_rng(), torchcompile.no_modes():
            run = _RandomNodeRecorder(graph.module)
            run.run(*self.snapshot.fresh(), enable_io_processing=False)
        if not run.random_nodes or run.in_place:
            return None
        probe = with_random_inputs(graph, self.snapshot, run.values, run.random_nodes)
        given = [t.detach() if isinstance(t, torch.Tensor) else t for t in probe.snapshot.inputs]
        n_own = len(self.snapshot.inputs)
        for k, t in enumerate(given):
            if k in self._needs_grad or (k >= n_own and self.train and t.is_floating_point()):
                given[k] = t.requires_grad_()
        with torch.set_grad_enabled(self.train):
            return DynamoGraphRun(probe.graph.module, given)

    def _called(self, code: Callable[..., Any]) -> Callable[..., Any]:
        def call(*leaves: Any) -> list[Any]:
            given = [t.clone() if k in self._results else t for k, t in enumerate(leaves)]
            out = code(*given)
            # The written inputs are results too: what a graph does in place shows in no return.
            return [*(out if isinstance(out, (list, tuple)) else (out,)), *(given[k] for k in sorted(self._results))]

        return call


class _RandomNodeRecorder(ValueRecorder):
    """Notes which nodes move the random stream."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.random_nodes: list[fx.Node] = []
        self.in_place = False

    def run_node(self, n: fx.Node) -> Any:
        # Dynamo's graphs call functions, which have no tag for randomness: what moves the stream is random.
        before, tensors = torch.get_rng_state(), [self.env[a] for a in n.all_input_nodes]
        versions = [version_of(t) for t in tensors if isinstance(t, torch.Tensor)]
        value = super().run_node(n)
        if not torch.equal(before, torch.get_rng_state()):
            self.random_nodes.append(n)
            self.in_place |= versions != [version_of(t) for t in tensors if isinstance(t, torch.Tensor)]
        return value


def _dropped(numbers: torch.Tensor, x: torch.Tensor, p: float = 0.5, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """Dropout by numbers between 0 and 1, as torch's decomposition of it uses them."""
    # `>` and not `>=`, and a product with the reciprocal: in both the last bit would differ from torch's
    # decomposition.
    return x * (numbers > p) * (1 / (1 - p))


def _rate(n: fx.Node) -> Any:
    return n.kwargs.get("p", n.args[1] if len(n.args) > 1 else 0.5)


def _given_numbers(numbers: torch.Tensor, *_args: Any, dtype: torch.dtype, **_kwargs: Any) -> torch.Tensor:
    return numbers.to(dtype)


_DROPOUT: Final = (torch.nn.functional.dropout, torch.dropout)
# Random functions, and what does the same with given random numbers.
_WITH_NUMBERS: Final[dict[Any, Any]] = {
    **dict.fromkeys(_DROPOUT, _dropped),
    **dict.fromkeys((torch.rand, torch.rand_like, torch.randn, torch.randn_like), _given_numbers),
}


class _Leaves(Copy):
    """Inputs by the names that they have in the graph."""

    def __init__(self, function: Any, names: Sequence[str], leaves: Sequence[Any], train: bool, rng: Any) -> None:
        super().__init__(function, tuple(leaves), {}, train, rng)
        self._named = [(n, t) for n, t in zip(names, leaves, strict=True) if isinstance(t, torch.Tensor)]

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._named


def _differentiable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _wide(t: torch.Tensor) -> torch.Tensor:
    if t.is_complex():
        return t.to(torch.complex128)
    return t.to(torch.float64) if t.is_floating_point() else t
