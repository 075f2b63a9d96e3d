"""A selection that fits nothing, a program that crashed, a gate on nothing: said first, and never a pass."""

from pathlib import Path

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun import UsageError
from shadowrun.cli.main import main
from shadowrun.studies.sweep.opinfo import operators_called

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs a script; gives status, standard output and error."""
    monkeypatch.chdir(tmp_path)

    def go(*options, script=SCRIPT):
        Path("train.py").write_text(script, encoding="utf-8")
        try:
            status = main(["run", "--target", "cpu[threads=1]", *options, "train.py"])
        except SystemExit as end:
            status = end.code
        shown = capfd.readouterr()
        return status, shown.out, shown.err

    return go


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ("5-2", "argument --steps: '5-2' is an empty range: use 2-5"),
        ("x", "argument --steps: 'x' is no step: use numbers and ranges, such as 0,2,5-7"),
        (",", "argument --steps: ',' names no step"),
    ],
)
def test_steps_that_are_none(run, steps, why):
    status, out, err = run("--steps", steps)
    assert (status, out) == (2, "")
    assert why in err


@pytest.mark.parametrize(
    ("ops", "why"),
    [
        ("matmull", "--ops matmull: no operator is called so; nearest: matmul"),
        ("aten::sofmax*", "--ops aten::sofmax*: no operator is called so; nearest: softmax"),
    ],
)
def test_operators_that_are_none_are_refused_before_the_run(run, ops, why):
    status, out, err = run("--ops", ops)
    assert (status, out) == (2, "")
    assert why in err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--ops", "*nothing*"), "ops '*nothing*' fits none of "),
        (("--ops", "mylib::foo"), "ops 'mylib::foo' fits none of "),
        (("--ops", "aten::erfinv"), "ops 'aten::erfinv' fits none of "),
        (("--modules", "Sequental.1"), "modules 'Sequental.1' fits none of 2 modules called; nearest: Sequential."),
        (("--steps", "7-9,12"), "of steps 7 to 9, 12 none came; the program had 3 steps, 0 to 2"),
    ],
)
def test_what_fitted_nothing_is_the_headline(run, options, why):
    status, out, err = run(*options)
    assert status == 1
    assert out.splitlines()[1].startswith("FAILED: no call could be compared; ")
    assert why in out.splitlines()[1]
    assert why in err
    assert "the program runs" not in out


def test_a_program_without_steps_is_told_why_none_came(run):
    _, out, _ = run("--steps", "1", script="import torch\ntorch.ones(2) + 1\n")
    assert "it called neither run.step() nor an optimizer's step() more than once" in out


@pytest.mark.parametrize(
    ("ops", "compared"), [("linear", {"aten::addmm", "aten::mm"}), ("softmax", {"aten::_softmax"})]
)
def test_a_function_stands_for_the_operators_that_it_calls(run, ops, compared):
    status, _, _ = run("--ops", ops)
    assert status == 0
    found = {record.call.op for record in shadowrun.load(".shadowrun").records()}
    assert compared <= found <= {"aten::addmm", "aten::mm", "aten::_softmax", "aten::_softmax_backward_data"}


def test_operators_called():
    assert set(operators_called("matmul")) == {"aten::dot", "aten::mv", "aten::mm", "aten::bmm"}
    assert set(operators_called("softmax")) == {"aten::_softmax", "aten::_softmax_backward_data"}
    assert operators_called("matmull") == ()


def test_in_python_too():
    for ops in ("matmull", ["aten::mm", "aten::sofmax"]):
        with pytest.raises(UsageError, match="no operator is called so; nearest"):
            shadowrun.compare("cpu[threads=1]", ops=ops)
    with pytest.raises(UsageError, match="made of other operators"):
        shadowrun.compare("cpu[threads=1]", ops="matmul")
    shadowrun.compare("cpu[threads=1]", ops=["matmul", "aten::mm"])
    with shadowrun.compare("cpu[threads=1]", modules="foo") as run:
        nn.Linear(2, 2)(torch.ones(1, 2))
    assert run.gate().line == (
        "FAILED: no call could be compared; modules 'foo' fits none of 1 module called; there were: Linear"
    )


CRASHES = "import torch\ndef f(x):\n    raise ValueError('negative')\n(torch.ones(3) + 1).exp()\nf(0)\n"


def test_a_crash_is_said_first(run):
    status, out, err = run(script=CRASHES)
    assert status == 1
    assert out.splitlines()[1:3] == [
        "FAILED: the program ended with ValueError: negative (train.py:3 in f); 3 calls compared until then",
        "On cpu[threads=1] the program ended with ValueError: negative (train.py:3 in f).",
    ]
    assert err.endswith("ValueError: negative\n"), "as without us"
    assert not shadowrun.load(".shadowrun").coverage().runs


def test_a_crash_before_anything(run):
    status, out, _ = run(script="assert 0\n")
    assert status == 1
    assert (
        "the program ended with AssertionError (train.py:1 in <module>), before any operator was compared"
        in " ".join(out.split())
    )
    assert "the program unknown" not in out


@pytest.mark.parametrize(
    ("ending", "status", "verdict"),
    [
        ("raise SystemExit(0)", 0, "runs"),
        ("raise SystemExit(3)", 3, "ended with SystemExit: 3 (train.py:3 in <module>)"),
    ],
)
def test_an_exit_is_the_program_s_own(run, ending, status, verdict):
    ended, out, _ = run(script=f"import torch\ntorch.ones(3) + 1\n{ending}\n")
    assert ended == status
    assert out.splitlines()[1].startswith("PASSED")
    assert out.splitlines()[2] == f"On cpu[threads=1] the program {verdict}."


def test_an_exception_of_a_second_block_is_not_that_of_the_first():
    run = shadowrun.compare("cpu[threads=1]")
    with pytest.raises(ZeroDivisionError), run:
        torch.ones(2) + 1 / 0
    assert "test_an_exception_of_a_second_block" in run.info.raised
    assert not run.gate().passed
    with run:
        torch.ones(2) + 1
    assert run.info.raised == ""
    assert run.gate().passed


@pytest.mark.parametrize("script", ["assert 0\n", "import torch\n", CRASHES])
def test_the_coverage_gate_passes_on_no_part(run, capfd, script):
    run(script=script)
    assert main(["coverage", "--fail-under", "10"]) == 1
    assert "FAILED: " in capfd.readouterr().err


def test_a_device_that_lacks_nothing_has_everything(run, capfd):
    """Random operators ran there, and cannot be compared."""
    script = "import torch\nx = torch.empty(100).uniform_().normal_()\ntorch.nn.functional.dropout(x).sum()\nx.exp()\n"
    assert run("--target", "sim", "--preset", "clean", script=script)[0] == 0
    assert main(["coverage", "--fail-under", "100"]) == 0
    assert "(100.0 %)" in capfd.readouterr().out
    assert shadowrun.load(".shadowrun").coverage().n_by_state["unverified"] == 0
