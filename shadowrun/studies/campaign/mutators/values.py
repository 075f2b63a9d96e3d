"""Mutators of the values of inputs: exceptional ones, and those at the edges of what a dtype or an operator can do."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.operators.facts import facts
from shadowrun.studies.campaign.mutators.mutator import Edit, node_at
from shadowrun.studies.campaign.mutators.tensors import pointwise_calls
from shadowrun.studies.campaign.variants.tracing import Invalid, first_line, info
from shadowrun.studies.zoo.graph import Fill, Graph, Ref
from shadowrun.studies.zoo.input_values import EXCEPTIONAL

if TYPE_CHECKING:
    from shadowrun.studies.campaign.variants.counter_rng import CounterRng
    from shadowrun.studies.campaign.variants.program_draft import Draft
    from shadowrun.studies.campaign.variants.recipe import Params

__all__ = ["Edge", "Exceptional", "Scale"]

aten = torch.ops.aten
# Numbers between a power of 2 and the next that are tried for an edge: few enough that all kernels agree on them.
_PER_OCTAVE: Final = 1024
# Arguments of calls that are tried for one that has an edge.
_PLACES: Final = 8


def _value_inputs(draft: Draft) -> list[int]:
    """Floating inputs that decide no index and become no integers."""
    return [
        k
        for k, i in enumerate(draft.graph.inputs)
        if i.dtype.is_floating_point and -1 - k not in draft.index_sources and Ref(-1 - k) in draft.uses
    ]


def with_fill(draft: Draft, k: Any, fill: Fill) -> Draft:
    """The draft with other values of an input.

    Raises:
        Invalid: It is no floating input.
    """
    graph = draft.graph
    if type(k) is not int or k not in _value_inputs(draft):
        raise Invalid("no such floating input")
    new = replace(graph.inputs[k], fill=fill)
    return draft.changed(Graph((*graph.inputs[:k], new, *graph.inputs[k + 1 :]), graph.nodes, graph.outputs))


def accumulates_downstream(draft: Draft, value: int) -> bool:
    """Whether a call sums what a value leads to, that of call `value` or of input `-1 - value`.

    A sum that leaves the range on the way depends on the order of its terms: infinity, NaN or a number are all right.
    """
    reached = {value}
    for at, node in enumerate(draft.graph.nodes):
        if any(r.node in reached for r in node.refs()):
            reached.add(at)
            row = facts(node.name)
            if row.accumulates or row.normalizes or not (info(node.op).pointwise or row.only_moves):
                return True
    return False


class Exceptional:
    """NaN, infinities, zeros of both signs, subnormals or the largest numbers among the values of an input."""

    name = "exceptional"
    family = "tensors"
    exceptional = True

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Input and kind."""
        inputs = _value_inputs(draft)
        return (rng.choice(inputs), rng.choice(EXCEPTIONAL)) if inputs else None

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Fill it so."""
        k, kind = params
        if kind not in EXCEPTIONAL or type(k) is not int or not 0 <= k < len(draft.graph.inputs):
            raise Invalid(f"no exceptional values {ascii(kind)[:40]}")
        if kind == "largest" and accumulates_downstream(draft, -1 - k):
            raise Invalid("the largest numbers in a sum")
        old = draft.graph.inputs[k].fill
        mean, std = (old.a, old.b) if old.kind == "normal" else (0.0, 1.0)
        return with_fill(draft, k, Fill(kind, mean, std))


class Scale:
    """Values of an input near the edge of overflow or of underflow of its dtype."""

    name = "scale"
    family = "tensors"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Input, and the exponent of 2 of the values' deviation."""
        inputs = _value_inputs(draft)
        if not inputs:
            return None
        k = rng.choice(inputs)
        largest, smallest, subnormal = _edges(draft.graph.inputs[k].dtype)
        # Squares leave the range from half of the largest exponent on; a sum of them needs some more room.
        near = (largest - 2, largest // 2) if not accumulates_downstream(draft, -1 - k) else (largest // 2 - 5,)
        return (k, rng.choice((*near, smallest + 2, smallest // 2, subnormal + 3)))

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Scale it."""
        k, exponent = params
        if type(exponent) is not int or type(k) is not int or not 0 <= k < len(draft.graph.inputs):
            raise Invalid("no exponent")
        largest, _, subnormal = _edges(draft.graph.inputs[k].dtype)
        if not subnormal <= exponent < largest:
            raise Invalid("an exponent that the dtype does not have")
        return with_fill(draft, k, Fill("normal", 0.0, 2.0**exponent))


class Edge:
    """Arguments of an element-wise call right below the greatest that it has a finite result for.

    `Scale` knows the edges of a dtype; those of exp, cosh, or asin lie elsewhere. An input gets such values; what
    another call returns is moved there.
    """

    name = "edge"
    family = "tensors"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Input, or call and position of its argument, and the range of its values."""
        inputs = set(_value_inputs(draft))
        places = [
            (at, i, a.node)
            for at in pointwise_calls(draft)
            for i, a in enumerate(draft.graph.nodes[at].args)
            if type(a) is Ref and (a.node >= 0 or -1 - a.node in inputs) and _has_floats(draft, a)
        ]
        # Most calls have no edge, or are added up later.
        for at, i, node in rng.shuffled(places)[:_PLACES]:
            if accumulates_downstream(draft, at if node >= 0 else node):
                continue
            for sign in rng.shuffled((1.0, -1.0)):
                edge = sign * _last_finite(draft, at, i, sign)
                if edge:
                    place = (at, i) if node >= 0 else (-1 - node,)
                    return (*place, *sorted((edge * 0.99, edge)))
        return None

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Give it such values."""
        *place, low, high = params
        if type(low) is not float or type(high) is not float or not -math.inf < low <= high < math.inf:
            raise Invalid("no range of values")
        if len(place) == 1:
            return with_fill(draft, place[0], Fill("uniform", low, high))
        at, i = place
        node = node_at(draft.graph, at)
        if at not in pointwise_calls(draft) or type(i) is not int or not 0 <= i < len(node.args):
            raise Invalid("no element-wise call")
        ref = node.args[i]
        if type(ref) is not Ref or not _has_floats(draft, ref):
            raise Invalid("no argument with floats")
        edit = Edit(draft.graph, at, drop=True)
        # Rounding keeps it within: of the range, one tenth at each end is not used.
        part = edit.call(aten.mul.Scalar, edit.call(aten.tanh.default, ref), 0.4 * (high - low))
        moved = edit.call(aten.add.Scalar, part, (low + high) / 2)
        new = replace(node, args=(*node.args[:i], moved, *node.args[i + 1 :]))
        return draft.changed(edit.done({Ref(at): edit.add(new)}))


def _has_floats(draft: Draft, ref: Ref) -> bool:
    t = draft.trace.value(ref)
    return isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel() > 0


def _last_finite(draft: Draft, at: int, i: int, sign: float) -> float:
    """The greatest size, of those tried, at which a call is finite; 0 if it always is, or not even at 1.

    Args:
        draft: Has the call and its other arguments.
        at: Number of the call.
        i: Position of the argument.
        sign: Of the values.
    """
    node = draft.graph.nodes[at]
    args, kwargs = [draft.trace.resolved(a) for a in node.args], {k: draft.trace.resolved(v) for k, v in node.kwargs}
    x = args[i]
    # In bfloat16 there are fewer, and a number between its greatest and infinity is refused.
    per_octave = min(_PER_OCTAVE, round(1 / torch.finfo(x.dtype).eps))

    def size(step: int) -> float:
        octave, part = divmod(step, per_octave)
        return math.ldexp(1 + part / per_octave, octave)

    def is_finite(step: int) -> bool:
        args[i] = torch.full_like(x, sign * size(step))
        try:
            made = node.op(*args, **kwargs)
        except Exception as error:  # an operator may refuse values
            raise Invalid(first_line(error)) from None
        results = made if isinstance(made, (list, tuple)) else (made,)
        return all(bool(t.isfinite().all()) for t in results if isinstance(t, torch.Tensor))

    # The greatest number of the dtype itself may be rounded up to infinity on the way.
    low, high = 0, _edges(x.dtype)[0] * per_octave - 2
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not is_finite(low) or is_finite(high):
            return 0.0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_finite(middle) else (low, middle)
    return size(low)


def _edges(dtype: torch.dtype) -> tuple[int, int, int]:
    """Exponents of 2 of the largest, the smallest normal and the smallest number."""
    limits = torch.finfo(dtype)
    smallest = math.frexp(limits.tiny)[1] - 1
    return math.frexp(limits.max)[1], smallest, smallest + math.frexp(limits.eps)[1] - 1
