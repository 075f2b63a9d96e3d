"""Mutators of tensors: sizes, ranks, broadcasting, dtypes and layouts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.studies.campaign.mutators.mutator import Edit, node_at
from shadowrun.studies.campaign.mutators.sizes import BATCH, resized, sizes_can_change, sizes_of
from shadowrun.studies.campaign.variants.tracing import MAX_ELEMENTS, Invalid, info
from shadowrun.studies.zoo.graph import Graph, Node, Ref

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.studies.campaign.variants.counter_rng import CounterRng
    from shadowrun.studies.campaign.variants.program_draft import Draft
    from shadowrun.studies.campaign.variants.recipe import Params

__all__ = ["Broadcast", "Dtype", "Layout", "Rank", "Size"]

aten = torch.ops.aten
# Sides of 4, 8, 16 and 32: vector loops of all widths have a tail there. What adds up too coarsely shows in long sums.
_SIZES: Final = (0, 1, 1, 2, 2, 3, 3, 4, 5, 7, 8, 11, 13, 16, 17, 31, 33, 129, 600)


class Size:
    """Another size for a dimension, in all inputs and calls: 0, 1, primes, and the sides of a vector's length."""

    name = "size"
    family = "tensors"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Old size, new size, and where."""
        scope = rng.choice((BATCH, "all"))
        sizes = sizes_of(draft.graph, scope)
        if not sizes or not sizes_can_change(draft.graph):
            return None
        old, new = rng.choice(sizes), rng.choice(_SIZES)
        return None if old == new else (old, new, scope)

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Change it."""
        old, new, scope = params
        if type(new) is not int or not 0 <= new <= MAX_ELEMENTS or scope not in (BATCH, "all"):
            raise Invalid("no size")
        return draft.traced(resized(draft.trace, old, new, scope, draft.library.values))


def pointwise_calls(draft: Draft) -> list[int]:
    """Calls of element-wise operators that return one tensor and write nothing."""
    return [
        at
        for at, node in enumerate(draft.graph.nodes)
        if at not in draft.index_sources
        and info(node.op).pointwise
        and not info(node.op).writes
        and not info(node.op).random
        and isinstance(draft.trace.values[at], torch.Tensor)
    ]


class Rank:
    """An element-wise call on tensors of another rank, 0 to 5, with as many elements."""

    name = "rank"
    family = "tensors"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Call and shape."""
        calls = pointwise_calls(draft)
        if not calls:
            return None
        at = rng.choice(calls)
        left, shape = draft.trace.values[at].numel(), []
        rank = rng.below(6)
        for _ in range(rank - 1):
            f = rng.choice([f for f in (1, 2, 3, 4, 5, 7) if left % f == 0])
            shape.append(f)
            left //= f
        if rank == 0 and left != 1:
            rank = 1
        return (at, tuple(rng.shuffled([*shape, left]) if rank else ()))

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Reshape its arguments, and its result back."""
        at, shape = params
        node = node_at(draft.graph, at)
        result = draft.trace.tensor(Ref(at))
        if not info(node.op).pointwise or info(node.op).writes:
            raise Invalid("no element-wise call")
        if math.prod(shape) != result.numel() or len(shape) > 5 or not all(type(n) is int and n >= 0 for n in shape):
            raise Invalid(f"no shape of {result.numel()} elements")
        edit = Edit(draft.graph, at, drop=True)

        def shaped(argument: Any) -> Any:
            if type(argument) is not Ref:
                return argument
            t = draft.trace.tensor(argument)
            if not t.dim():
                return argument
            # Broadcast first: a dimension that the argument lacks has no counterpart in the new shape.
            whole = (
                argument if t.shape == result.shape else edit.call(aten.expand.default, argument, list(result.shape))
            )
            return edit.call(aten.reshape.default, whole, list(shape))

        ref = edit.add(Node(node.op, tuple(map(shaped, node.args)), node.kwargs, node.module))
        return draft.changed(edit.done({Ref(at): edit.call(aten.reshape.default, ref, list(result.shape))}))


class Broadcast:
    """An operand of an element-wise call becomes one slice of itself, which is broadcast."""

    name = "broadcast"
    family = "tensors"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Call, argument, dimension (counted from the end; 0 for all), and whether the dimension stays."""
        found = [
            (at, i)
            for at in pointwise_calls(draft)
            for i, a in enumerate(draft.graph.nodes[at].args)
            if type(a) is Ref and self._may(draft, at, i)
        ]
        if not found:
            return None
        at, i = rng.choice(found)
        rank = draft.trace.tensor(draft.graph.nodes[at].args[i]).dim()
        return (at, i, rng.below(rank + 1), rng.below(2))

    @staticmethod
    def _may(draft: Draft, at: int, i: int) -> bool:
        node, shape = draft.graph.nodes[at], draft.trace.values[at].shape
        t = draft.trace.value(node.args[i])
        others = [draft.trace.value(a) for k, a in enumerate(node.args) if type(a) is Ref and k != i]
        return (
            isinstance(t, torch.Tensor)
            and t.dim() > 0
            and t.numel() > 0
            # One argument must keep the whole shape, or the result would shrink with this one.
            and any(isinstance(o, torch.Tensor) and o.shape == shape for o in others)
        )

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Take the slice."""
        at, i, dim, keep = params
        node = node_at(draft.graph, at)
        if type(i) is not int or type(node.args[i]) is not Ref or type(dim) is not int or dim < 0:
            raise Invalid("no such argument")
        if not info(node.op).pointwise:
            raise Invalid("no element-wise call")
        edit = Edit(draft.graph, at, drop=True)
        t, ref = draft.trace.tensor(node.args[i]), node.args[i]
        for d in [-dim] if dim else range(-t.dim(), 0):
            # Without the dimension, only the first one leaves the others in their places.
            if (keep and dim) or (dim and dim != t.dim()):
                ref = edit.call(aten.slice.Tensor, ref, d, 0, 1)
            else:
                ref = edit.call(aten.select.int, ref, 0, -1)
        new = Node(node.op, (*node.args[:i], ref, *node.args[i + 1 :]), node.kwargs, node.module)
        return draft.changed(edit.done({Ref(at): edit.add(new)}))


