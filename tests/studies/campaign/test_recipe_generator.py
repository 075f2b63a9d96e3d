import json

import pytest

from shadowrun.errors import UsageError
from shadowrun.studies.campaign.variants.recipe import Recipe
from shadowrun.studies.campaign.variants.recipe_generator import Generator
from shadowrun.studies.campaign.variants.tracing import Invalid
from shadowrun.studies.campaign.variants.variant import build
from shadowrun.studies.zoo.graph import Runner
from shadowrun.studies.zoo.input_values import make_inputs
from tests.studies.campaign.programs import PROGRAMS


def test_a_recipe_depends_on_its_number_alone():
    generator = Generator(PROGRAMS, seed=5)
    forwards = [generator.recipe(i) for i in range(60)]
    other = Generator(list(reversed(PROGRAMS)), seed=5)
    assert [other.recipe(i) for i in reversed(range(60))] == forwards[::-1]
    assert [Generator(PROGRAMS, seed=6).recipe(i) for i in range(60)] != forwards


def test_recipes_build_what_the_generator_made():
    generator = Generator(PROGRAMS, seed=1)
    for i in range(150):
        variant = generator.variant(i)
        again = Recipe.from_json(json.loads(json.dumps(variant.recipe.to_json())))
        assert build(again, {p.id: p for p in PROGRAMS}) == variant


def test_variants_run():
    generator = Generator(PROGRAMS, seed=2)
    failures = []
    for i in range(300):
        variant = generator.variant(i)
        try:
            Runner(variant.graph)(make_inputs(variant.graph.inputs, variant.recipe.seed))
        except RuntimeError as error:
            failures.append((variant.recipe.to_json(), str(error)))
    assert len(failures) <= 3, failures


@pytest.mark.parametrize("kwargs", [{"programs": []}, {"programs": PROGRAMS, "mutators": ("insert", "no-such")}])
def test_what_makes_no_generator_is_said(kwargs):
    with pytest.raises(UsageError):
        Generator(**kwargs)


def test_a_program_that_does_not_run_gives_recipes_without_mutations():
    from dataclasses import replace

    broken = replace(PROGRAMS[0], graph=replace(PROGRAMS[0].graph, inputs=PROGRAMS[0].graph.inputs[::-1]))
    generator = Generator([broken])
    assert generator.recipe(0).mutations == ()
    with pytest.raises(Invalid):
        _ = generator.library.draft(broken.id).trace
