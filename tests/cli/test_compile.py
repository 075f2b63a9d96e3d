"""`shadowrun compile`: everything that a program compiles is checked, and it runs as under Python."""

import textwrap
from pathlib import Path

import pytest
import torch

from shadowrun.cli.main import main

TRAIN = """
    import sys
    import torch
    from torch._dynamo.backends.common import aot_autograd

    def lower(module, inputs):
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.tanh.default and {wrong}:
                node.target = torch.ops.aten.sin.default
        def run(args):
            given, args[:] = list(args), []
            return torch.fx.Interpreter(module).run(*given)
        run._boxed_call = True
        return run

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    compiled = torch.compile(net, backend=aot_autograd(fw_compiler=lower))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def double(x):
        return x * 2

    for step in range(4):
        out = double(compiled(torch.randn(2, 4)))
        out.sum().backward()
    print("program:", *sys.argv[1:], net[0].weight.grad.shape)
"""


# Dynamo reads `.grad` of an input that another compiled function returned.
pytestmark = [pytest.mark.usefixtures("forked_processes"), pytest.mark.filterwarnings("ignore:The .grad attribute")]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch._dynamo.reset()


def program(folder, wrong, text=TRAIN):
    (folder / "train.py").write_text(textwrap.dedent(text).format(wrong=wrong), encoding="utf-8")
    return "train.py"


def test_a_right_program_passes(folder, capsys):
    before = torch.compile
    assert main(["compile", "--calls", "2", program(folder, wrong=False), "--lr"]) == 0
    assert torch.compile is before
    out = capsys.readouterr().out
    assert out.startswith("program: --lr torch.Size([4, 4])\n")
    assert "Sequential compiled with compiler_fn against eager: ok" in out
    assert "judged graph by graph" in out
    assert "double compiled with aot_eager against eager: ok" in out
    assert "4 calls of its graphs only ran eagerly" in out  # two more of each, forward and backward


def test_a_wrong_operator_fails_it_and_is_named(folder, capsys):
    assert main(["compile", program(folder, wrong=True)]) == 1
    out = capsys.readouterr().out
    assert "wrong: aten.tanh.default (tanh), alone" in out
    assert "double compiled with aot_eager against eager: ok" in out


def test_a_program_that_compiles_nothing_is_told_so(folder, capsys):
    assert main(["compile", program(folder, wrong=False, text="raise SystemExit(3)")]) == 3
    assert "nothing that torch.compile compiled" in capsys.readouterr().out


def test_wrong_usage(folder, capsys):
    assert main(["compile"]) == 2
    assert "missing-script" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compile", "--calls", "0", "x.py"])


IMPORTING = """
    import torch
    import vendor

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    torch.compile(net, backend={backend})(torch.randn(2, 4)).sum().backward()
"""
VENDOR = """
    import torch
    from torch._dynamo.backends.common import aot_autograd

    def lower(module, inputs):
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.tanh.default:
                node.target = torch.ops.aten.sin.default
        def run(args):
            given, args[:] = list(args), []
            return torch.fx.Interpreter(module).run(*given)
        run._boxed_call = True
        return run

    def backend(module, inputs):
        return aot_autograd(fw_compiler=lower)(module, inputs)
"""


def test_scripts_are_written_for_what_is_wrong(folder, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(folder))
    (folder / "vendor.py").write_text(textwrap.dedent(VENDOR), encoding="utf-8")
    (folder / "train.py").write_text(textwrap.dedent(IMPORTING).format(backend="vendor.backend"), encoding="utf-8")
    assert main(["compile", "--repro", "shown", "train.py"]) == 1
    out = capsys.readouterr().out
    script = folder / "shown" / "01-aten.tanh.default-mismatch" / "repro.py"
    assert script.exists()
    assert f"{Path('shown') / script.parent.name / 'repro.py'} (f32[" in out
    assert "exits 1 here" in out
    (folder / "train.py").write_text(
        textwrap.dedent(IMPORTING).format(backend="lambda *given: vendor.backend(*given)"), encoding="utf-8"
    )
    assert main(["compile", "--repro", "none", "train.py"]) == 1
    assert "no script. A script cannot import the backend" in capsys.readouterr().out
    assert not (folder / "none").exists()
