"""Mutators of structure: calls come, go, change places, or become others."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.studies.campaign.mutators import layers
from shadowrun.studies.campaign.mutators.layers import FLOAT
from shadowrun.studies.campaign.mutators.mutator import Edit, fitted, node_at, op_named, ref_of, refitted
from shadowrun.studies.campaign.variants.counter_rng import CounterRng
from shadowrun.studies.campaign.variants.tracing import Invalid, info, run_node
from shadowrun.studies.zoo.graph import Fill, Graph, Input, Node, Ref
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from shadowrun.studies.campaign.variants.program_draft import Draft
    from shadowrun.studies.campaign.variants.recipe import Params

__all__ = [
    "Duplicate",
    "Graft",
    "Insert",
    "InsertBinary",
    "InsertLayer",
    "Remove",
    "Replace",
    "Swap",
    "Weights",
    "others_of",
    "with_operator",
]

aten = torch.ops.aten


def value_to_change(draft: Draft, rng: CounterRng, *, floats_only: bool = False) -> Ref | None:
    """A tensor that is used, and whose values decide no index."""
    index_sources, uses = draft.index_sources, draft.uses
    found = [
        ref
        for ref, t in draft.tensors()
        if ref in uses
        # A changed index may lie outside of a table: most kernels of the CPU do not look, and the process would end.
        and ref.node not in index_sources
        and (t.is_floating_point() or not (floats_only or t.is_complex() or t.dtype is torch.bool))
    ]
    return rng.choice(found) if found else None


def insert_after(draft: Draft, ref: Ref) -> Edit:
    """An edit right behind a value."""
    return Edit(draft.graph, max(ref.node, -1) + 1)


class Insert:
    """An element-wise operator behind a value."""

    name = "insert"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Value and operator."""
        ref = value_to_change(draft, rng)
        if ref is None:
            return None
        table = layers.FLOAT if draft.trace.tensor(ref).is_floating_point() else layers.INTEGER
        return (*ref, rng.choice(table))

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Insert it."""
        node, output, name = params
        ref = ref_of(draft.graph, node, output)
        t = draft.trace.tensor(ref)
        # Parameters of a recipe may come from a file of anyone: `apply` checks what `propose` chose.
        if name not in (layers.FLOAT if t.is_floating_point() else layers.INTEGER):
            raise Invalid(f"no operator {name!r} of {t.dtype}")
        edit = insert_after(draft, ref)
        return draft.changed(edit.done({ref: layers.unary(edit, name, ref)}))


class InsertBinary:
    """An element-wise operator of a value and another that came before it, or itself."""

    name = "insert-binary"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Value, operator, other value, and which comes first."""
        ref = value_to_change(draft, rng)
        if ref is None:
            return None
        t = draft.trace.tensor(ref)
        others = [
            other
            for other, u in draft.tensors()
            # Without type promotion and a larger result: whatever reads the value was captured with its dtype and
            # shape.
            if other.node <= ref.node and u.dtype is t.dtype and _broadcasts_into(u.shape, t.shape)
        ]
        return (*ref, rng.choice(layers.BINARY), *rng.choice(others or [ref]), rng.below(2))

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Insert it."""
        node, output, name, other_node, other_output, swapped = params
        ref, other = ref_of(draft.graph, node, output), ref_of(draft.graph, other_node, other_output)
        t = draft.trace.tensor(ref)
        if name not in layers.BINARY or other.node > ref.node:
            raise Invalid(f"no operator {name!r} of these values")
        edit = insert_after(draft, ref)
        first, second = (other, ref) if swapped else (ref, other)
        return draft.changed(edit.done({ref: layers.binary(edit, name, first, second, t)}))


def _broadcasts_into(small: torch.Size, shape: torch.Size) -> bool:
    return len(small) <= len(shape) and all(a in (1, b) for a, b in zip(reversed(small), reversed(shape), strict=False))


class InsertLayer:
    """A layer that keeps shape and dtype, with weights of its own where it has any."""

    name = "insert-layer"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Value, layer, and the number from which its details are drawn."""
        ref = value_to_change(draft, rng, floats_only=True)
        return None if ref is None else (*ref, rng.choice(tuple(layers.LAYERS)), rng.below(1000))

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Insert it."""
        node, output, name, number = params
        ref = ref_of(draft.graph, node, output)
        t = draft.trace.tensor(ref)
        if not t.is_floating_point():
            raise Invalid("a layer of no floats")
        edit = insert_after(draft, ref)
        # A recipe holds one small number, and the generator makes all details of a layer from it, anywhere the same.
        return draft.changed(edit.done({ref: layers.LAYERS[name](edit, ref, t, CounterRng(name, number))}))


def form_of(t: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype."""
    return t.shape, t.dtype


