"""Scripts of root causes: minimised, at most 15 lines, run as a reader runs them, and showing what they claim."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch

from shadowrun.repro.script import ReproOptions
from shadowrun.repro.snippet import MAX_LINES
from shadowrun.studies.campaign.causes.root_causes import signature
from shadowrun.studies.campaign.causes.scripts import Wanted, write_script
from shadowrun.studies.campaign.metamorphic import EXPLANATIONS
from shadowrun.studies.campaign.run_variants import RunnerSettings, VariantRunner
from shadowrun.studies.campaign.variants.recipe import Mutation, Recipe
from shadowrun.studies.campaign.variants.recipe_generator import Generator
from shadowrun.studies.campaign.variants.variant import build
from shadowrun.studies.zoo.graph import Fill, Graph, Input, Node, Ref
from tests.studies.campaign.programs import Program

pytestmark = [
    pytest.mark.usefixtures("forked_processes", "clean_sim", "one_thread"),
    pytest.mark.filterwarnings("ignore"),
]
aten = torch.ops.aten
OPTIONS = ReproOptions(time_limit_s=20.0)
MM = Program(
    "0a",
    Graph(
        (Input("x", (4, 8)), Input("w", (8, 4))),
        (
            Node(aten.mm.default, (Ref(-1), Ref(-2))),
            Node(aten.relu.default, (Ref(0),)),
            Node(aten.sigmoid.default, (Ref(1),)),
        ),
        (Ref(2),),
    ),
)
TINY = Program(
    "0b",
    Graph(
        (Input("x", (3, 5), fill=Fill("uniform", 1e-38, 2e-38)), Input("y", (5,), fill=Fill("constant", 0.01))),
        (Node(aten.mul.Tensor, (Ref(-1), Ref(-2))), Node(aten.relu.default, (Ref(0),))),
        (Ref(1),),
    ),
)
PROGRAMS = {p.id: p for p in (MM, TINY)}


def found(settings, recipe, programs=PROGRAMS, target=0):
    """The first root cause that a variant shows."""
    findings = VariantRunner(settings).run(build(recipe, programs), target).findings
    assert findings
    return Wanted(signature(findings[0]), (findings[0].explanation,), target, recipe)


def said(quick, text, folder):
    """What a script prints in a forked process; inputs may stand next to it."""
    path = folder / "shown.py"
    path.write_text(text, encoding="utf-8")
    with contextlib.chdir(folder):
        done = quick.try_script(path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def said_anew(text, folder, **environment):
    """What a script prints in a new process, as a reader starts it."""
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-"], input=text, capture_output=True, text=True, check=True, cwd=folder, env=environment
    ).stdout


def by_platform(text):
    platform, shown = "", {}
    for line in text.splitlines():
        head, brace, rest = line.partition(" {")
        platform = head if brace else platform
        shown[platform] = shown.get(platform, "") + (rest if brace else line.strip())
    return {name: value.replace(", device='sim:0'", "") for name, value in shown.items()}


def longest_of(program, mutators, *, at_least):
    """A recipe of this program with some mutations that have nothing to do with its fault."""
    generator = Generator([program], 0, mutators)
    return next(r for i in range(1000) if len((r := generator.recipe(i)).mutations) >= at_least)


def test_a_planted_flaw_is_shown_on_the_device_with_the_fewest_mutations(new_processes, clean_sim, quick, tmp_path):
    recipe = longest_of(MM, ["insert", "weights", "batch-slice"], at_least=3)
    settings = RunnerSettings(("sim",), flaws=("matmul-in-bf16",))
    with clean_sim.flaws("matmul-in-bf16"):
        wanted = found(settings, recipe)
        made = write_script(wanted, PROGRAMS, settings, tmp_path / "script", OPTIONS)
    assert wanted.signature.op == "aten::mm"
    assert made.recipe == Recipe("0a", (), recipe.seed)
    assert made.repro.shows_fault, (made.repro.said, made.repro.notes)
    assert made.repro.inputs == "self f32[1, 1], mat2 f32[1, 1]"
    assert len(made.text.splitlines()) <= MAX_LINES
    shown = by_platform(said_anew(made.text, tmp_path / "script"))
    assert set(shown) == {"cpu", "sim"}
    assert shown["cpu"] != shown["sim"]
    # Without its flaw the device agrees: what the script shows is the flaw.
    shown = by_platform(said(quick, made.text.replace('flaws=["matmul-in-bf16"]', "flaws=[]"), tmp_path / "script"))
    assert shown["cpu"] == shown["sim"]


def test_a_real_difference_of_two_settings_needs_plain_torch_only(quick, tmp_path):
    settings = RunnerSettings(("cpu[flush_denormal=on]",))
    wanted = found(settings, Recipe("0b"))
    assert (wanted.signature.op, wanted.signature.cause) == ("aten::mul.Tensor", "flushed subnormals")
    made = write_script(wanted, PROGRAMS, settings, tmp_path / "script", OPTIONS)
    assert made.repro.shows_fault, (made.repro.said, made.repro.notes)
    assert "shadowrun" not in made.text
    assert len(made.text.splitlines()) <= MAX_LINES
    shown = by_platform(said(quick, made.text, tmp_path / "script"))
    assert "tensor([[0.]])" in shown["cpu[flush_denormal=on]"]
    assert "e-4" in shown["cpu"]


def test_a_real_difference_of_two_instruction_sets_is_run_twice(quick, tmp_path):
    """cosh of 89 overflows in vectors of some instruction sets, and not in others (docs/found.md)."""
    graph = Graph((Input("x", (64,), fill=Fill("constant", 89.0)),), (Node(aten.cosh.default, (Ref(-1),)),), (Ref(0),))
    programs = {"0c": Program("0c", graph)}
    settings = RunnerSettings(("cpu[isa=default]",))
    result = VariantRunner(settings).run(build(Recipe("0c"), programs))
    if not result.findings:
        pytest.skip("both instruction sets of this machine compute the same")
    made = write_script(found(settings, Recipe("0c"), programs), programs, settings, tmp_path / "script", OPTIONS)
    assert "with ATEN_CPU_CAPABILITY=default in front" in made.text
    assert "shadowrun" not in made.text
    both = [by_platform(said_anew(made.text, tmp_path / "script", ATEN_CPU_CAPABILITY=isa)) for isa in ("default", "")]
    assert both[0] != both[1]


@pytest.mark.parametrize("relation", ["tail", "layout"])
def test_what_the_reference_shows_against_itself_needs_no_device(quick, tmp_path, relation):
    graph = Graph((Input("x", (64,), fill=Fill("constant", 89.0)),), (Node(aten.cosh.default, (Ref(-1),)),), (Ref(0),))
    programs = {"0c": Program("0c", graph)}
    settings = RunnerSettings(("sim",), flaws=())
    recipe = Recipe("0c", (Mutation("metamorphic", (relation,)),))
    found = [f for f in VariantRunner(settings).run(build(recipe, programs)).findings if f.role == "reference"]
    if not found:
        pytest.skip("the CPU of this machine agrees with itself")
    wanted = Wanted(signature(found[0]), (found[0].explanation,), -1, recipe)
    made = write_script(wanted, programs, settings, tmp_path / "script", OPTIONS)
    assert made.repro.shows_fault, (made.repro.said, made.repro.notes)
    assert "shadowrun" not in made.text
    assert len(made.text.splitlines()) <= MAX_LINES
    shown = said(quick, made.text, tmp_path / "script")
    assert "inf" in shown
    assert "e+38" in shown


LEAKY = Graph((Input("x", (5, 7)),), (Node(aten.leaky_relu.default, (Ref(-1),)),), (Ref(0),))
SILU = Graph((Input("x", (37,), fill=Fill("uniform", 1, 2)),), (Node(aten.silu.default, (Ref(-1),)),), (Ref(0),))


@pytest.mark.parametrize(
    ("relation", "flaw", "graph", "forms"),
    [
        ("permutation", "silu-tail", SILU, ("in order", "backwards")),
        ("in-place", "mul-inplace-lost", None, ("not in place", "in place")),
        ("in-place", "leaky-relu-ignores-strides", LEAKY, ("not in place", "in place")),
    ],
)
def test_other_pairs_have_scripts_too(clean_sim, quick, tmp_path, relation, flaw, graph, forms):
    graph = graph or Graph((Input("x", (4, 3)),), (Node(aten.mul.Tensor, (Ref(-1), Ref(-1))),), (Ref(0),))
    programs = {"0c": Program("0c", graph)}
    settings = RunnerSettings(("sim",), flaws=(flaw,))
    recipe = Recipe("0c", (Mutation("metamorphic", (relation,)),))
    with clean_sim.flaws(flaw):
        results = VariantRunner(settings).run(build(recipe, programs)).findings
        (one,) = [f for f in results if f.explanation == EXPLANATIONS[relation]]
        wanted = Wanted(signature(one), ("free text", one.explanation), 0, recipe)
        made = write_script(wanted, programs, settings, tmp_path / "script", OPTIONS)
    assert made.repro is not None, made.note
    assert made.repro.shows_fault, (made.repro.said, made.repro.notes)
    assert "free text" not in made.text + made.repro.script.read_text()
    assert len(made.text.splitlines()) <= MAX_LINES
    lines = said(quick, made.text, tmp_path / "script").splitlines()
    shown = [line.partition(" {")[0].partition(" tensor")[0] for line in lines if line[0].isalpha()]
    assert tuple(shown) == forms


def test_what_no_call_shows_alone_is_said(clean_sim, tmp_path):
    settings = RunnerSettings(("sim",), flaws=("matmul-in-bf16",))
    with clean_sim.flaws("matmul-in-bf16"):
        wanted = found(settings, Recipe("0a"))
    made = write_script(wanted, PROGRAMS, settings, tmp_path / "script", OPTIONS)  # the flaw is gone
    assert made.repro is None
    assert "aten::mm alone does not show it" in made.note
