"""Scripts that show one wrong node alone: they exit 1 while the fault is there and 0 when it is gone."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun import UsageError
from tests.compiled import faulty, models, planted

pytestmark = pytest.mark.usefixtures("forked_processes")

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch._dynamo.reset()


def again(script, **environment):
    """Run a script in a process of its own."""
    where = {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, timeout=600,
        env=os.environ | where | environment,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("model", "backend", "op", "most"),
    [
        ("gated", faulty.tanh_is_wrong, "aten.tanh.default", 2),
        pytest.param(
            "transformer", faulty.embedding_loses_duplicates, "aten.embedding_dense_backward.default", 8,
            marks=pytest.mark.slow,
        ),
        pytest.param("gated", faulty.fusing, "aten.add.Tensor", 500, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_script_shows_a_wrong_node_and_nothing_once_it_is_mended(tmp_path, model, backend, op, most):
    module, x = models.make(model)
    report = shadowrun.compile_check(module, x, backend=backend, ladder=False)
    stream = torch.get_rng_state()
    (made,) = report.repro(tmp_path)
    assert torch.equal(torch.get_rng_state(), stream)
    assert made.script.parent.name == f"01-{op}-mismatch"
    assert made.shows_fault is True, made
    assert "elements differ by more than rounding explains" in made.said
    text = made.script.read_text(encoding="utf-8")
    ast.parse(text)
    assert "shadowrun import" not in text
    assert op in text
    assert f"from tests.compiled.faulty import {backend.__name__} as backend" in text
    saved = torch.load(made.script.with_name("inputs.pt"), weights_only=True)
    assert sum(t.numel() for t in saved["inputs"] if isinstance(t, torch.Tensor)) <= most
    assert json.loads(made.script.with_name("versions.json").read_text())["versions"]["torch"] == torch.__version__
    assert again(made.script, MENDED="1")[0] == 0


def test_a_script_shows_a_node_that_does_not_compile(tmp_path):
    module, x = models.make("transformer")
    report = shadowrun.compile_check(module, x, backend=faulty.without_gelu, ladder=False)
    (made,) = report.repro(tmp_path)
    assert made.script.parent.name == "01-aten.gelu.default-compile-error"
    assert made.shows_fault
    assert made.said == "NotImplementedError: no lowering of gelu"
    assert made.inputs == "f32[]" or made.inputs.startswith("f32[1")
    assert again(made.script, MENDED="1") == (0, "it compiles and runs\n")


def test_what_is_right_has_no_script(tmp_path):
    module, x = models.make("gated")
    report = shadowrun.compile_check(module, x, backend="aot_eager")
    assert report.repro(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


def test_a_backend_without_a_name_of_its_own_is_refused(tmp_path):
    module, x = models.make("gated")
    backend = planted.compiler(planted.FAULTS["tanh a little too small"])
    report = shadowrun.compile_check(module, x, backend=backend, ladder=False)
    with pytest.raises(UsageError, match="cannot import the backend"):
        report.repro(tmp_path)


def test_the_graph_of_a_script_is_the_graph():
    """Constants become inputs, tuples keep the members that are used, infinities have their names."""
    from shadowrun.compiled.backend import CheckedBackend
    from shadowrun.compiled.compile_spec import CompileSpec
    from shadowrun.compiled.regions.captured_region import constants_as_inputs
    from shadowrun.compiled.repro import graph_fields
    from shadowrun.repro.script import ScriptSpec, render

    checked = CheckedBackend(planted.compiler())

    def function(x):
        values, _ = x.masked_fill(x < torch.tensor([0.0, 0.5]), float("-inf")).max(0)
        return values.to("cpu", torch.float64), torch.zeros(2, device="cpu")

    torch.compile(function, backend=checked)(torch.randn(3, 2))
    (region,) = checked.regions
    case = region.worst
    module, constants = constants_as_inputs(case.graph.module)
    given = [*case.snapshot.inputs, *constants]
    fields = graph_fields(module, CompileSpec.from_arguments("eager", None, None, None, None), (), raises=False)
    text = render(ScriptSpec("graph", "title", ("story",), {}, **fields))
    body = text.split("SAVED = ")[0] + text[text.index("def graph(") : text.index("compiled = ")]
    names = {"__file__": __file__}
    exec(compile(body, "script", "exec"), names)
    expected = case.graph.eager(case.snapshot.fresh())[1]
    for a, e in zip(names["graph"](*given), expected, strict=True):
        assert torch.equal(a, e)
