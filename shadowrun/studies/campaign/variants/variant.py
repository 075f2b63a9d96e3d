"""A variant: what a recipe makes of a program, and its identity."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.studies.campaign.mutators import MUTATORS
from shadowrun.studies.campaign.variants.program_draft import Draft, Execution, HasGraph, Library
from shadowrun.studies.campaign.variants.tracing import Invalid, copied, first_line
from shadowrun.studies.zoo.graph import Runner

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shadowrun.studies.campaign.variants.recipe import Mutation, Recipe
    from shadowrun.studies.zoo.graph import Graph, Input

__all__ = ["Execution", "Invalid", "Library", "Variant", "build", "mutated", "run"]


@dataclass(frozen=True, slots=True)
class Variant:
    """A program after its mutations.

    Attributes:
        recipe: What made it.
        graph: What it computes.
        execution: How it is run.
    """

    recipe: Recipe
    graph: Graph
    execution: Execution

    def identity(self) -> str:
        """Hash of operators, attributes, shapes, dtypes, layouts, fills and execution: 32 hexadecimal digits.

        The seed does not count: two variants that differ in their values alone are one.
        """
        # Execution counts: backward or autocast run other kernels on the same graph.
        how = json.dumps(dataclasses.astuple(self.execution))
        return hashlib.blake2b(f"{self.graph.identity()}{how}".encode(), digest_size=16).hexdigest()


def build(recipe: Recipe, programs: Mapping[str, HasGraph] | Library) -> Variant:
    """Make the variant of a recipe, which may come from anyone.

    Args:
        recipe: The recipe.
        programs: Programs by id; a `Library` of them keeps what it learns for the next recipe.

    Raises:
        Invalid: It names no program or mutator, or a mutation does not fit.
    """
    library = programs if isinstance(programs, Library) else Library(programs)
    draft = library.draft(recipe.program)
    for mutation in recipe.mutations:
        draft = mutated(draft, mutation)
    return Variant(recipe, draft.graph, draft.execution)


def mutated(draft: Draft, mutation: Mutation) -> Draft:
    """A draft after one more mutation.

    Raises:
        Invalid: There is no such mutator, or the mutation does not fit.
    """
    mutator = MUTATORS.get(mutation.name)
    if mutator is None:
        raise Invalid(f"no mutator {mutation.name!r}: known are {', '.join(MUTATORS)}")
    try:
        # Whatever mutators raise on parameters that are none of theirs: a recipe may come from anyone.
        return mutator.apply(draft, mutation.params)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
        raise Invalid(f"{mutation.name}: {error!r}"[:200]) from None


def run(graph: Graph, execution: Execution, values: Callable[[Input], torch.Tensor]) -> list[Any]:
    """Run a graph on the CPU with its gradients and under its autocast, to see whether it can be.

    Args:
        graph: The graph.
        execution: How it is run.
        values: Values of the inputs; they are not written to.

    Returns:
        Results, then the gradients of the inputs that require them.

    Raises:
        Invalid: It raises; the text says what.
    """
    autocast = torch.autocast("cpu", getattr(torch, execution.autocast)) if execution.autocast else None
    with warnings.catch_warnings(), autocast or contextlib.nullcontext(), torch.set_grad_enabled(execution.backward):
        warnings.simplefilter("ignore")
        try:
            # Values are shared with other variants: only what is written to, or gets a gradient, is copied.
            inputs = [copied(values(i)) if graph.writes or execution.backward else values(i) for i in graph.inputs]
            if not execution.backward:
                return Runner(graph)(inputs)
            for described, t in zip(graph.inputs, inputs, strict=True):
                t.requires_grad_(described.requires_grad)
            # A leaf that requires gradients cannot be written to.
            given = [t.clone() if graph.writes and t.requires_grad else t for t in inputs]
            results = Runner(graph)(given)
            wanted = [t for t in inputs if t.requires_grad]
            loss = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            if not wanted or not loss:
                raise Invalid("no gradient")
            # Of inputs that no result depends on there is no gradient, which is no error.
            found = torch.autograd.grad(loss, wanted, [torch.ones_like(t) for t in loss], allow_unused=True)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError) as error:
            raise Invalid(first_line(error)) from None
        return [*results, *found]
