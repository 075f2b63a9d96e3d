"""Graphs made from parts of another, to find the node at fault: nodes alone, all intermediates, prefixes."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shadowrun.compiled.graph import Graph, Snapshot, set_rng_state
from shadowrun.compiled.rounding import is_random
from shadowrun.intercept.torchapi import without_modes
from shadowrun.intercept.untrusted.checked_calls import looks_of_file
from shadowrun.operators.case import exact_copy
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

aten = torch.ops.aten

__all__ = [
    "Probe",
    "ValueRecorder",
    "call_probe",
    "dropout_residuals",
    "eager_values",
    "intermediates",
    "isolated_node",
    "isolated_nodes",
    "prefix",
    "tensor_nodes",
    "with_random_inputs",
]


@dataclass(frozen=True, slots=True)
class Probe:
    """A graph to compile and judge.

    Attributes:
        graph: The graph to compile.
        snapshot: What to run it on.
        origin: For each result, the name of the node (of the graph that was probed) that it belongs to.
    """

    graph: Graph
    snapshot: Snapshot
    origin: tuple[str, ...]


class ValueRecorder(fx.Interpreter):
    """Keeps what each node returns."""

    def __init__(self, module: fx.GraphModule) -> None:
        # Each value is an input of some probe later.
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        value = super().run_node(n)
        # A later node may write to the value in place. The copy is none of the graph's calls.
        with without_modes():
            self.values[n.name] = _copy(value)
        return value


def eager_values(graph: Graph, snapshot: Snapshot) -> dict[str, Any]:
    """What each node of a graph returns when it runs eagerly."""
    recorder, inputs = ValueRecorder(graph.module), snapshot.fresh()
    with torch.no_grad(), looks_of_file():
        recorder.run(*inputs, enable_io_processing=False)
    # Each later run has to begin with the same random state.
    set_rng_state(snapshot.rng)
    return recorder.values


def tensor_nodes(graph: fx.Graph, values: dict[str, Any]) -> list[fx.Node]:
    """Nodes that return tensors, in order; not inputs, constants, members of tuples, or what writes to inputs."""
    return [
        n
        for n in graph.nodes
        if n.op == "call_function"
        and n.target is not operator.getitem
        and not _mutates(n)
        and _has_tensor(values[n.name])
    ]


def isolated_nodes(graph: Graph, snapshot: Snapshot, values: dict[str, Any], nodes: Iterable[fx.Node]) -> Probe:
    """Each node by itself, on what eager gave to it: whichever deviates here is wrong itself.

    One graph for all of them, so that one compilation answers for each.
    """
    # A random node alone has other random numbers, and a view computes no values.
    wanted = [n for n in nodes if not is_random(n.target, n.args, n.kwargs) and not _is_view(n)]
    return _isolated(graph, snapshot, values, wanted)


def isolated_node(graph: Graph, snapshot: Snapshot, values: dict[str, Any], node: fx.Node) -> Probe:
    """One node by itself, on what eager gave to it."""
    return _isolated(graph, snapshot, values, [node])


def _isolated(graph: Graph, snapshot: Snapshot, values: dict[str, Any], wanted: list[fx.Node]) -> Probe:
    new = fx.Graph()
    # A value that several nodes use is one input, as in the graph.
    inputs: dict[str, fx.Node] = {}
    given: list[Any] = []

    def feed(source: fx.Node) -> Any:
        value = values[source.name]
        if not isinstance(value, torch.Tensor):
            return value
        if source.name not in inputs:
            inputs[source.name] = _input(new, f"given_{source.name}", source)
            given.append(value)
        return inputs[source.name]

    # Inputs come first in a graph.
    for n in wanted:
        fx.map_arg((n.args, n.kwargs), feed)
    origin = _output(new, [(n, new.node_copy(n, feed)) for n in wanted], values)
    return Probe(Graph(fx.GraphModule(graph.module, new)), Snapshot(tuple(given), snapshot.rng), origin)


def call_probe(graph: Graph, snapshot: Snapshot, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Probe:
    """A call of a node's operator on other arguments.

    Args:
        graph: Where the node is.
        snapshot: The random state.
        node: The node; of a tuple that it returns, the members that the graph uses are results.
        args: Tensors become inputs.
        kwargs: The same by name.
    """
    new = fx.Graph()
    inputs: dict[int, fx.Node] = {}
    given: list[torch.Tensor] = []

    def feed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in inputs:
                inputs[id(value)] = new.placeholder(f"x{len(given)}")
                given.append(value)
            return inputs[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(feed(v) for v in value)
        return value

    fed = feed(tuple(args)), {k: feed(v) for k, v in kwargs.items()}
    made = new.call_function(node.target, *fed)  # type: ignore[arg-type]
    with torch.no_grad():
        # On copies, since the operator may write to its arguments.
        value = node.target(*_copy(tuple(args)), **{k: _copy(v) for k, v in kwargs.items()})  # type: ignore[operator]
    origin = _output(new, [(node, made)], {node.name: value})
    return Probe(Graph(fx.GraphModule(graph.module, new)), Snapshot(tuple(given), snapshot.rng), origin)


def with_random_inputs(
    graph: Graph, snapshot: Snapshot, values: dict[str, Any], random_nodes: Sequence[fx.Node] | None = None
) -> Probe:
    """The graph with eager's random numbers as further inputs, and the inputs of random nodes as further results.

    Args:
        graph: The graph that the probe is made of.
        snapshot: Its inputs.
        values: What its nodes return.
        random_nodes: The random nodes; where it is None, they are known by their operators.
    """
    new = fx.Graph()
    names: dict[fx.Node, fx.Node] = {}
    given = list(snapshot.inputs)
    if random_nodes is None:
        random_nodes = [n for n in graph.module.graph.nodes if is_random(n.target, n.args, n.kwargs)]
    for n in graph.module.graph.nodes:
        if n.op == "placeholder":
            names[n] = _input(new, n.name, n)
    for n in random_nodes:
        tuple_members = [u for u in n.users if u.target is operator.getitem]
        for source in tuple_members or [n]:
            names[source] = _input(new, f"drawn_{source.name}", source)
            given.append(values[source.name])
    for n in graph.module.graph.nodes:
        if n not in names and n not in random_nodes:
            names[n] = new.node_copy(n, names.__getitem__)
    (output,) = [n for n in new.nodes if n.op == "output"]
    # Without these results, what leads to a random node would be dead code, and its faults unseen.
    needed = {names[a] for n in random_nodes for a in n.all_input_nodes if isinstance(values[a.name], torch.Tensor)}
    output.args = ((*output.args[0], *(n for n in new.nodes if n in needed)),)
    probe = Graph(fx.GraphModule(graph.module, new))
    return Probe(probe, Snapshot(tuple(given), snapshot.rng), probe.names())


def dropout_residuals(graph: Graph, snapshot: Snapshot, values: dict[str, Any]) -> Probe | None:
    """What each dropout returns less what it should return for its own random mask: 0 but for rounding.

    Its input times the scale is added, so that what rounding may do is known for each element, kept or not. Each result
    has the dropout as ``meta["of"]``, and its name as origin. None where there is no dropout.
    """
    dropouts = [n for n in graph.module.graph.nodes if n.target is aten.native_dropout.default and _drops(n, values)]
    new = fx.Graph()
    sources = list(dict.fromkeys(n.args[0] for n in dropouts))
    given = {source: _input(new, f"given_{source.name}", source) for source in sources}
    residuals = []
    for n in dropouts:
        x, p = given[n.args[0]], _value(n.args[1], values)
        made = new.call_function(aten.native_dropout.default, (x, p, True))
        out, mask = (new.call_function(operator.getitem, (made, k)) for k in (0, 1))
        kept = new.call_function(aten.mul.Tensor, (x, mask))
        right = new.call_function(aten.mul.Tensor, (kept, 1 / (1 - p)))
        # Without this sum the result would be 0, for which no rounding error is known.
        whole = new.call_function(aten.mul.Tensor, (x, 1 / (1 - p)))
        residual = new.call_function(aten.add.Tensor, (whole, new.call_function(aten.sub.Tensor, (out, right))))
        made.meta = dict(n.meta)
        residual.meta["of"] = n
        residuals.append(residual)
    if not residuals:
        return None
    new.output(tuple(residuals))
    inputs = tuple(values[source.name] for source in sources)
    probe = Graph(fx.GraphModule(graph.module, new))
    return Probe(probe, Snapshot(inputs, snapshot.rng), tuple(n.name for n in dropouts))


def _drops(n: fx.Node, values: dict[str, Any]) -> bool:
    p, train = (_value(a, values) for a in n.args[1:3])
    # With 0 nothing is dropped, and with 1 the scale is infinite.
    return train is not False and isinstance(p, float) and 0 < p < 1


def _value(argument: Any, values: dict[str, Any]) -> Any:
    return values[argument.name] if isinstance(argument, fx.Node) else argument


def intermediates(graph: Graph, snapshot: Snapshot, values: dict[str, Any]) -> Probe:
    """The graph with all intermediate values as its results."""
    return prefix(graph, snapshot, values, tensor_nodes(graph.module.graph, values), live_only=False)


def prefix(
    graph: Graph, snapshot: Snapshot, values: dict[str, Any], nodes: list[fx.Node], *, live_only: bool = True
) -> Probe:
    """The graph up to the last of `nodes`.

    Args:
        graph: The whole.
        snapshot: Its inputs.
        values: What its nodes return.
        nodes: The computed nodes up to the cut.
        live_only: Results are the values that nodes after the cut use, and the last value; else those of all nodes.
    """
    new = fx.Graph()
    kept = set(nodes)
    last = nodes[-1]
    names: dict[fx.Node, fx.Node] = {}
    inside = []
    for n in graph.module.graph.nodes:
        if n.op == "output" or (n.op == "call_function" and _mutates(n)):
            continue
        if n.op == "placeholder":
            names[n] = _input(new, n.name, n)
        elif n.op == "get_attr" or n in kept or all(a in names for a in n.all_input_nodes):
            if n.op == "call_function" and n not in kept and not _derived(n, kept, values):
                continue
            names[n] = new.node_copy(n, names.__getitem__)
            if n in kept:
                inside.append(n)
    wanted = [n for n in inside if not live_only or n is last or _is_live(n, kept)]
    origin = _output(new, [(n, names[n]) for n in wanted], values)
    return Probe(Graph(fx.GraphModule(graph.module, new)), snapshot, origin)


def _derived(n: fx.Node, kept: set[fx.Node], values: dict[str, Any]) -> bool:
    """Whether a node computes no tensor of its own: a member of a tuple, a size."""
    if n.target is operator.getitem:
        return n.args[0] in kept or not isinstance(values[n.name], torch.Tensor)
    return not _has_tensor(values[n.name])


def _is_live(n: fx.Node, kept: set[fx.Node]) -> bool:
    for user in n.users:
        if user.target is operator.getitem and user.op == "call_function":
            if _is_live(user, kept):
                return True
        elif user not in kept:
            return True
    # A result that is read nowhere is one of the graph, or dead code: a probe keeps it.
    return not n.users


def _input(new: fx.Graph, name: str, like: fx.Node) -> fx.Node:
    node = new.placeholder(name)
    node.meta = dict(like.meta)
    return node


def _output(new: fx.Graph, results: list[tuple[fx.Node, fx.Node]], values: dict[str, Any]) -> tuple[str, ...]:
    """Make nodes the results of a graph; of a tuple, the members that the graph it comes from uses.

    Compilers meet the others in no real graph, and some (OpenVINO) hand a graph back to eager, without a word, if a
    member of a tuple is a result as it is: hence the alias.
    """
    outputs: list[fx.Node] = []
    origin: list[str] = []
    for node, made in results:
        used = {u.args[1] for u in node.users if u.target is operator.getitem}
        for path in _paths(values[node.name]):
            if used and path and path[0] not in used:
                continue
            taken = made
            for i in path:
                taken = new.call_function(operator.getitem, (taken, i))
            outputs.append(new.call_function(torch.ops.aten.alias.default, (taken,)) if path else taken)
            origin.append(node.name)
    new.output(tuple(outputs))
    return tuple(origin)


def _paths(value: Any) -> list[tuple[int, ...]]:
    if isinstance(value, torch.Tensor):
        return [()]
    if isinstance(value, (list, tuple)):
        return [(i, *rest) for i, v in enumerate(value) for rest in _paths(v)]
    return []


def _has_tensor(value: Any) -> bool:
    return bool(_paths(value))


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return exact_copy(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(v) for v in value)
    return value


def _mutates(n: fx.Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and schema_of(n.target).is_mutable


def _is_view(n: fx.Node) -> bool:
    returns = schema_of(n.target).returns if isinstance(n.target, torch._ops.OpOverload) else ()
    return bool(returns) and all(r.alias_info is not None for r in returns)
