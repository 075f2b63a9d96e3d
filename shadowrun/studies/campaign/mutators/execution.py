"""Mutators of execution: the same calls, run in another way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shadowrun.studies.campaign.mutators.arguments import with_argument
from shadowrun.studies.campaign.mutators.mutator import Edit
from shadowrun.studies.campaign.mutators.sizes import BATCH, resized, sizes_can_change
from shadowrun.studies.campaign.variants.tracing import Invalid, info
from shadowrun.studies.zoo.graph import Graph, Ref
from shadowrun.torch_private import schema_of

if TYPE_CHECKING:
    from shadowrun.studies.campaign.variants.counter_rng import CounterRng
    from shadowrun.studies.campaign.variants.program_draft import Draft
    from shadowrun.studies.campaign.variants.recipe import Params
    from shadowrun.studies.zoo.graph import Node

__all__ = ["RELATIONS", "Autocast", "Backward", "BatchSlice", "Compile", "Metamorphic", "Threads", "Train"]

RELATIONS: Final = ("slice", "permutation", "layout", "tail", "in-place")
"""Metamorphic relations; see `studies.campaign.metamorphic`."""


class Backward:
    """Gradients are computed too."""

    name = "backward"
    family = "execution"
    exceptional = False

    def propose(self, draft: Draft, _: CounterRng) -> Params | None:
        """Nothing to choose."""
        return None if draft.execution.backward else ()

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Compute them; of all floating inputs, where the program names none."""
        # Params may come from anyone: another number of them raises here.
        () = params
        graph = draft.graph
        # A program that was captured without gradients names no input that requires one.
        if not any(i.requires_grad for i in graph.inputs):
            inputs = tuple(replace(i, requires_grad=i.dtype.is_floating_point) for i in graph.inputs)
            graph = Graph(inputs, graph.nodes, graph.outputs)
        return draft.changed(graph, replace(draft.execution, backward=True))


class Autocast:
    """Under `torch.autocast`."""

    name = "autocast"
    family = "execution"
    exceptional = False

    DTYPES = ("bfloat16", "float16")

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """The dtype."""
        return None if draft.execution.autocast else (rng.choice(self.DTYPES),)

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Run under it."""
        (dtype,) = params
        if dtype not in self.DTYPES:
            raise Invalid("no dtype of autocast")
        return draft.changed(execution=replace(draft.execution, autocast=dtype))


class BatchSlice:
    """The first items of the batch alone: inputs of the same values, fewer."""

    name = "batch-slice"
    family = "execution"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Size of the batch, and items that stay."""
        # Inputs of one first size only: with several, it is not known which is the batch.
        sizes = {i.shape[0] for i in draft.graph.inputs if i.role == "input" and i.shape}
        if len(sizes) != 1 or (n := sizes.pop()) < 2 or not sizes_can_change(draft.graph):
            return None
        return (n, 1 + rng.below(n - 1))

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Leave the others out."""
        n, kept = params
        if not (type(n) is int and type(kept) is int and 0 < kept < n):
            raise Invalid("no part of a batch")
        # Run at once: sizes that the calls were captured with follow from the batch.
        known = resized(draft.trace, n, kept, BATCH, draft.library.values)
        return draft.traced(known, replace(draft.execution, batch_slice=kept))


_SWITCHED: Final = ("training", "train")
_DROPPED: Final = ("native_dropout", "dropout", "feature_dropout", "alpha_dropout")


class Train:
    """Normalization with statistics of the batch, or with the running ones; dropout is left out."""

    name = "train"
    family = "execution"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Whether it trains."""
        found = [n for n in draft.graph.nodes if _switch_of(n) or info(n.op).base in _DROPPED]
        return (rng.below(2),) if found else None

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Switch all calls."""
        (on,) = params
        graph = draft.graph
        nodes = []
        for node in graph.nodes:
            name = _switch_of(node)
            nodes.append(with_argument(node, name, bool(on)) if name else node)
        graph = Graph(graph.inputs, tuple(nodes), graph.outputs)
        if not on:
            # In evaluation a dropout gives its input; its call would draw all the same.
            graph = _without_dropout(graph)
        if graph == draft.graph:
            raise Invalid("it was so before")
        return draft.changed(graph, replace(draft.execution, train=bool(on)))


def _switch_of(node: Node) -> str:
    """Name of the argument that says whether a normalization trains; empty where it cannot be switched."""
    if "batch_norm" not in node.name or "backward" in node.name:
        return ""
    names = [a.name for a in schema_of(node.op).arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    # Without running statistics it has to train: kernels of the CPU read them unseen.
    if given.get("running_mean") is None or given.get("running_var") is None:
        return ""
    return next((n for n in names if n in _SWITCHED), "")


def _without_dropout(graph: Graph) -> Graph:
    at = 0
    while at < len(graph.nodes):
        node = graph.nodes[at]
        if info(node.op).base in _DROPPED and type(node.args[0]) is Ref:
            graph = Edit(graph, at, drop=True).done({Ref(at): node.args[0]})
        else:
            at += 1
    return graph


class Compile:
    """Compiled, with a backend and options."""

    name = "compile"
    family = "execution"
    exceptional = False

    SPECS = ("inductor", "inductor:dynamic", "aot_eager")

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """Backend and options."""
        return None if draft.execution.compile else (rng.choice(self.SPECS),)

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Compile it."""
        (spec,) = params
        if spec not in self.SPECS:
            raise Invalid("no backend")
        return draft.changed(execution=replace(draft.execution, compile=spec))


class Threads:
    """With another number of threads of the CPU."""

    name = "threads"
    family = "execution"
    exceptional = False

    def propose(self, _: Draft, rng: CounterRng) -> Params | None:
        """The number."""
        return (rng.choice((1, 2, 3, 4)),)

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Run with them."""
        (n,) = params
        if type(n) is not int or not 1 <= n <= 64:
            raise Invalid("no number of threads")
        return draft.changed(execution=replace(draft.execution, threads=n))


class Metamorphic:
    """Each call is also compared with itself in another form."""

    name = "metamorphic"
    family = "execution"
    exceptional = False

    def propose(self, draft: Draft, rng: CounterRng) -> Params | None:
        """The relation."""
        return None if draft.execution.metamorphic else (rng.choice(RELATIONS),)

    def apply(self, draft: Draft, params: Params) -> Draft:
        """Compare them."""
        (relation,) = params
        if relation not in RELATIONS:
            raise Invalid("no relation")
        return draft.changed(execution=replace(draft.execution, metamorphic=relation))
