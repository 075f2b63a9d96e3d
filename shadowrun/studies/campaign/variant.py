"""A variant: what a recipe makes of a program, and its identity."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.studies.campaign.draft import Draft, Execution, HasGraph, Library
from shadowrun.studies.campaign.mutators import MUTATORS
from shadowrun.studies.campaign.tracing import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shadowrun.studies.campaign.recipe import Mutation, Recipe
    from shadowrun.studies.zoo.graph import Graph

__all__ = ["Execution", "Invalid", "Library", "Variant", "build", "mutated"]


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
        return mutator.apply(draft, mutation.params)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
        raise Invalid(f"{mutation.name}: {error!r}"[:200]) from None