class Remove:
    """A call goes; what read its result reads one of its arguments."""

    name = "remove"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Call, and number of the reference among its arguments that takes its place."""
        found = [
            (at, k)
            for at, node in enumerate(draft.graph.nodes)
            if at not in draft.index_sources
            for k, ref in enumerate(node.refs())
            if self._fits(draft, at, ref)
        ]
        return rng.choice(found) if found else None

    @staticmethod
    def _fits(draft: Draft, at: int, ref: Ref) -> bool:
        have, want = draft.trace.value(ref), draft.trace.value(Ref(at))
        if not (isinstance(have, torch.Tensor) and isinstance(want, torch.Tensor)):
            return False
        # The same dtype, or one step that loses nothing that is defined.
        return have.dtype is want.dtype and (have.numel() > 0 or want.numel() == 0)

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Remove it; a value of another shape is cut or repeated."""
        at, k = params
        node = node_at(draft.graph, at)
        ref = list(node.refs())[k]
        edit = Edit(draft.graph, at, drop=True)
        new = fitted(edit, ref, draft.trace.tensor(ref), draft.trace.tensor(Ref(at)))
        # Calls that only the removed one read would run for nothing, and would be in the identity of the variant.
        return draft.changed(edit.done({Ref(at): new}).without_dead_code())


class Duplicate:
    """A call is made a second time, on its own result."""

    name = "duplicate"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Call, and number of the argument that gets its result."""
        found = []
        for at, node in enumerate(draft.graph.nodes):
            value = draft.trace.value(Ref(at))
            # A second write would go to a value that is read elsewhere, and what is read then depends on the order.
            if at in draft.index_sources or not isinstance(value, torch.Tensor) or info(node.op).writes:
                continue
            found += [(at, k) for k, a in enumerate(node.args) if type(a) is Ref and _same_form(draft, a, value)]
        return rng.choice(found) if found else None

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Make it twice."""
        at, k = params
        node = node_at(draft.graph, at)
        if type(k) is not int or type(node.args[k]) is not Ref:
            raise Invalid("no such argument")
        args = (*node.args[:k], Ref(at), *node.args[k + 1 :])
        edit = Edit(draft.graph, at + 1)
        return draft.changed(edit.done({Ref(at): edit.add(Node(node.op, args, node.kwargs, node.module))}))


def _same_form(draft: Draft, ref: Ref, value: torch.Tensor) -> bool:
    other: Any = draft.trace.value(ref)
    return isinstance(other, torch.Tensor) and form_of(other) == form_of(value)


class Swap:
    """Two calls in a row change places, or the first two arguments of an element-wise call do."""

    name = "swap"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Second call, and number of the argument in which it reads the first; -1 for a swap of arguments."""
        found: list[tuple[int, int]] = []
        for at, node in enumerate(draft.graph.nodes):
            if at in draft.index_sources or info(node.op).writes:
                continue
            if info(node.op).pointwise and len(node.args) > 1 and type(node.args[0]) is type(node.args[1]) is Ref:
                found.append((at, -1))
            found += [(at, k) for k in range(len(node.args)) if self._inner(draft, at, k) is not None]
        return rng.choice(found) if found else None

    @staticmethod
    def _inner(draft: Draft, at: int, k: int) -> int | None:
        """Number of the argument that the first call passes on to the second one in the same form."""
        ref = draft.graph.nodes[at].args[k]
        # A value that another call reads as well cannot go: the two calls would both have to stay.
        if type(ref) is not Ref or ref.node < 0 or ref.output or draft.uses[ref] != [at]:
            return None
        first, value = draft.graph.nodes[ref.node], draft.trace.value(Ref(at))
        if info(first.op).writes or not isinstance(draft.trace.values[ref.node], torch.Tensor):
            return None
        if not isinstance(value, torch.Tensor) or not _same_form(draft, ref, value):
            return None
        fitting = (j for j, a in enumerate(first.args) if type(a) is Ref and _same_form(draft, a, value))
        return next(fitting, None)

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Swap them."""
        at, k = params
        node = node_at(draft.graph, at)
        edit = Edit(draft.graph, at, drop=True)
        if k == -1:
            if not info(node.op).pointwise or len(node.args) < 2:
                raise Invalid("no element-wise call of two")
            new = edit.add(Node(node.op, (node.args[1], node.args[0], *node.args[2:]), node.kwargs, node.module))
            value, want = draft.trace.tensor(Ref(at)), draft.trace.tensor(Ref(at))
            return draft.changed(edit.done({Ref(at): fitted(edit, new, value, want)}))
        j = self._inner(draft, at, k) if type(k) is int and 0 <= k < len(node.args) else None
        if j is None:
            raise Invalid("no two calls in a row of one form")
        first = draft.graph.nodes[node.args[k].node]
        inner = edit.add(Node(node.op, (*node.args[:k], first.args[j], *node.args[k + 1 :]), node.kwargs, node.module))
        outer = edit.add(Node(first.op, (*first.args[:j], inner, *first.args[j + 1 :]), first.kwargs, first.module))
        return draft.changed(edit.done({Ref(at): outer}).without_dead_code())


