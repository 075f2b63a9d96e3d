"""Mutators of structure: calls come, go, change places, or become others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.studies.campaign.draws import Draw
from shadowrun.studies.campaign.mutators import layers
from shadowrun.studies.campaign.mutators.mutator import Edit, fitted, node_at, ref_of
from shadowrun.studies.campaign.tracing import Invalid, info
from shadowrun.studies.zoo.graph import Node, Ref

if TYPE_CHECKING:
    from shadowrun.studies.campaign.draft import Draft
    from shadowrun.studies.campaign.recipe import Params

__all__ = ["Duplicate", "Insert", "InsertBinary", "InsertLayer", "Remove"]


def value_to_change(draft: Draft, draw: Draw, *, floats_only: bool = False) -> Ref | None:
    """A tensor that is used, and whose values decide no index."""
    pinned, uses = draft.pinned, draft.uses
    found = [
        ref
        for ref, t in draft.tensors()
        if ref in uses
        and ref.node not in pinned
        and (t.is_floating_point() or not (floats_only or t.is_complex() or t.dtype is torch.bool))
    ]
    return draw.choice(found) if found else None


def behind(draft: Draft, ref: Ref) -> Edit:
    """An edit right behind a value."""
    return Edit(draft.graph, max(ref.node, -1) + 1)


class Insert:
    """An element-wise operator behind a value."""

    name = "insert"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, draw: Draw) -> Params | None:
        """Value and operator."""
        ref = value_to_change(draft, draw)
        if ref is None:
            return None
        table = layers.FLOAT if draft.trace.tensor(ref).is_floating_point() else layers.INTEGER
        return (*ref, draw.choice(table))

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Insert it."""
        node, output, name = params
        ref = ref_of(draft.graph, node, output)
        t = draft.trace.tensor(ref)
        if name not in (layers.FLOAT if t.is_floating_point() else layers.INTEGER):
            raise Invalid(f"no operator {name!r} of {t.dtype}")
        edit = behind(draft, ref)
        return draft.changed(edit.done({ref: layers.unary(edit, name, ref)}))


class InsertBinary:
    """An element-wise operator of a value and another that came before it, or itself."""

    name = "insert-binary"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, draw: Draw) -> Params | None:
        """Value, operator, other value, and which comes first."""
        ref = value_to_change(draft, draw)
        if ref is None:
            return None
        t = draft.trace.tensor(ref)
        others = [
            other
            for other, u in draft.tensors()
            if other.node <= ref.node and u.dtype is t.dtype and _broadcasts_into(u.shape, t.shape)
        ]
        return (*ref, draw.choice(layers.BINARY), *draw.choice(others or [ref]), draw.below(2))

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Insert it."""
        node, output, name, other_node, other_output, swapped = params
        ref, other = ref_of(draft.graph, node, output), ref_of(draft.graph, other_node, other_output)
        t = draft.trace.tensor(ref)
        if name not in layers.BINARY or other.node > ref.node:
            raise Invalid(f"no operator {name!r} of these values")
        edit = behind(draft, ref)
        first, second = (other, ref) if swapped else (ref, other)
        return draft.changed(edit.done({ref: layers.binary(edit, name, first, second, t)}))


def _broadcasts_into(small: torch.Size, shape: torch.Size) -> bool:
    return len(small) <= len(shape) and all(a in (1, b) for a, b in zip(reversed(small), reversed(shape), strict=False))


class InsertLayer:
    """A layer that keeps shape and dtype, with weights of its own where it has any."""

    name = "insert-layer"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, draw: Draw) -> Params | None:
        """Value, layer, and the number from which its details are drawn."""
        ref = value_to_change(draft, draw, floats_only=True)
        return None if ref is None else (*ref, draw.choice(tuple(layers.LAYERS)), draw.below(1000))

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Insert it."""
        node, output, name, number = params
        ref = ref_of(draft.graph, node, output)
        t = draft.trace.tensor(ref)
        if not t.is_floating_point():
            raise Invalid("a layer of no floats")
        edit = behind(draft, ref)
        return draft.changed(edit.done({ref: layers.LAYERS[name](edit, ref, t, Draw(name, number))}))


def form_of(t: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    """Shape and dtype."""
    return t.shape, t.dtype


class Remove:
    """A call goes; what read its result reads one of its arguments."""

    name = "remove"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, draw: Draw) -> Params | None:
        """Call, and number of the reference among its arguments that takes its place."""
        found = [
            (at, k)
            for at, node in enumerate(draft.graph.nodes)
            if at not in draft.pinned
            for k, ref in enumerate(node.refs())
            if self._fits(draft, at, ref)
        ]
        return draw.choice(found) if found else None

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
        return draft.changed(edit.done({Ref(at): new}).without_dead_code())


class Duplicate:
    """A call is made a second time, on its own result."""

    name = "duplicate"
    family = "structure"
    exceptional = False

    def propose(self, draft: Draft, draw: Draw) -> Params | None:
        """Call, and number of the argument that gets its result."""
        found = []
        for at, node in enumerate(draft.graph.nodes):
            value = draft.trace.value(Ref(at))
            if at in draft.pinned or not isinstance(value, torch.Tensor) or info(node.op).writes:
                continue
            found += [(at, k) for k, a in enumerate(node.args) if type(a) is Ref and _same_form(draft, a, value)]
        return draw.choice(found) if found else None

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
