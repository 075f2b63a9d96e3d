"""The mutator of arguments: another value for one argument of one call, chosen by its name and type in the schema."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.intercept.untrusted.op_allowlist import is_word
from shadowrun.studies.campaign.mutators.mutator import Edit, node_at, refitted
from shadowrun.studies.campaign.variants.tracing import Invalid, info, run_node
from shadowrun.studies.zoo.graph import Node, Ref, refs_in
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.studies.campaign.variants.counter_rng import CounterRng
    from shadowrun.studies.campaign.variants.program_draft import Draft
    from shadowrun.studies.campaign.variants.recipe import Params

__all__ = ["Argument", "Unread", "with_argument"]

# An integer may be a size: a greater one would take the memory of the machine.
_MAX_INT: Final = 4096
_MAX_PRODUCT: Final = 1 << 20
_FLOATS: Final = ("float32", "float64", "float16", "bfloat16")
_FORMATS: Final = ("contiguous_format", "channels_last", "preserve_format")


class Argument:
    """Another value for an argument of a call."""

    name = "argument"
    family = "arguments"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Call, name of the argument, and value."""
        places = [(at, i) for at, i in _places(draft) if at not in draft.index_sources]
        if not places:
            return None
        at, i = rng.choice(places)
        node = draft.graph.nodes[at]
        argument = schema_of(node.op).arguments[i]
        old = _given(node, i)
        first = next(refs_in(node.args), None)
        x = draft.trace.value(first) if first is not None else None
        new = _RULES[argument.name](rng, old, x if isinstance(x, torch.Tensor) else None)
        return None if new is _NONE or _plain(new) == old else (at, argument.name, new)

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Give it the value; a result of another form is cut or repeated where a call reads it."""
        at, name, value = params
        node = node_at(draft.graph, at)
        if name not in _RULES:
            raise Invalid(f"the argument {name!r} is not mutated")
        new = with_argument(node, name, _checked(name, value))
        edit = Edit(draft.graph, at, drop=True)
        ref = edit.add(new)
        return draft.changed(edit.done(refitted(draft, edit, at, ref, run_node(new, draft.trace))))


class Unread:
    """``beta=0``, with NaN or infinities in what it multiplies: torch promises not to read that."""

    name = "unread"
    family = "arguments"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Call, and value."""
        calls = [at for at, node in enumerate(draft.graph.nodes) if self._may(draft, node)]
        return (rng.choice(calls), rng.choice(("nan", "inf", "-inf"))) if calls else None

    @staticmethod
    def _may(draft: Draft, node: Node) -> bool:
        # What an in-place call would read is what it writes.
        if info(node.op).writes or "beta" not in (a.name for a in schema_of(node.op).arguments):
            return False
        addend = draft.trace.value(node.args[0]) if node.args and type(node.args[0]) is Ref else None
        return isinstance(addend, torch.Tensor) and addend.is_floating_point()

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Put such a tensor in the place of the addend."""
        at, value = params
        node = node_at(draft.graph, at)
        if value not in ("nan", "inf", "-inf") or not self._may(draft, node):
            raise Invalid("no addend that is not read")
        edit = Edit(draft.graph, at, drop=True)
        addend = edit.call(torch.ops.aten.full_like.default, node.args[0], math.inf if value == "nan" else float(value))
        if value == "nan":  # as a number in a graph it would not equal itself, nor would the graph
            addend = edit.call(torch.ops.aten.sub.Tensor, addend, addend)
        ref = edit.add(with_argument(replace(node, args=(addend, *node.args[1:])), "beta", 0))
        return draft.changed(edit.done({Ref(at): ref}))


def _places(draft: Draft) -> Iterator[tuple[int, int]]:
    """Call and position of each argument that has a rule."""
    for at, node in enumerate(draft.graph.nodes):
        yield from ((at, i) for i in _ruled(node.op) if not _holds_ref(_given(node, i)))


def _holds_ref(value: Any) -> bool:
    return any(True for _ in refs_in(value))


@functools.lru_cache(maxsize=4096)
def _ruled(op: torch._ops.OpOverload) -> tuple[int, ...]:
    """Positions of an operator's arguments that have a rule."""
    # Torch warns where it resizes a result that it is given.
    about = info(op)
    if about.random or about.layout or about.into or (about.fragile and "batch_norm" not in about.base):
        return ()
    # A tensor in this place, as the `other` of add, is no argument of ours.
    return tuple(
        i
        for i, a in enumerate(schema_of(op).arguments)
        if a.name in _RULES and not a.is_out and "Tensor" not in str(a.type)
    )