class Replace:
    """A call of another operator of the same signature."""

    name = "replace"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Call and operator."""
        found = [
            at for at, node in enumerate(draft.graph.nodes) if at not in draft.index_sources and others_of(node.op)
        ]
        if not found:
            return None
        at = rng.choice(found)
        return (at, rng.choice(others_of(draft.graph.nodes[at].op)))

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Call it; its argument is moved into its domain."""
        at, name = params
        node = node_at(draft.graph, at)
        if name not in others_of(node.op):
            raise Invalid(f"{ascii(name)[:40]} does not take the place of {node.name}")
        edit = Edit(draft.graph, at, drop=True)
        x = node.args[0] if node.args else None
        if type(x) is Ref and draft.trace.tensor(x).is_floating_point():
            # Without it nearly all of log, acos or rsqrt would be NaN, which is compared by its class and hides all
            # else.
            node = Node(node.op, (layers.guarded(edit, name, x), *node.args[1:]), node.kwargs, node.module)
        new = with_operator(node, name)
        ref = edit.add(new)
        return draft.changed(edit.done(refitted(draft, edit, at, ref, self._value(draft, at, new))))

    @staticmethod
    def _value(draft: Draft, at: int, new: Node) -> Any:
        """What the call returns; the guard in front of it changes no form."""
        old = draft.graph.nodes[at]
        # The guard is in the edit only, which has not run; its result has the form of its argument.
        return run_node(Node(new.op, (*old.args[:1], *new.args[1:]), new.kwargs), draft.trace)


class Weights:
    """Weights are negated, reversed, shuffled, zeroed in part, or spread wider: LEMON's mutators of weights."""

    name = "weights"
    family = "structure"
    exceptional = False

    KINDS = ("negated", "reversed", "shifted", "zeroed", "shuffled", "wider")

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Input and kind."""
        found = [
            k
            for k, i in enumerate(draft.graph.inputs)
            if i.role == "parameter" and i.dtype.is_floating_point and 0 not in i.shape and i.shape
        ]
        return (rng.choice(found), rng.choice(self.KINDS)) if found else None

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Change them."""
        k, kind = params
        graph = draft.graph
        if type(k) is not int or not 0 <= k < len(graph.inputs) or kind not in self.KINDS:
            raise Invalid("no such weights")
        old, ref = graph.inputs[k], Ref(-1 - k)
        if kind == "wider":
            # Values of inputs are generated from their fill: no call is needed, as it is for an order or a sign.
            new = replace(old, fill=Fill("normal", old.fill.a if old.fill.kind == "normal" else 0.0, 2.0))
            return draft.changed(Graph((*graph.inputs[:k], new, *graph.inputs[k + 1 :]), graph.nodes, graph.outputs))
        # In front of all calls: each that reads the weights reads the changed ones.
        edit, n = Edit(graph, 0), old.shape[0]
        if kind == "negated":
            out = edit.call(aten.neg.default, ref)
        elif kind == "reversed":
            out = edit.call(aten.flip.default, ref, [0])
        elif kind == "shifted":
            out = edit.call(aten.roll.default, ref, [1], [0])
        elif kind == "zeroed":
            mask = edit.input(Input("added", old.shape, torch.bool, Fill("bools", 0.3, 0.0)))
            out = edit.call(aten.masked_fill.Scalar, ref, mask, 0)
        else:
            order = edit.input(Input("added", (n,), torch.int64, Fill("permutation")))
            out = edit.call(aten.index_select.default, ref, 0, order)
        return draft.changed(edit.done({ref: out}))


# program.
_MAX_DONOR: Final = 24


