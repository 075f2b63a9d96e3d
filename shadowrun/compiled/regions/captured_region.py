"""What a run keeps of a compiled region that is wrong: its graph as text, its inputs, and how it was compiled.

It is stored like the inputs of single operators, as a call of ``compiled::graph 0``. Random numbers and constants of
the graph become further inputs: on these, the graph alone does what it did in the program.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from shadowrun.compiled import graph_text
from shadowrun.compiled.compile_spec import CompileSpec
from shadowrun.compiled.graph import copy_graph
from shadowrun.compiled.regions.inductor_rng import is_random_node
from shadowrun.errors import DataFileError, UsageError
from shadowrun.operators.case import exact_copy
from shadowrun.replay.copies import move
from shadowrun.store.captured_inputs import NotStorable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.compiled.graph import Graph, Snapshot
    from shadowrun.store.captured_inputs import StoredCall
    from shadowrun.types import Permissions

__all__ = ["CapturedRegion", "capture", "constants_as_inputs"]


@dataclass(frozen=True, slots=True)
class CapturedRegion:
    """A compiled region on the inputs of one call.

    Attributes:
        module: Its graph. It has no constants and does not draw; its results are one tuple.
        inputs: Of the graph, as they were before the call; tensors and numbers.
        compile_spec: How it was compiled.
        needs_grad: Positions of the inputs that required a gradient.
        is_plain: The graph is one of plain operators, not one of Dynamo's.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    compile_spec: CompileSpec
    needs_grad: tuple[int, ...]
    is_plain: bool

    @classmethod
    def read(cls, call: StoredCall, allowed: Permissions) -> CapturedRegion:
        """From what `arguments` gave.

        Args:
            call: What a file holds.
            allowed: What may be imported for it.

        Raises:
            DataFileError: It is something else.
            UsageError: This torch or this machine lacks what it needs, or it must not be run.
        """
        try:
            return cls._read(call.args, call.kwargs, allowed)
        except (ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
            raise DataFileError(
                f"The captured inputs of {call.op} hold no graph of its own ({error}).", slug="captured-inputs"
            ) from None

    @classmethod
    def _read(cls, args: tuple[Any, ...], named: dict[str, Any], allowed: Permissions) -> CapturedRegion:
        compile_spec = CompileSpec.from_text(named["how"]).from_file(allowed)
        module = graph_text.from_text(named["graph"])
        needs_grad = tuple(map(int, named["needs_grad"]))
        devices = [torch.device(d) if d else None for d in named["devices"]]
        if not all(isinstance(v, (torch.Tensor, bool, int, float)) for v in args):
            raise ValueError("inputs")
        # Meta tensors compute no values: nothing would be compared.
        if any(d is not None and d.type == "meta" for d in devices):
            raise ValueError("devices")
        # fx would run a graph with too few inputs, and take defaults that the text has not.
        if not len(args) == len(devices) == sum(n.op == "placeholder" for n in module.graph.nodes):
            raise ValueError("inputs")
        inputs = tuple(_moved_to(v, d) for v, d in zip(args, devices, strict=True))
        # `requires_grad_` raises on integers and bools.
        if not all(0 <= k < len(inputs) and _takes_gradient(inputs[k]) for k in needs_grad):
            raise ValueError("needs_grad")
        return cls(module, inputs, compile_spec, needs_grad, bool(named["is_plain"]))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As the arguments of a call, for `shadowrun.store.captured_inputs`.

        Raises:
            NotStorable: The graph has no text.
        """
        devices = [str(v.device) if isinstance(v, torch.Tensor) else "" for v in self.inputs]
        spec_text, graph = self.compile_spec.text(), graph_text.to_text(self.module)
        named = {"devices": devices, "needs_grad": list(self.needs_grad), "is_plain": self.is_plain}
        return self.inputs, {"graph": graph, "how": spec_text, **named}

    def fresh_inputs(self) -> list[Any]:
        """The inputs as the program had them: some of them require a gradient."""
        return [v.detach().requires_grad_() if k in self.needs_grad else v for k, v in enumerate(self.inputs)]


def capture(
    graph: Graph,
    snapshot: Snapshot,
    compile_spec: CompileSpec,
    *,
    needs_grad: Sequence[int] = (),
    is_plain: bool = True,
) -> CapturedRegion:
    """What shows a call of a region again.

    Args:
        graph: The region's.
        snapshot: What the call began with.
        compile_spec: How it was compiled.
        needs_grad: Positions of the inputs that required a gradient.
        is_plain: The graph is one of plain operators.

    Raises:
        NotStorable: It has results within results, or constants that are no tensors.
    """
    module, random_numbers = _random_as_inputs(graph, snapshot)
    module, constants = constants_as_inputs(module)
    inputs = (*snapshot.inputs, *random_numbers, *constants)
    odd = next((type(v).__name__ for v in inputs if not isinstance(v, (torch.Tensor, bool, int, float))), "")
    if odd:
        raise NotStorable(f"an input of type {odd}")
    # A size that is an input was a symbol; compiled with static sizes, it is another program.
    if any(type(v) is int for v in snapshot.inputs):  # sizes
        compile_spec = replace(compile_spec, dynamic=True)
    return CapturedRegion(module, inputs, compile_spec, tuple(needs_grad), is_plain)


def constants_as_inputs(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Any]]:
    """A graph with its constants as further inputs, and these; its results are made one tuple of what nodes return.

    Raises:
        NotStorable: A constant is no tensor, or there are results within results.
    """
    module = copy_graph(module)
    _one_tuple(module)
    constants = []
    # A list: erasing a node while the graph is walked would skip the next one.
    for node in [n for n in module.graph.nodes if n.op == "get_attr"]:
        value: Any = module
        for name in str(node.target).split("."):
            value = getattr(value, name)
        if not isinstance(value, torch.Tensor):
            raise NotStorable(f"its graph has a {type(value).__name__}")
        node.replace_all_uses_with(_new_input(module.graph, node.name.lstrip("_")))
        module.graph.erase_node(node)
        constants.append(exact_copy(value))
    return module, constants


def _new_input(graph: fx.Graph, name: str) -> fx.Node:
    """A further input behind those that are there."""
    last = next((n for n in reversed(list(graph.nodes)) if n.op == "placeholder"), None)
    first = next(iter(graph.nodes)) if last is None else last.next
    with graph.inserting_before(first):
        return graph.placeholder(name)


class _ResultKeeper(fx.Interpreter):
    """Keeps what some nodes return, and nothing else."""

    def __init__(self, module: fx.GraphModule, wanted: set[fx.Node]) -> None:
        super().__init__(module)
        self._wanted = wanted
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._wanted:
            self.values[n] = exact_copy(value) if isinstance(value, torch.Tensor) else value
        return value


def _random_as_inputs(graph: Graph, snapshot: Snapshot) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The graph with its random numbers as further inputs, and these."""
    module = copy_graph(graph.module)
    # As inputs, the recorded numbers make the script independent of torch's generators.
    random_nodes = [n for n in module.graph.nodes if is_random_node(n)]
    if not random_nodes:
        return module, []
    # Of a tuple, its members.
    wanted = {*random_nodes, *(u for n in random_nodes for u in n.users if u.target is operator.getitem)}
    run = _ResultKeeper(module, wanted)
    with torch.no_grad():
        run.run(*snapshot.fresh(), enable_io_processing=False)
    random_numbers = []
    sources: set[fx.Node] = set()
    for n in reversed(list(module.graph.nodes)):  # inputs of a random node may be needed no longer
        if n in wanted and isinstance(run.values[n], torch.Tensor) and n.users:
            n.replace_all_uses_with(_new_input(module.graph, f"drawn_{n.name.lstrip('_')}"))
            random_numbers.append(run.values[n])
        # From the end: a node has no users once those behind it are gone. Placeholders stay, or inputs would shift.
        if (n in wanted or n in sources) and not n.users and n.op != "placeholder":
            sources |= set(n.all_input_nodes)
            module.graph.erase_node(n)
    if any(is_random_node(n) for n in module.graph.nodes):
        raise NotStorable("its graph has random results that are no tensors")
    return module, random_numbers


def _one_tuple(module: fx.GraphModule) -> None:
    """Make the results of a graph one tuple without what is no result of a node."""
    (output,) = [n for n in module.graph.nodes if n.op == "output"]
    flat = output.args[0] if isinstance(output.args[0], (list, tuple)) else (output.args[0],)
    if any(isinstance(v, (list, tuple, dict)) for v in flat):
        raise NotStorable("its graph has results within results")
    output.args = (tuple(v for v in flat if isinstance(v, fx.Node)),)


def _takes_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _moved_to(value: Any, device: torch.device | None) -> Any:
    if not isinstance(value, torch.Tensor) or device is None or device == value.device:
        return value
    try:
        return move(value, device)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise UsageError(f"The region ran on {device}, which is not here: {first}", slug="no-repro") from None
