import json

import pytest

from shadowrun.studies.campaign.variants.recipe import Mutation, Recipe
from shadowrun.studies.campaign.variants.variant import Execution, Invalid, Library, Variant, build
from tests.studies.campaign.programs import BY_ID, MLP, PROGRAMS

MLP_ID = PROGRAMS[0].id
GOOD = [MLP_ID, [["insert", 0, 0, "tanh"]], 3]


def test_json_holds_all_of_a_recipe():
    recipe = Recipe(MLP_ID, (Mutation("insert", (0, 0, "tanh")), Mutation("x", ((1, (2.5, None)), True))), 7)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        [MLP_ID, []],
        ["../x", [], 0],
        [MLP_ID, [], -1],
        [MLP_ID, [], True],
        [MLP_ID, [[]], 0],
        [MLP_ID, [["Insert"]], 0],
        [MLP_ID, [["insert", {}]], 0],
        [MLP_ID, [["insert", "x" * 300]], 0],
        [MLP_ID, [["insert", 1 << 70]], 0],
        [MLP_ID, [["insert", [[[[[[[[[1]]]]]]]]]]], 0],
        [MLP_ID, [["insert", list(range(5000))]], 0],
        [MLP_ID, [["insert"]] * 100, 0],
    ],
)
def test_what_is_no_recipe_is_refused(data):
    with pytest.raises(ValueError, match=r"."):
        Recipe.from_json(data)


@pytest.mark.parametrize(
    "mutation",
    [
        ["no-such"],
        ["insert"],
        ["insert", 0, 0, "from_file"],
        ["insert", 99, 0, "tanh"],
        ["insert", -9, 0, "tanh"],
        ["insert", 0, 5, "tanh"],
        ["insert", "0", 0, "tanh"],
        ["insert-layer", 0, 0, "no-such", 1],
        ["insert-binary", 0, 0, "add.Tensor", 3, 0, 0],
        ["remove", 0, 17],
        ["duplicate", 0, "args"],
    ],
)
def test_a_mutation_that_does_not_fit_is_invalid(mutation):
    with pytest.raises(Invalid, match=r"."):
        build(Recipe.from_json([MLP_ID, [mutation], 0]), BY_ID)


def test_an_unknown_program_is_invalid():
    with pytest.raises(Invalid, match="no program"):
        build(Recipe("0" * 12), BY_ID)


def test_a_recipe_makes_its_variant():
    variant = build(Recipe.from_json(GOOD), Library(BY_ID))
    assert [n.name for n in variant.graph.nodes][:3] == ["aten::addmm", "aten::tanh", "aten::gelu"]
    assert len(variant.graph.nodes) == len(MLP.nodes) + 1


def test_identity_is_of_graph_and_execution_and_not_of_the_seed():
    recipe = Recipe.from_json(GOOD)
    variant = build(recipe, BY_ID)
    assert variant.identity() == build(Recipe(recipe.program, recipe.mutations, 4), BY_ID).identity()
    assert variant.identity() != build(Recipe(recipe.program), BY_ID).identity()
    assert variant.identity() != Variant(recipe, variant.graph, Execution(backward=True)).identity()