class Graft:
    """The calls of another small program behind a value."""

    name = "graft"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Value, id of the program, its input that the value replaces, and its result that replaces the value."""
        ref = value_to_change(draft, rng, floats_only=True)
        if ref is None:
            return None
        program = rng.choice(draft.library.ids)
        donor = draft.library.draft(program)
        if not 0 < len(donor.graph.nodes) <= _MAX_DONOR:
            return None
        dtype = draft.trace.tensor(ref).dtype
        entries = [k for k, i in enumerate(donor.graph.inputs) if i.dtype is dtype and i.role == "input"]
        results = [
            n
            for n, r in enumerate(donor.graph.outputs)
            if r.node >= 0 and isinstance(t := donor.trace.value(r), torch.Tensor) and t.is_floating_point()
        ]
        return (*ref, program, rng.choice(entries), rng.choice(results)) if entries and results else None

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Graft them; its other inputs become inputs."""
        node, output, program, entry, result = params
        ref = ref_of(draft.graph, node, output)
        donor = draft.library.draft(program)
        graph, t = donor.graph, draft.trace.tensor(ref)
        # Writes could reach values of this program through the graft, and random operators are in no variant.
        if len(graph.nodes) > _MAX_DONOR or graph.writes or any(info(n.op).random for n in graph.nodes):
            raise Invalid("a program that cannot be grafted")
        if not (type(entry) is int and 0 <= entry < len(graph.inputs) and t.is_floating_point()):
            raise Invalid("no such input")
        edit = insert_after(draft, ref)
        start = fitted(edit, ref, t, donor.trace.inputs[entry])
        refs: dict[int, Ref] = {-1 - k: start if k == entry else edit.input(i) for k, i in enumerate(graph.inputs)}

        def moved(r: Ref) -> Ref:
            return Ref(refs[r.node].node, r.output) if r.node >= 0 else refs[r.node]

        for at, call in enumerate(graph.nodes):
            refs[at] = edit.add(call.mapped(moved))
        end = graph.outputs[result]
        out = fitted(edit, moved(end), donor.trace.tensor(end), t)
        return draft.changed(edit.done({ref: out}).without_dead_code())


# Operators that take each other's place: those of one signature, as far as a call uses it.

# By name in the namespace `aten`: the arguments that a call usually gives have the same types in these.
_CLASSES: Final = (
    FLOAT,
    """add.Tensor sub.Tensor mul.Tensor div.Tensor maximum minimum fmax fmin atan2 hypot copysign.Tensor logaddexp
    logaddexp2 fmod.Tensor remainder.Tensor pow.Tensor_Tensor xlogy.Tensor heaviside rsub.Tensor floor_divide
    nextafter""".split(),  # noqa: SIM905
    """add.Scalar sub.Scalar mul.Scalar div.Scalar fmod.Scalar remainder.Scalar pow.Tensor_Scalar clamp_min clamp_max
    rsub.Scalar copysign.Scalar leaky_relu""".split(),  # noqa: SIM905
    "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor".split(),  # noqa: SIM905
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar".split(),  # noqa: SIM905
    "logical_and logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor".split(),  # noqa: SIM905
    "sum.dim_IntList mean.dim amax amin logsumexp".split(),  # noqa: SIM905
    "sum mean prod max min median".split(),  # noqa: SIM905
    "var.correction std.correction".split(),  # noqa: SIM905
    "argmax argmin".split(),  # noqa: SIM905
    "max.dim min.dim median.dim mode cummax cummin sort".split(),  # noqa: SIM905
    "any.dim all.dim".split(),  # noqa: SIM905
    "cumsum cumprod logcumsumexp".split(),  # noqa: SIM905
    "_softmax _log_softmax".split(),  # noqa: SIM905
    "tril triu".split(),  # noqa: SIM905
    "upsample_nearest2d.vec upsample_nearest2d _upsample_nearest_exact2d".split(),  # noqa: SIM905
    "upsample_bilinear2d upsample_bicubic2d".split(),  # noqa: SIM905
    "reflection_pad1d replication_pad1d".split(),  # noqa: SIM905
    "reflection_pad2d replication_pad2d".split(),  # noqa: SIM905
    "reflection_pad3d replication_pad3d".split(),  # noqa: SIM905
    "addcmul addcdiv".split(),  # noqa: SIM905
    "mse_loss soft_margin_loss".split(),  # noqa: SIM905
    "smooth_l1_loss huber_loss".split(),  # noqa: SIM905
    "_adaptive_avg_pool2d adaptive_avg_pool2d".split(),  # noqa: SIM905
)


@functools.lru_cache(maxsize=1)
def _class_of() -> dict[str, tuple[str, ...]]:
    return {name: tuple(members) for members in _CLASSES for name in members}


def others_of(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the operators that can take an operator's place."""
    name = str(op.name()).removeprefix("aten::")  # type: ignore[no-untyped-call]
    return tuple(n for n in _class_of().get(name, ()) if n != name)


def with_operator(node: Node, name: str) -> Node:
    """A call of another operator, with the arguments that this one has as well."""
    op = op_named(name)
    arguments = schema_of(op).arguments
    n = sum(1 for a in arguments if not a.kwarg_only)
    known = {a.name for a in arguments}
    kwargs = tuple((k, v) for k, v in node.kwargs if k in known)
    return Node(op, node.args[:n], kwargs, node.module)
