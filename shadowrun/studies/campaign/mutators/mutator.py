"""What a mutator is, and how calls are put into a graph."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from shadowrun.studies.campaign.tracing import Invalid
from shadowrun.studies.zoo.graph import DEVICE, Graph, Input, Node, Ref, mapped

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shadowrun.studies.campaign.counter_rng import CounterRng
    from shadowrun.studies.campaign.program_draft import Draft
    from shadowrun.studies.campaign.recipe import Params

__all__ = ["Edit", "Mutator", "fitted", "node_at", "op_named", "ref_of", "refitted", "with_node"]

aten = torch.ops.aten
MAX_ADDED: Final = 400
"""Calls that one mutation may add."""


def op_named(name: str) -> torch._ops.OpOverload:
    """``add.Tensor`` of the namespace `aten`; of names from the tables of mutators only."""
    packet, _, overload = name.partition(".")
    found: torch._ops.OpOverload = getattr(getattr(aten, packet), overload or "default")
    return found


class Mutator(Protocol):
    """One way to change a program.

    Attributes:
        name: ``insert``.
        family: ``structure``, ``arguments``, ``tensors`` or ``execution``.
        exceptional: Results that are nowhere finite are what it is for.
    """

    name: str
    family: str
    exceptional: bool

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Choose a change; None where it found none."""

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Make the change. It depends on nothing but draft and params, which may come from anyone.

        Raises:
            Invalid: It cannot be made.
            TypeError, ValueError, IndexError, KeyError, RuntimeError: The params are not of this mutator.
        """


class Edit:
    """New calls in front of a call of a graph, or in its place.

    Args:
        graph: The graph.
        at: Number of that call; the number of calls, for the end.
        drop: Whether the call goes.
    """

    def __init__(self, graph: Graph, at: int, *, drop: bool = False) -> None:
        if not 0 <= at <= len(graph.nodes) - drop:
            raise Invalid(f"no call {at}")
        self._graph, self._at, self._drop = graph, at, drop
        self._nodes: list[Node] = []
        self._inputs = list(graph.inputs)

    def call(self, op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Ref:
        """Add a call; lists may hold references."""
        self._nodes.append(Node(op, tuple(map(_frozen, args)), tuple((k, _frozen(v)) for k, v in kwargs.items())))
        return Ref(self._at + len(self._nodes) - 1)

    def add(self, node: Node) -> Ref:
        """Add a call as it is."""
        self._nodes.append(node)
        return Ref(self._at + len(self._nodes) - 1)

    def input(self, described: Input) -> Ref:
        """Add an input; its name gets a number where it is taken."""
        names = {i.name for i in self._inputs}
        name, n = described.name, 1
        while name in names:
            n += 1
            name = f"{described.name}.{n}"
        self._inputs.append(replace(described, name=name))
        return Ref(-len(self._inputs))

    def done(self, replaced: Mapping[Ref, Ref]) -> Graph:
        """The graph; later calls and the results read the replaced references instead.

        Raises:
            Invalid: Something still reads the call that went.
        """
        if len(self._nodes) > MAX_ADDED:
            raise Invalid(f"more than {MAX_ADDED} calls at one place")
        at, graph = self._at, self._graph
        by = len(self._nodes) - self._drop

        def moved(ref: Ref) -> Ref:
            new = replaced.get(ref)
            if new is not None:
                return new
            if ref.node < at:
                return ref
            if self._drop and ref.node == at:
                raise Invalid("a result of the call is still needed")
            return Ref(ref.node + by, ref.output)

        later = graph.nodes[at + self._drop :]
        nodes = (*graph.nodes[:at], *self._nodes, *(_moved(node, moved) for node in later))
        return Graph(tuple(self._inputs), nodes, tuple(moved(r) for r in graph.outputs))


def _moved(node: Node, moved: Any) -> Node:
    args = mapped(node.args, moved)
    kwargs = mapped(node.kwargs, moved) if node.kwargs else ()
    return node if args == node.args and kwargs == node.kwargs else Node(node.op, args, kwargs, node.module)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if type(value) is list else value


def with_node(graph: Graph, at: int, node: Node) -> Graph:
    """The graph with one call replaced."""
    return Graph(graph.inputs, (*graph.nodes[:at], node, *graph.nodes[at + 1 :]), graph.outputs)


def node_at(graph: Graph, at: Any) -> Node:
    """A call by its number.

    Raises:
        Invalid: There is none.
    """
    if type(at) is not int or not 0 <= at < len(graph.nodes):
        raise Invalid(f"no call {at}")
    return graph.nodes[at]


def ref_of(graph: Graph, node: Any, output: Any) -> Ref:
    """A reference by its numbers.

    Raises:
        Invalid: The graph has no such value.
    """
    if type(node) is not int or type(output) is not int or output < 0:
        raise Invalid("no reference")
    if not -len(graph.inputs) <= node < len(graph.nodes):
        raise Invalid(f"no value {node}")
    return Ref(node, output)


def fitted(edit: Edit, ref: Ref, have: torch.Tensor, want: torch.Tensor) -> Ref:
    """A value cut or repeated, and converted, until it has the form of another.

    Args:
        edit: Gets the calls.
        ref: The value.
        have: What it is.
        want: What it must look like.

    Raises:
        Invalid: There is no way.
    """
    if have.dtype is not want.dtype:
        # Such a cast drops the imaginary part, or is not defined where the integers cannot hold the value.
        if have.is_complex() or (have.is_floating_point() and not want.is_floating_point() and not want.is_complex()):
            raise Invalid(f"no way from {have.dtype} to {want.dtype}")
        ref = edit.call(op_named("_to_copy"), ref, dtype=want.dtype)
    if have.shape == want.shape:
        return ref
    n, m = have.numel(), want.numel()
    if m and not n:
        # An empty tensor cannot be repeated into one with elements.
        return edit.call(aten.full.default, list(want.shape), 0, dtype=want.dtype, device=DEVICE)
    flat = edit.call(aten.reshape.default, ref, [-1] if n else [0])
    if n < m:
        flat = edit.call(aten.repeat.default, flat, [-(-m // n)])
    if n != m:
        flat = edit.call(aten.slice.Tensor, flat, 0, 0, m)
    return edit.call(aten.view.default, flat, list(want.shape))


def refitted(draft: Draft, edit: Edit, at: int, ref: Ref, value: Any) -> dict[Ref, Ref]:
    """What takes the place of the results of a call: the new results, cut or repeated where a later call reads them.

    Args:
        draft: The draft before the change.
        edit: Drops the old call; has the new one.
        at: Number of the old call.
        ref: The new call.
        value: What the new call returns.

    Raises:
        Invalid: It returns no result, or no tensor where one is read.
    """
    end, replaced = len(draft.graph.nodes), {}
    several = isinstance(value, (list, tuple))
    for old, uses in draft.uses.items():
        if old.node != at:
            continue
        if several and not value:
            raise Invalid("no results")
        # Of a list that got shorter, the last one.
        at_most = min(old.output, len(value) - 1) if several else 0
        have, want = value[at_most] if several else value, draft.trace.value(old)
        new = Ref(ref.node, at_most)
        # Only a later call was made for the old form; a result of the graph may have any.
        if any(use < end for use in uses) and isinstance(want, torch.Tensor):
            if not isinstance(have, torch.Tensor):
                raise Invalid("no tensor")
            new = fitted(edit, new, have, want)
        replaced[old] = new
    return replaced
