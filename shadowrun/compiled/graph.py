"""One graph before its compilation, and the state that a call of it began with.

`Graph` runs it eagerly, in float64, and with perturbed rounding; `Snapshot` has the inputs, with the memory that they
share, and the random generators, so that each run begins alike.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shadowrun.compiled.accuracy import ReferenceRuns
from shadowrun.compiled.rounding import (
    Float64Mode,
    PerturbedRounding,
    RandomRecorder,
    RandomResults,
    filled_memory,
    is_random,
    perturbed,
)
from shadowrun.intercept.untrusted.checked_calls import looks_of_file
from shadowrun.operators.case import exact_copy
from shadowrun.replay.copies import storage_groups
from shadowrun.strided import span
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shadowrun.operators.case import Value

    Change = Callable[[torch.Tensor], torch.Tensor]

__all__ = [
    "Graph",
    "Snapshot",
    "copy_graph",
    "cuda_is_used",
    "nbytes",
    "node_origin",
    "operator_name",
    "preserved_rng",
    "results_of",
    "rng_state",
    "set_rng_state",
    "user_line",
    "without_layouts",
]


class Graph:
    """A graph of plain operators, as it was before a compiler changed it.

    Attributes:
        module: The graph, with the metadata of its nodes.
        is_random: Whether it has random operators.
        n_operators: Calls in it.
        written: Positions of the inputs that it writes to.
        statistics: Positions of the results that a norm saves for its own backward.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = copy_graph(module)
        self.is_random = any(is_random(n.target, n.args, n.kwargs) for n in module.graph.nodes)
        self.n_operators = sum(_is_call(n) for n in module.graph.nodes)
        self.written = _written(self.module.graph)
        self.statistics = _statistics(self.module.graph)

    def eager(
        self, inputs: Sequence[Any], random_results: RandomResults | None = None
    ) -> tuple[tuple[str, ...], tuple[Value, ...]]:
        """Run eagerly.

        Args:
            inputs: May be written to.
            random_results: Gets the results of random operators.

        Returns:
            Names and values of all results: what it returns, then the inputs that it writes to.
        """
        # Inputs are flat already: `enable_io_processing` would apply the pytree of an exported graph to them.
        with torch.no_grad(), RandomRecorder(random_results or RandomResults()), looks_of_file():
            out = fx.Interpreter(self.module).run(*inputs, enable_io_processing=False)
        return self.names(), self.values(out, inputs)

    def names(self) -> tuple[str, ...]:
        """One for each result: the name of its node."""
        (output,) = [n for n in self.module.graph.nodes if n.op == "output"]
        flat = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
        returned = [str(n) for n in flat if isinstance(n, fx.Node)]
        inputs = [n.name for n in self.module.graph.nodes if n.op == "placeholder"]
        return (*returned, *(inputs[k] for k in self.written))

    def values(self, out: Any, inputs: Sequence[Any]) -> tuple[Value, ...]:
        """Results in the order of `names`."""
        flat = out if isinstance(out, (list, tuple)) else (out,)
        (output,) = [n for n in self.module.graph.nodes if n.op == "output"]
        declared = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
        returned = [v for n, v in zip(declared, flat, strict=True) if isinstance(n, fx.Node)]
        return tuple(results_of([*returned, *(inputs[k] for k in self.written)]))

    def runs(self, snapshot: Snapshot, random_results: RandomResults) -> ReferenceRuns:
        """The same again, for the judge."""
        generator = torch.Generator().manual_seed(0x5EED)
        # Bits of float64, until an operator with a shorter mantissa is met.
        met = [52]

        def truth() -> Sequence[Value] | None:
            try:
                inputs = snapshot.fresh(_wide)
                with torch.no_grad(), Float64Mode(random_results), looks_of_file():
                    out = fx.Interpreter(copy_graph(self.module)).run(*inputs, enable_io_processing=False)
            # An operator without a float64 kernel: the graph then has no oracle.
            except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
                return None
            return self.values(out, inputs)

        def perturbed_run() -> Sequence[Value]:
            inputs = snapshot.fresh(lambda t: perturbed(exact_copy(t), generator))
            with torch.no_grad(), PerturbedRounding(generator) as mode, looks_of_file():
                out = fx.Interpreter(self.module).run(*inputs, enable_io_processing=False)
            met.append(mode.mantissa)
            return self.values(out, inputs)

        def filled_run(zeros: bool) -> Sequence[Value] | None:
            try:
                inputs = snapshot.fresh()
                with filled_memory(0 if zeros else None):
                    return self.eager(inputs)[1]
            except RuntimeError:  # an operator may refuse NaN
                return None

        return ReferenceRuns(truth, perturbed_run, filled_run, self.statistics, lambda: min(met))


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph with what is known of its nodes; parameters and constants are shared."""
    # Not `deepcopy` of the module, which would copy all parameters.
    return fx.GraphModule(module, copy.deepcopy(module.graph))


def without_layouts(module: fx.GraphModule) -> fx.GraphModule:
    """A graph with reshapes for views, in place.

    A view holds only for the layout that eager gave to what it views. What replaces an operator may give another (a
    `cat` with an empty tensor, decomposed, keeps that of its other part); in the user's program the same line would be
    traced anew on that. And what Inductor's forward code saves for the backward has the strides that it likes
    (convolutions: channels last); Inductor compiles a view of that as a reshape, too.
    """
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    module.recompile()
    return module


def node_origin(node: fx.Node) -> tuple[str, str]:
    """Line of the user's code and path of the module that a node comes from; empty where that is not known.

    A node of a backward graph is given those of its forward node.
    """
    # Graphs that are kept for long have only this; the rest of `meta` takes memory.
    if "place" in node.meta:  # all that was kept
        site, module = node.meta["place"]
        return str(site), str(module)
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = ""
    if stack:
        last = list(stack.values())[-1]
        path = str(last[0] if isinstance(last, tuple) else last)
    return user_line(node), _readable(path)


def user_line(node: fx.Node, outside: str = "\0") -> str:
    """The innermost line of a node, of files whose paths do not begin with `outside`; empty if not known."""
    trace = node.meta.get("stack_trace") or node.meta.get("fwd_nn_module_stack_trace") or ""
    for line in reversed([line.strip() for line in str(trace).splitlines()]):
        if line.startswith("File "):
            file, number, function = (part.strip() for part in line.removeprefix("File ").split(",", 2))
            if not file.strip('"').startswith(outside):
                return f"{file.strip(chr(34))}:{number.removeprefix('line ')} {function}"
    return ""


def operator_name(node: fx.Node) -> str:
    """``aten.relu.default``; of a graph of Dynamo's, ``linear`` or ``view``."""
    if isinstance(node.target, (str, torch._ops.OpOverload)):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def results_of(values: Sequence[Any]) -> list[Value]:
    """Values on the CPU."""
    return [v.detach().to("cpu") if isinstance(v, torch.Tensor) else v for v in values]


