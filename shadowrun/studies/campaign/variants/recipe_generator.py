"""Recipes by number: any worker makes any of them, and gets the same.

A mutation that the reference cannot run is found out by running the graph, and another is chosen: nearly all recipes
are valid. `Generator.tried` and `refused` say how many choices that took.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from shadowrun.errors import UsageError
from shadowrun.studies.campaign.mutators import ALL, FAMILIES, MUTATORS
from shadowrun.studies.campaign.variants.counter_rng import CounterRng
from shadowrun.studies.campaign.variants.program_draft import HasGraph, Library
from shadowrun.studies.campaign.variants.recipe import Mutation, Recipe
from shadowrun.studies.campaign.variants.tracing import Invalid
from shadowrun.studies.campaign.variants.variant import Variant, mutated, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shadowrun.studies.campaign.mutators.mutator import Mutator
    from shadowrun.studies.campaign.variants.program_draft import Draft

__all__ = ["Generator"]

# How often each family is chosen, for all mutations but the last.
_WEIGHTS: Final = {"structure": 4, "arguments": 3, "tensors": 5}
# How often a mutator is chosen, where others of its family are once: nearly every model has a call for `unread`, and
# faults in dtypes and in exceptional values need one of the few programs that call the operator as well.
_OFTEN: Final = {"argument": 4, "dtype": 2, "exceptional": 2, "edge": 3}
# The family that takes the place of one without any possible mutation.
_INSTEAD: Final = "tensors"
_N_MUTATIONS: Final = (1, 1, 1, 1, 2, 2, 2, 3, 3, 4)
# Share of the variants that are also run in another way.
_EXECUTION: Final = 0.3
# Choices for one mutation, until one runs.
_TRIES: Final = 24
_MAX_REASONS: Final = 2000
# Sets of values. A worker keeps the values of inputs, which cost more than a small graph to make.
_SEEDS: Final = 8


class Generator:
    """Makes recipes.

    Args:
        programs: What they start from.
        seed: Of the campaign.
        mutators: Names of those that are used.

    Attributes:
        library: Programs by id, with what is known of them.
        tried: Number of choices by mutator.
        refused: Number of choices by mutator that the reference could not run, or that left nothing finite.
        reasons: The same by mutator and reason, of the first ones.

    Raises:
        UsageError: There is no program, or no such mutator.
    """

    def __init__(self, programs: Sequence[HasGraph], seed: int = 0, mutators: Sequence[str] = ALL) -> None:
        if not programs:
            raise UsageError("A campaign needs programs to mutate, and has none.", slug="no-programs")
        unknown = [name for name in mutators if name not in MUTATORS]
        if unknown:
            known = ", ".join(MUTATORS)
            raise UsageError(f"Unknown mutator {', '.join(unknown)}; known are {known}.", slug="unknown-mutator")
        self.library = Library({p.id: p for p in programs})
        self._seed = seed
        chosen = [MUTATORS[name] for name in dict.fromkeys(mutators)]
        self._by_family = {
            f: [m for m in chosen if m.family == f for _ in range(_OFTEN.get(m.name, 1))] for f in FAMILIES
        }
        self._families = [f for f, weight in _WEIGHTS.items() if self._by_family[f] for _ in range(weight)]
        self.tried: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()

    def recipe(self, i: int) -> Recipe:
        """Recipe number `i`: it depends on nothing but programs, seed, mutators and `i`."""
        return self.variant(i).recipe

    def variant(self, i: int) -> Variant:
        """Recipe number `i` and what it makes, which is known once it is made."""
        rng = CounterRng("recipe", self._seed, i)
        program = rng.choice(self.library.ids)
        seed = rng.below(_SEEDS)
        draft, mutations = self.library.draft(program), []
        families = [rng.choice(self._families) for _ in range(rng.choice(_N_MUTATIONS))] if self._families else []
        if self._by_family["execution"] and (not families or rng.chance(_EXECUTION)):
            families.append("execution")
        try:
            _ = draft.trace
        except Invalid:  # a program that does not run: so does no variant of it, and the runner counts it
            return Variant(Recipe(program, (), seed), draft.graph, draft.execution)
        for family in families:
            found = self._mutation(draft, family, rng)
            # Many an operator has no argument to change, or nothing to swap: its tensors can be changed.
            if found is None and family != "execution" and self._by_family[_INSTEAD]:
                found = self._mutation(draft, _INSTEAD, rng)
            if found is not None:
                mutations.append(found[0])
                draft = found[1]
        return Variant(Recipe(program, tuple(mutations), seed), draft.graph, draft.execution)

    def _mutation(self, draft: Draft, family: str, rng: CounterRng) -> tuple[Mutation, Draft] | None:
        """A mutation that runs, and the draft after it; None if none was found."""
        for _ in range(_TRIES):
            # Each try draws again from the same stream, so that the choice depends on the recipe's number alone.
            mutator = rng.choice(self._by_family[family])
            try:
                params = mutator.propose(draft, rng)
            except Invalid:
                params = None
            if params is None:
                continue
            mutation = Mutation(mutator.name, params)
            self.tried[mutator.name] += 1
            try:
                after = mutated(draft, mutation)
                self._check(mutator, draft, after)
            except Invalid as reason:
                self.refused[mutator.name] += 1
                # Reasons have shapes in them: there are as many as variants.
                if len(self.reasons) < _MAX_REASONS:
                    self.reasons[mutator.name, str(reason)] += 1
                continue
            return mutation, after
        return None

    def _check(self, mutator: Mutator, before: Draft, after: Draft) -> None:
        """Look whether a draft is worth running.

        Raises:
            Invalid: It does not run, or leaves nothing finite.
        """
        # Where nothing finite was left on purpose, the next mutation is not to blame.
        if not (mutator.exceptional or after.trace.is_finite_somewhere() or not before.trace.is_finite_somewhere()):
            raise Invalid("nothing finite is left")
        if after.execution.backward or after.execution.autocast:
            run(after.graph, after.execution, self.library.values)
