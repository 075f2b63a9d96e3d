"""Another size for a dimension, all through a graph: inputs, and the sizes that calls were captured with.

A captured graph has sizes as plain numbers: ``view(x, [16, 64])``. The calls are run one after another on the new
inputs, and each such number is worked out again from what its argument had and has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.studies.campaign.variants.tracing import MAX_ELEMENTS, Invalid, Trace, info, trace
from shadowrun.studies.zoo.graph import Graph, Node, Ref, refs_in
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.studies.campaign.variants.tracing import Values
    from shadowrun.studies.zoo.graph import Input

__all__ = ["BATCH", "resized", "sizes_can_change", "sizes_of"]

BATCH: Final = "batch"
"""Scope of a change: first dimensions of inputs that are no weights."""
_SIZE_ARGUMENTS: Final = ("size", "sizes", "output_size", "input_size", "end", "num_weights", "n", "m")


def sizes_of(graph: Graph, scope: str) -> list[int]:
    """Sizes that a scope has."""
    return sorted({n for i in graph.inputs for k, n in enumerate(i.shape) if _in_scope(i, k, scope)})


def sizes_can_change(graph: Graph) -> bool:
    """Whether no call is given the tensor for its result (torch warns where it resizes one), or takes sizes unseen."""
    abouts = [info(n.op) for n in graph.nodes]
    return not any(a.into or a.layout or (a.fragile and "batch_norm" not in a.base) for a in abouts)


def _in_scope(described: Input, k: int, scope: str) -> bool:
    return scope != BATCH or (k == 0 and described.role == "input")


def resized(before: Trace, old: int, new: int, scope: str, values: Values) -> Trace:
    """A graph with another size, and its trace.

    Args:
        before: The graph as it was.
        old: The size.
        new: What it becomes.
        scope: `BATCH`, or ``all``: wherever it is found.
        values: Values of inputs.

    Raises:
        Invalid: Some call does not run with it.
    """
    graph = before.graph
    if not sizes_can_change(graph):
        raise Invalid("a call that is given the tensor for its result, or that depends on strides")
    inputs = tuple(_resized_input(i, old, new, scope) for i in graph.inputs)
    if inputs == graph.inputs:
        raise Invalid(f"no size {old}")
    if any(math.prod(i.shape) > MAX_ELEMENTS for i in inputs):
        raise Invalid(f"an input of more than {MAX_ELEMENTS} elements")

    def repaired(node: Node, known: Trace) -> Node:
        return _repaired(node, len(known.values), before, known, {old: new})

    return trace(Graph(inputs, graph.nodes, graph.outputs), values, change=repaired)


def _resized_input(described: Input, old: int, new: int, scope: str) -> Input:
    shape = tuple(new if n == old and _in_scope(described, k, scope) else n for k, n in enumerate(described.shape))
    fill = described.fill
    if scope != BATCH and fill.kind == "integers" and fill.b == old - 1:
        # Indices below a size that changes: of rows of a table, of classes.
        fill = fill._replace(a=min(fill.a, max(new - 1, 0)), b=max(new - 1, 0))
    if shape == described.shape and fill == described.fill:
        return described
    # Strides were those of the old size: the new input is contiguous.
    return replace(described, shape=shape, fill=fill, strides=(), offset=0)


@dataclass(frozen=True, slots=True)
class _Change:
    """What a call has to be repaired for.

    Attributes:
        had: Shape of its first tensor as it was.
        has: Shape that this tensor has now.
        out: Shape of its result as it was.
        sizes: Old size to new size.
    """

    had: tuple[int, ...]
    has: tuple[int, ...]
    out: tuple[int, ...]
    sizes: dict[int, int]


def _repaired(node: Node, at: int, before: Trace, now: Trace, sizes: dict[int, int]) -> Node:
    """A call with its sizes worked out again."""
    first = next(refs_in(node.args), None)
    had, has = (_shape(before, first), _shape(now, first)) if first is not None else (None, None)
    base = info(node.op).base
    special = _RULES.get(base)
    if special is not None and had is not None and has is not None:
        # Its argument is as it was: so are the numbers that follow from it.
        if had == has:
            return node
        made = before.values[at]
        out = tuple(made.shape) if isinstance(made, torch.Tensor) else ()
        return special(node, _Change(had, has, out, sizes))
    for i, argument in enumerate(schema_of(node.op).arguments[: len(node.args)]):
        if argument.name in _SIZE_ARGUMENTS:
            node = _with(node, i, _renamed(node.args[i], sizes))
    return node


def _shape(known: Trace, ref: Ref) -> tuple[int, ...] | None:
    value = known.value(ref)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _with(node: Node, i: int, value: Any) -> Node:
    if node.args[i] == value:
        return node
    return replace(node, args=(*node.args[:i], value, *node.args[i + 1 :]))


def _renamed(value: Any, sizes: dict[int, int]) -> Any:
    if type(value) is tuple:
        return tuple(_renamed(v, sizes) for v in value)
    return sizes.get(value, value) if type(value) is int else value


def _view(node: Node, change: _Change) -> Node:
    return _with(node, 1, regrouped(change.had, change.has, change.out, change.sizes))


def regrouped(had: Sequence[int], has: Sequence[int], out: Sequence[int], sizes: dict[int, int]) -> tuple[int, ...]:
    """The shape of a view of another input: dimensions are matched by products from the front.

    Args:
        had: Shape of the input as it was.
        has: Shape that it has now.
        out: Shape of the view as it was.
        sizes: Old size to new size.

    Raises:
        Invalid: No shape fits.
    """
    if len(had) != len(has):
        raise Invalid("a view of an input with another number of dimensions")
    shape: list[int] = []
    i = j = 0
    while i < len(had) or j < len(out):
        start, first = i, j
        n_in, n_out = math.prod(had[i : i + 1]), math.prod(out[j : j + 1])
        i, j = min(i + 1, len(had)), min(j + 1, len(out))
        # Both sides take in dimensions until they have as many elements: these are the same ones.
        while n_in != n_out:
            if n_in < n_out and i < len(had):
                n_in, i = n_in * had[i], i + 1
            elif j < len(out):
                n_out, j = n_out * out[j], j + 1
            elif i < len(had):
                n_in, i = n_in * had[i], i + 1
            else:
                break
        shape += _scaled(out[first:j], math.prod(had[start:i]), math.prod(has[start:i]), sizes)
    return tuple(shape)


def _scaled(group: Sequence[int], was: int, n: int, sizes: dict[int, int]) -> list[int]:
    """A group of sizes with another product; the size that changes is changed first."""
    if was == n:
        return list(group)
    if not group:
        if n == 1:
            return []
        raise Invalid("a dimension that the view does not have")
    # The captured number may be the old size by chance: what fits the new elements decides.
    renamed = [sizes.get(k, k) for k in group]
    if math.prod(renamed) == n:
        return renamed
    for k in sorted(range(len(group)), key=lambda k: (group[k] not in sizes, -group[k])):
        others = math.prod(v for m, v in enumerate(group) if m != k)
        if others and n % others == 0:
            return [n // others if m == k else v for m, v in enumerate(group)]
    raise Invalid(f"{n} elements in no shape like {tuple(group)}")


def _expand(node: Node, change: _Change) -> Node:
    had, has, sizes = change.had, change.has, change.sizes
    lead = len(change.out) - len(has)
    # A dimension that was expanded has size 1 in the input, whose new size says nothing of it.
    new = [has[k - lead] if k >= lead and had[k - lead] == n else sizes.get(n, n) for k, n in enumerate(change.out)]
    return _with(node, 1, tuple(new))


def _normalized(node: Node, change: _Change) -> Node:
    return _with(node, 1, tuple(change.has[len(change.has) - len(node.args[1]) :]))


def _group_norm(node: Node, change: _Change) -> Node:
    # N, C and the size of a plane are numbers of their own, which the CPU's kernel believes.
    args, has = node.args, change.has
    return replace(node, args=(*args[:3], has[0], has[1], math.prod(has[2:]), *args[6:]))


def _slice(node: Node, change: _Change) -> Node:
    for i in (2, 3):
        if i < len(node.args):
            node = _with(node, i, _renamed(node.args[i], change.sizes))
    return node


def _split(node: Node, change: _Change) -> Node:
    """As many chunks as before."""
    d = node.args[2] if len(node.args) > 2 else 0
    was, n, size = change.had[d], change.has[d], node.args[1]
    if was == n:
        return node
    if type(size) is tuple:
        return _with(node, 1, tuple(_scaled_parts(size, was, n, change.sizes)))
    # Later calls read the chunks by number: with fewer, some would have no source.
    chunks = -(-was // size) if size else 1
    if n % chunks:
        raise Invalid(f"{n} in {chunks} chunks")
    return _with(node, 1, n // chunks)


def _scaled_parts(parts: Sequence[int], was: int, n: int, sizes: dict[int, int]) -> list[int]:
    renamed = [sizes.get(k, k) for k in parts]
    if sum(renamed) == n:
        return renamed
    if was and all(k * n % was == 0 for k in parts):
        return [k * n // was for k in parts]
    # No common factor: the last part takes the difference.
    last = n - sum(parts[:-1])
    if last < 0:
        raise Invalid(f"{n} in no parts like {tuple(parts)}")
    return [*parts[:-1], last]


_RULES: Final[dict[str, Callable[[Node, _Change], Node]]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "view_copy"), _view),
    **dict.fromkeys(("expand", "expand_copy"), _expand),
    **dict.fromkeys(("native_layer_norm", "layer_norm", "rms_norm", "_fused_rms_norm"), _normalized),
    "native_group_norm": _group_norm,
    "slice": _slice,
    **dict.fromkeys(("split", "split_with_sizes", "split_copy"), _split),
}