def _given(node: Node, i: int) -> Any:
    """An argument by its position in the schema; its default where it is not given."""
    if i < len(node.args):
        return node.args[i]
    argument = schema_of(node.op).arguments[i]
    default = argument.default_value
    return dict(node.kwargs).get(argument.name, tuple(default) if type(default) is list else default)


def with_argument(node: Node, name: str, value: Any) -> Node:
    """A call with one argument replaced or added.

    Raises:
        Invalid: The operator has none of this name.
    """
    order = [a.name for a in schema_of(node.op).arguments]
    if name not in order:
        raise Invalid(f"{node.name} has no argument {name}")
    i = order.index(name)
    if i < len(node.args):
        return Node(node.op, (*node.args[:i], value, *node.args[i + 1 :]), node.kwargs, node.module)
    kwargs = dict(node.kwargs) | {name: value}
    return Node(node.op, node.args, tuple(sorted(kwargs.items(), key=lambda kv: order.index(kv[0]))), node.module)


# A rule found no value.
_NONE: Final = object()


def _one_of(*values: Any) -> Callable[[CounterRng, Any, torch.Tensor | None], Any]:
    return lambda rng, _old, _x: rng.choice(values)


def _flag(_: CounterRng, old: Any, __: torch.Tensor | None) -> Any:
    return not old if type(old) is bool else _NONE


def _dim(rng: CounterRng, old: Any, x: torch.Tensor | None) -> Any:
    """A dimension from either end, or several."""
    rank = x.dim() if x is not None else 0
    if not rank or old is None:
        return _NONE
    if type(old) is tuple:
        chosen = rng.shuffled(range(rank))[: 1 + rng.below(rank)]
        return tuple(d - rank if rng.chance(0.3) else d for d in chosen)
    return rng.below(2 * rank) - rank


def _permutation(rng: CounterRng, old: Any, x: torch.Tensor | None) -> Any:
    """Dimensions in another order; of `flip`, some of them."""
    if x is None or not x.dim() or type(old) is not tuple:
        return _NONE
    order = rng.shuffled(range(x.dim()))
    return tuple(order if len(old) == x.dim() else order[: 1 + rng.below(x.dim())])


def _each(*values: int) -> Callable[[CounterRng, Any, torch.Tensor | None], Any]:
    """A number for each dimension, or one for all."""

    def rule(rng: CounterRng, old: Any, _: torch.Tensor | None) -> Any:
        if type(old) is not tuple:
            return rng.choice(values) if type(old) is int else _NONE
        if rng.chance(0.5):
            return (rng.choice(values),) * len(old)
        return tuple(rng.choice(values) for _ in old)

    return rule


def _scalar(*values: float) -> Callable[[CounterRng, Any, torch.Tensor | None], Any]:
    """A number; a whole one where the call has integers."""

    def rule(rng: CounterRng, old: Any, x: torch.Tensor | None) -> Any:
        if old is None or type(old) is bool or (x is not None and x.dtype is torch.bool):
            return _NONE
        value = rng.choice(values)
        return value if x is None or x.is_floating_point() else max(1, round(value))

    return rule


def _bound(rng: CounterRng, _: Any, x: torch.Tensor | None) -> Any:
    if x is None or x.dtype is torch.bool:
        return _NONE
    values = (-2.0, -0.5, 0.0, 0.25, 1.0, 6.0) if x.is_floating_point() else (-3, 0, 1, 5)
    return rng.choice(values)