def _readable(path: str) -> str:
    """``layers.0`` for Dynamo's ``L['self']._modules['layers']._modules['0']`` or ``L['self'].layers.0``."""
    path = re.sub(r"^[LG]\['\w+'\]\.?", "", path)
    return re.sub(r"(?:\._modules)?\['([^']*)'\]", r".\1", path).strip(".")


def _written(graph: fx.Graph) -> tuple[int, ...]:
    """Positions of the inputs that a graph writes to."""
    positions = set()
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, value in zip(schema_of(node.target).arguments, node.args, strict=False):
            # Graphs of AOTAutograd are functional but for the writes at their end, which go to inputs by positional
            # arguments.
            if argument.alias_info is not None and argument.alias_info.is_write and value in inputs:
                positions.add(inputs.index(value))
    return tuple(sorted(positions))


def _statistics(graph: fx.Graph) -> frozenset[int]:
    """Positions of the results that are the mean or the deviation of a norm."""
    (output,) = [n for n in graph.nodes if n.op == "output"]
    flat = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    positions = []
    for k, node in enumerate(n for n in flat if isinstance(n, fx.Node)):
        source: Any = node
        while isinstance(source, fx.Node) and source.target in _SAME:
            source = source.args[0]
        if isinstance(source, fx.Node) and source.target is operator.getitem and source.args[1] in (1, 2):
            norm = source.args[0]
            if isinstance(norm, fx.Node) and _NORM.fullmatch(operator_name(norm)):
                positions.append(k)
    return frozenset(positions)


# AOTAutograd puts these around what the forward saves for the backward.
_SAME = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
_NORM = re.compile(r"aten\._?(native|cudnn|miopen|fused)_(group|layer|batch|rms)_norm\w*\.\w+")


