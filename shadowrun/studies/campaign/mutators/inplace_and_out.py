"""Mutators of the forms of a call that write: in place, and ``out=``."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from shadowrun.studies.campaign.mutators.mutator import Edit, node_at, op_named
from shadowrun.studies.campaign.variants.tracing import Invalid, info
from shadowrun.studies.zoo.graph import DEVICE, Ref
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from shadowrun.studies.campaign.variants.counter_rng import CounterRng
    from shadowrun.studies.campaign.variants.program_draft import Draft
    from shadowrun.studies.campaign.variants.recipe import Params

__all__ = ["InPlace", "Out", "in_place_form"]

aten = torch.ops.aten


class InPlace:
    """The in-place form of a call: on a copy, on a dead value, or through a view of a copy."""

    name = "in-place"
    family = "tensors"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Call, and ``copy``, ``value`` or ``view``."""
        found = [
            at
            for at, node in enumerate(draft.graph.nodes)
            if at not in draft.index_sources and in_place_form(node.op) and keeps_form(draft, at)
        ]
        if not found:
            return None
        at = rng.choice(found)
        node = draft.graph.nodes[at]
        kinds = ["copy"]
        if type(node.args[0]) is Ref and _is_dead_after(draft, node.args[0], at):
            kinds.append("value")
        if info(node.op).pointwise and not any(type(a) is Ref for a in node.args[1:]) and draft.trace.values[at].dim():
            kinds.append("view")
        return (at, rng.choice(kinds))

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Make it."""
        at, kind = params
        node = node_at(draft.graph, at)
        op = in_place_form(node.op)
        if op is None or not node.args or type(node.args[0]) is not Ref:
            raise Invalid("no in-place form")
        ref = node.args[0]
        have = draft.trace.tensor(ref)
        if not keeps_form(draft, at):
            raise Invalid("a result of another form than its first argument")
        edit = Edit(draft.graph, at, drop=True)
        if kind == "value":
            if not _is_dead_after(draft, ref, at):
                raise Invalid("its first argument is read elsewhere")
            return draft.changed(edit.done({Ref(at): edit.add(replace(node, op=op))}))
        target = edit.call(aten.clone.default, ref, memory_format=torch.contiguous_format)
        if kind == "copy":
            done = edit.add(replace(node, op=op, args=(target, *node.args[1:])))
            return draft.changed(edit.done({Ref(at): done}))
        if kind != "view" or not have.dim() or any(type(a) is Ref for a in node.args[1:]) or not info(op).pointwise:
            raise Invalid("no view to write through")
        part = edit.call(aten.slice.Tensor, target, -1, 0, have.shape[-1], 2)
        edit.add(replace(node, op=op, args=(part, *node.args[1:])))
        # Read after the write: the copy's own name would hide from a compiler that it was written to.
        return draft.changed(edit.done({Ref(at): edit.call(aten.alias.default, target)}))


def keeps_form(draft: Draft, at: int) -> bool:
    """Whether a call returns one tensor of the form of its first argument."""
    args, made = draft.graph.nodes[at].args, draft.trace.values[at]
    if not args or type(args[0]) is not Ref or not isinstance(made, torch.Tensor):
        return False
    have = draft.trace.value(args[0])
    return isinstance(have, torch.Tensor) and have.shape == made.shape and have.dtype is made.dtype


def _is_dead_after(draft: Draft, ref: Ref, at: int) -> bool:
    """Whether a value is a call's own, and is read by this call alone."""
    if ref.node < 0 or draft.uses.get(ref, []) != [at]:
        return False
    mine = draft.trace.tensor(ref)
    # Elements of an expanded value share memory: each would be written several times.
    if any(s == 0 for s, n in zip(mine.stride(), mine.shape, strict=True) if n > 1):
        return False
    # Views of it share its memory: what is written to it would change them.
    place = mine.untyped_storage().data_ptr()
    sharing = [r for r, t in draft.tensors() if t.untyped_storage().data_ptr() == place and r.node < at]
    return sharing == [ref]


@functools.lru_cache(maxsize=4096)
def in_place_form(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """``add_.Tensor`` of ``add.Tensor``; None where there is none."""
    name = str(op.name())  # type: ignore[no-untyped-call]
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if space != "aten" or info(op).writes or info(op).random or packet.endswith("_"):
        return None
    try:
        found = op_named(f"{packet}_.{overload}")
    except AttributeError:
        return None
    # An overload may have its name from another family, with other arguments in these places.
    mine, its = schema_of(op).arguments, schema_of(found).arguments
    return found if [a.name for a in mine] == [a.name for a in its] else None


class Out:
    """The ``out=`` form of a call, into a new tensor that is exact, empty (it is resized), or transposed."""

    name = "out"
    family = "tensors"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Call, and ``exact``, ``empty`` or ``transposed``."""
        found = [
            at
            for at, node in enumerate(draft.graph.nodes)
            if at not in draft.index_sources
            and isinstance(draft.trace.values[at], torch.Tensor)
            and out_form(node.op)
            # Not what was made to be written to: it may have another form by now.
            and next(node.refs(), None) is not None
        ]
        return (rng.choice(found), rng.choice(("exact", "empty", "transposed"))) if found else None

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Make it."""
        at, kind = params
        node = node_at(draft.graph, at)
        form = out_form(node.op)
        if form is None or kind not in ("exact", "empty", "transposed"):
            raise Invalid("no out= form")
        op, name = form
        want = draft.trace.tensor(Ref(at))
        shape = [0] if kind == "empty" else list(want.shape)
        if kind == "transposed":
            if want.dim() < 2:
                raise Invalid("less than two dimensions")
            shape[-1], shape[-2] = shape[-2], shape[-1]
        edit = Edit(draft.graph, at, drop=True)
        out = edit.call(aten.full.default, shape, 0, dtype=want.dtype, device=DEVICE)
        if kind == "transposed":
            out = edit.call(aten.transpose.int, out, -1, -2)
        # The tensor that is written to has dtype and device: the out= form does not take them.
        kwargs = tuple((k, v) for k, v in node.kwargs if k in {a.name for a in schema_of(op).arguments})
        ref = edit.add(replace(node, op=op, kwargs=(*kwargs, (name, out))))
        return draft.changed(edit.done({Ref(at): ref}))


@functools.lru_cache(maxsize=4096)
def out_form(op: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, str] | None:
    """The overload of an operator that writes its one result to a given tensor, and that argument's name."""
    about, schema = info(op), schema_of(op)
    # Losses resize the tensor for the result themselves on the way, and torch warns.
    if (
        about.writes
        or about.random
        or about.layout
        or "loss" in about.base
        or "cross_entropy" in about.base
        or len(schema.returns) != 1
    ):
        return None
    mine = [
        (a.name, str(a.type)) for a in schema.arguments if a.name not in ("dtype", "layout", "device", "pin_memory")
    ]
    packet = op.overloadpacket
    for overload in packet.overloads():
        found: torch._ops.OpOverload = getattr(packet, overload)
        arguments = schema_of(found).arguments
        outs = [a for a in arguments if a.is_out]
        rest = [(a.name, str(a.type)) for a in arguments if not a.is_out and a.name != "dtype"]
        if len(outs) == 1 and rest == mine and str(outs[0].type) == "Tensor":
            return found, outs[0].name
    return None