def _sizes(rng: CounterRng, old: Any, x: torch.Tensor | None) -> Any:
    """Another shape of as many elements."""
    if x is None or type(old) is not tuple or not x.numel() or not all(type(n) is int for n in old):
        return _NONE
    known = 1
    for n in old:
        known *= n if n != -1 else 1
    total = x.numel() if -1 in old else known
    if total != x.numel():
        return _NONE  # an `expand`, or a new tensor
    shape = [total]
    for _ in range(rng.below(4)):
        k = rng.below(len(shape))
        factors = [f for f in (1, 2, 3, 4, 5, 7, 8) if shape[k] % f == 0]
        f = rng.choice(factors)
        shape[k : k + 1] = [f, shape[k] // f]
    return tuple(shape)


def _dtype(rng: CounterRng, old: Any, _: torch.Tensor | None) -> Any:
    if not isinstance(old, torch.dtype) or not old.is_floating_point:
        return _NONE
    return ("dtype", rng.choice(_FLOATS))


def _format(rng: CounterRng, _: Any, x: torch.Tensor | None) -> Any:
    return ("format", rng.choice(_FORMATS)) if x is not None and x.dim() == 4 else _NONE


def _count(rng: CounterRng, old: Any, _: torch.Tensor | None) -> Any:
    return max(1, old + rng.below(5) - 2) if type(old) is int else _NONE


def _place(rng: CounterRng, old: Any, _: torch.Tensor | None) -> Any:
    """A start, end or index, counted from either end."""
    if type(old) is not int and old is not None:
        return _NONE
    return rng.below(9) - 4


def _split_sizes(rng: CounterRng, old: Any, _: torch.Tensor | None) -> Any:
    return tuple(rng.shuffled(old)) if type(old) is tuple else _NONE


_EPS: Final = _scalar(1e-3, 1e-5, 1e-6, 1e-8, 1e-12, 0.1, 1.0)
# By name of the argument. What may be divided by is in `_checked`.
_RULES: Final[dict[str, Callable[[CounterRng, Any, torch.Tensor | None], Any]]] = {
    # Dimensions and places
    **dict.fromkeys(("dim", "dim0", "dim1", "dim2", "axis"), _dim),
    "dims": _permutation,
    **dict.fromkeys(("start", "end", "index"), _place),
    "step": _one_of(1, 2, 3),
    "diagonal": _one_of(-3, -1, 0, 1, 2),
    "offset": _one_of(-1, 0, 1),
    "shifts": _each(-3, -1, 0, 1, 5),
    "size": _sizes,
    "split_sizes": _split_sizes,
    "split_size": _count,
    "chunks": _count,
    "k": _count,
    "n": _count,
    # Windows
    "kernel_size": _each(1, 2, 3, 5),
    "stride": _each(1, 2, 3),
    "padding": _each(0, 1, 2),
    "dilation": _each(1, 2, 3),
    "output_padding": _each(0, 1),
    "output_size": _each(1, 2, 3, 5, 7, 8),
    "pad": _each(-1, 0, 1, 2),
    "repeats": _each(1, 2, 3),
    "groups": _one_of(1, 2, 4),
    "upscale_factor": _one_of(1, 2, 3),
    "downscale_factor": _one_of(1, 2),
    # Flags
    **dict.fromkeys(
        """
        keepdim unbiased largest descending ceil_mode count_include_pad align_corners is_causal right include_self
        zero_infinity stable upper hermitian log_target
        """.split(),  # noqa: SIM905
        _flag,
    ),
    # Choices
    "reduction": _one_of(0, 1, 2),
    "approximate": _one_of("none", "tanh"),
    "rounding_mode": _one_of(None, "trunc", "floor"),
    "reduce": _one_of("sum", "mean", "prod", "amax", "amin"),
    "interpolation_mode": _one_of(0, 1),
    "padding_mode": _one_of(0, 1, 2),
    "correction": _one_of(0, 1),
    "dtype": _dtype,
    "memory_format": _format,
    # Numbers
    "eps": _EPS,
    "alpha": _scalar(1, 2, -1, 0, 0.5, 3),
    "beta": _scalar(1, 0, 2, -0.5, 3.0),
    **dict.fromkeys(("min", "max", "min_val", "max_val", "threshold", "other"), _bound),
    "value": _scalar(1, 0.5, 2, -1),
    "negative_slope": _scalar(0.01, 0.2, 1.0, 0.0),
    "lambd": _scalar(0.5, 0.1, 1.0),
    "exponent": _scalar(2, 3, 1, 0.5, -1, 0),
    "scale": _scalar(0.125, 1.0, 0.5),
    "weight": _scalar(0.25, 0.5, 0.75),
    "p": _scalar(1, 2, 3, 0.5),
    "ord": _scalar(1, 2, 3, 0.5),
    "delta": _scalar(0.5, 1.0, 2.0),
    "margin": _scalar(0.0, 0.5, 1.0),
    "momentum": _scalar(0.1, 0.5, 0.9),
}


def _checked(name: str, value: Any) -> Any:
    """A value from a recipe, as the operator takes it.

    Raises:
        Invalid: It is none for this argument.
    """
    value = _plain(value)
    flat = value if type(value) is tuple else (value,)
    product = 1
    for v in flat:
        text = type(v) is str and is_word(v, name)
        number = v is None or type(v) in (bool, float) or (type(v) is int and abs(v) <= _MAX_INT)
        if not (text or number or isinstance(v, (torch.dtype, torch.memory_format))):
            raise Invalid(f"{ascii(v)[:40]} is no value for {name}")
        # As a product: sizes of which each is small may together ask for any memory.
        product *= max(abs(v), 1) if type(v) is int else 1
    if product > _MAX_PRODUCT:
        raise Invalid(f"{name} is too large")
    return value


def _plain(value: Any) -> Any:
    """A dtype or a memory format of its name."""
    if type(value) is tuple and len(value) == 2 and value[0] == "dtype" and value[1] in _FLOATS:
        return getattr(torch, value[1])
    if type(value) is tuple and len(value) == 2 and value[0] == "format" and value[1] in _FORMATS:
        return getattr(torch, value[1])
    return value