def _is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module") and node.target is not operator.getitem


def _wide(t: torch.Tensor) -> torch.Tensor:
    if t.is_complex():
        return exact_copy(t).to(torch.complex128)
    return exact_copy(t).to(torch.float64) if t.is_floating_point() else exact_copy(t)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a run began with.

    Attributes:
        inputs: Copies, with the strides of the originals.
        rng: State of the random generators.
        shared: Positions of the inputs that share memory, group by group.
    """

    inputs: tuple[Any, ...]
    rng: Any
    shared: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def take(cls, inputs: Sequence[Any], written: Sequence[int] = ()) -> Snapshot:
        """Copy inputs, keeping layouts and identity.

        Args:
            inputs: Tensors and numbers.
            written: Positions of the tensors that the run writes to: what shares their memory does so in the copy, too.
        """
        # A write through one view must be seen through the others, as in the program.
        shared = _shared(inputs, written)
        return cls(tuple(_copies(inputs, shared, exact_copy)), rng_state(), shared)

    def fresh(self, change: Change = exact_copy) -> list[Any]:
        """Inputs for one run; the random state is put back too."""
        set_rng_state(self.rng)
        return _copies(self.inputs, self.shared, change)


def nbytes(inputs: Sequence[Any], written: Sequence[int] = ()) -> int:
    """Bytes of a copy of inputs."""
    tensors = {id(t): t for t in inputs if isinstance(t, torch.Tensor) and t.layout is torch.strided}
    n = int(sum(t.nbytes for t in tensors.values()))
    for positions in _shared(inputs, written):
        group = [inputs[k] for k in positions]
        start, end = _span(group)
        n += (end - start) * int(group[0].element_size())
    return n


def rng_state() -> Any:
    """State of the random generators."""
    # To ask for the state would initialise CUDA in a program that does not use it.
    cuda = torch.cuda.get_rng_state_all() if cuda_is_used() else None
    return torch.get_rng_state(), cuda


def cuda_is_used() -> bool:
    """Whether this process has begun to use CUDA."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def set_rng_state(state: Any) -> None:
    """Set the random generators to a state of before."""
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the program's random stream afterwards, as if no random operator had run inside."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


def _shared(inputs: Sequence[Any], written: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Positions of tensors over one memory of which the run writes at least one; of one dtype, else each is copied."""
    targets = [inputs[k] for k in written if isinstance(inputs[k], torch.Tensor)]
    if not targets:
        return ()
    groups = []
    for group in storage_groups(targets, tuple(inputs), {}):
        plain = [t for t in group if t.layout is torch.strided and t.numel() and not t.is_conj() and not t.is_neg()]
        # `as_strided` over one memory needs one element size and no lazy flag.
        if len(plain) == len(group) and len({t.dtype for t in group}) == 1:
            members = {id(t) for t in group}
            groups.append(tuple(k for k, v in enumerate(inputs) if id(v) in members))
    return tuple(groups)


def _copies(values: Sequence[Any], shared: Sequence[Sequence[int]], change: Change) -> list[Any]:
    memo: dict[int, torch.Tensor] = {}
    for positions in shared:
        memo.update(_together([values[k] for k in positions], change))
    return [_copied(v, memo, change) for v in values]


def _together(group: list[torch.Tensor], change: Change) -> dict[int, torch.Tensor]:
    """Copies of tensors that share memory, which share memory again."""
    start, end = _span(group)
    # One copy of the whole stretch, then views of it: a copy of each tensor would have memory of its own.
    whole = change(group[0].detach().as_strided((end - start,), (1,), start))
    return {id(t): whole.as_strided(t.shape, t.stride(), t.storage_offset() - start) for t in group}


def _span(group: list[torch.Tensor]) -> tuple[int, int]:
    """First element, and that behind the last, of the memory that tensors cover."""
    ends = [span(t.shape, t.stride()) for t in group]
    # Only the part that the tensors cover is copied: a storage may be far larger (slices of one buffer).
    starts = [int(t.storage_offset()) for t in group]
    return min(starts), max(start + n for start, n in zip(starts, ends, strict=True))


def _copied(value: Any, memo: dict[int, torch.Tensor], change: Change) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in memo:
        memo[id(value)] = change(value.detach())
    return memo[id(value)]