_DTYPES: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("float32", "float64", "float16", "bfloat16"), ("float32", "float64", "float16", "bfloat16")),
    "int64": ("int32",),
    "int32": ("int64", "int16"),
}


class Dtype:
    """Another dtype for all inputs of one, and for the calls that name it; or for one input."""

    name = "dtype"
    family = "tensors"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Old dtype, new dtype, and the input; -1 for all."""
        names = sorted({name for i in draft.graph.inputs if (name := _name_of(i.dtype)) in _DTYPES})
        if not names:
            return None
        old = rng.choice(names)
        others = [d for d in _DTYPES[old] if d != old]
        # Rarely: few operators of a program take complex numbers.
        if old.startswith("float") and rng.chance(0.1):
            others = ["complex64"]
        which = -1 if rng.chance(0.8) else rng.below(len(draft.graph.inputs))
        return (old, rng.choice(others), which)

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Change it."""
        old, new, which = params
        if new not in _DTYPES and new != "complex64" and new not in ("int16", "int32"):
            raise Invalid(f"no dtype {ascii(new)[:40]}")
        was, now = getattr(torch, old) if old in _DTYPES else None, getattr(torch, new)
        if was is None or (which != -1 and draft.graph.inputs[which].dtype is not was):
            raise Invalid("no input of this dtype")

        def converted(value: Any) -> Any:
            if type(value) is tuple:
                return tuple(converted(v) for v in value)
            return now if value is was else value

        graph = draft.graph
        inputs = tuple(
            replace(i, dtype=now) if i.dtype is was and which in (-1, k) else i for k, i in enumerate(graph.inputs)
        )
        # The calls keep the dtype that they name: operands of two dtypes are what this variant is for.
        if which != -1:
            return draft.changed(Graph(inputs, graph.nodes, graph.outputs))
        nodes = tuple(
            replace(n, args=converted(n.args), kwargs=tuple((k, converted(v)) for k, v in n.kwargs))
            for n in graph.nodes
        )
        return draft.changed(Graph(inputs, nodes, graph.outputs))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Layout:
    """Another layout of an input: transposed, channels last, with gaps, behind an offset, expanded."""

    name = "layout"
    family = "tensors"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Input, strides in elements, and offset."""
        inputs = [k for k, i in enumerate(draft.graph.inputs) if i.shape and math.prod(i.shape) > 1]
        if not inputs:
            return None
        k = rng.choice(inputs)
        shape = draft.graph.inputs[k].shape
        kinds = ("order", "gaps", "offset", "channels", "expanded")
        kind = rng.choice(kinds if draft.graph.inputs[k].dtype.is_floating_point else kinds[:-1])
        order = list(range(len(shape)))
        if kind == "channels" and len(shape) in (4, 5):
            order = [0, *range(2, len(shape)), 1]
        elif kind in ("order", "channels"):
            order = rng.shuffled(order)
        gap = rng.choice((2, 3)) if kind == "gaps" else 1
        strides, step = [0] * len(shape), gap
        flat = rng.below(len(shape)) if kind == "expanded" else -1
        for d in reversed(order):
            if d != flat:
                strides[d], step = step, step * max(shape[d], 1)
        return (k, tuple(strides), rng.choice((1, 3, 8)) if kind == "offset" else 0)

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Lay it out so."""
        k, strides, offset = params
        graph = draft.graph
        if type(k) is not int or not 0 <= k < len(graph.inputs):
            raise Invalid("no such input")
        if any(info(n.op).layout for n in graph.nodes):
            raise Invalid("a call whose result depends on strides")
        old = graph.inputs[k]
        if len(strides) != len(old.shape) or not all(type(s) is int and s >= 0 for s in (*strides, offset)):
            raise Invalid("no strides")
        # Kernels take tables of indices and lengths as dense.
        if 0 in strides and (graph.writes or 0 in old.shape or not old.dtype.is_floating_point):
            raise Invalid("an expanded tensor that is written to, or has no floats")
        _check_reach(old.shape, strides, offset)
        new = replace(old, strides=tuple(strides), offset=offset)
        return draft.changed(Graph((*graph.inputs[:k], new, *graph.inputs[k + 1 :]), graph.nodes, graph.outputs))


def _check_reach(shape: Sequence[int], strides: Sequence[int], offset: int) -> None:
    """Look that no element lies on another but by expansion.

    Raises:
        Invalid: One does, or the memory is too large.
    """
    reach = 0
    for stride, n in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1 and s):
        # Sorted by stride: each dimension has to step over all that the smaller ones reach.
        if stride <= reach:
            raise Invalid("strides that overlap")
        reach += stride * (n - 1)
    if reach + offset > MAX_ELEMENTS:
        raise Invalid("strides that reach too far")
