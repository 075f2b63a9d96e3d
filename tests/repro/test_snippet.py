import subprocess
import sys

import pytest
import torch
from torch import fx

from shadowrun.compiled.compile_spec import CompileSpec
from shadowrun.compiled.repro import graph_fields
from shadowrun.intercept.plan import make_plan
from shadowrun.repro.call_code import script_call
from shadowrun.repro.platform_setup import platform_setup_of
from shadowrun.repro.script import ScriptSpec
from shadowrun.repro.snippet import MAX_LINES, snippet

pytestmark = pytest.mark.usefixtures("forked_processes")

MM = torch.ops.aten.mm.default


def spec(op, *args, target="sim", facts=None, kind="mismatch", title="aten::mm is wrong", **kwargs):
    call = script_call(make_plan(op, 0), args, kwargs, ["output 0"])
    sides = platform_setup_of(target, facts or {}), platform_setup_of("cpu", {})
    return ScriptSpec(kind, title, (), target=sides[0], ref=sides[1], **call)


def ran(text, folder):
    """What a script printed, by the name of the platform."""
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, check=True, cwd=folder)
    return dict(line.split(" ", 1) for line in done.stdout.replace("\n   ", " ").splitlines())


def test_a_snippet_is_short_and_shows_the_fault(new_processes):
    text = snippet(spec(MM, torch.tensor([[1 / 3]]), torch.tensor([[3.0]])), ("matmul-in-bf16",))
    assert len(text.splitlines()) <= 15
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "cpu {'output 0': tensor([[1.]])}",
        "sim {'output 0': tensor([[1.001953125]], device='sim:0')}",
    ]


def test_an_environment_is_given_in_a_comment():
    text = snippet(spec(MM, torch.ones(1, 1), torch.ones(1, 1), target="cpu[isa=default]"))
    assert "with ATEN_CPU_CAPABILITY=default in front" in text
    compile(text, "snippet", "exec")


def test_values_survive_as_text():
    x = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 0.1])
    text = snippet(spec(torch.ops.aten.relu.default, x), ())
    scope = {}
    exec(text.split("print(")[0].replace('sim.enable("sim", ', "dict("), scope)
    assert 'float("nan")' in text
    assert torch.equal(scope["call"]("cpu")["output 0"].nan_to_num(9), x.relu().nan_to_num(9))


@pytest.mark.parametrize(
    "args",
    [
        (torch.arange(64.0).view(8, 8), torch.full((8, 1), 1 / 3)),
        (torch.tensor([[1.0, 1 / 3, 2.0], [3.0, 4.0, 5.0]]).t(), torch.ones(2, 1)),
    ],
)
def test_what_numbers_do_not_show_is_loaded(args, tmp_path):
    made = spec(MM, *args)
    torch.save(dict(made.inputs), tmp_path / "inputs.pt")
    text = snippet(made, ("matmul-in-bf16",))
    assert 'INPUTS["self"].to(device, copy=True)' in text
    assert len(text.splitlines()) <= MAX_LINES
    shown = ran(text, tmp_path)
    assert shown["sim"].replace(", device='sim:0'", "") != shown["cpu"]


def test_sizes_and_equal_elements_are_short():
    text = snippet(spec(torch.ops.aten.cat.default, [torch.ones(0, 3), torch.full((9, 9), -0.0)]), ())
    assert "torch.empty([0, 3], dtype=torch.float32, device=device)" in text
    assert "torch.full([9, 9], -0.0, dtype=torch.float32, device=device)" in text
    assert "torch.tensor([0.0, -0.0], " in snippet(spec(torch.ops.aten.neg.default, torch.tensor([0.0, -0.0])), ())


def test_settings_of_one_process_come_between_the_calls(tmp_path):
    text = snippet(spec(torch.ops.aten.mul.Tensor, torch.tensor([1e-38]), 0.1, target="cpu[flush_denormal=on]"))
    shown = ran(text, tmp_path)
    assert len(text.splitlines()) <= MAX_LINES
    assert "tensor([1.000000215e-39])" in shown["cpu"]
    assert "tensor([0.])" in shown["cpu[flush_denormal=on]"]


def test_what_raises_comes_last():
    accepts = snippet(spec(MM, torch.ones(1, 2), torch.ones(1, 1), kind="accepts"), ())
    assert accepts.index('print("sim"') < accepts.index('print("cpu"')
    raises = snippet(spec(MM, torch.ones(1, 2), torch.ones(1, 1), kind="raises"), ())
    assert raises.index('print("sim"') > raises.index('print("cpu"')


def test_what_needs_more_than_a_call_has_none():
    args = torch.ones(1, 1), torch.ones(1, 1)
    assert snippet(spec(MM, *args, kind="memory"), ()) == ""
    assert snippet(spec(MM, *args, kind="unstable"), ()) == ""


def graph_spec(op, *inputs, backend="inductor"):
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{k}") for k in range(len(inputs))]
    graph.output((graph.call_function(op, tuple(nodes)),))
    how = CompileSpec(backend, "", False, True, None, {}, None)
    fields = graph_fields(fx.GraphModule(torch.nn.Module(), graph), how, (), raises=False)
    return ScriptSpec("graph", "it is compiled wrongly", (), {"inputs": list(inputs), "allowed": []}, **fields)


def test_a_graph_is_shown_compiled_and_in_eager_mode(tmp_path):
    x, y = torch.tensor([1.0, float("inf")]), torch.full((2,), 0.5)
    text = snippet(graph_spec(torch.ops.aten.add.Tensor, x, y, backend="eager"))
    assert len(text.splitlines()) <= MAX_LINES
    assert 'torch.full([2], 0.5, dtype=torch.float32, device="cpu")' in text
    shown = ran(text, tmp_path)
    assert shown["eager"] == shown["compiled"] == "(tensor([1.500000000,         inf]),)"
    many = snippet(graph_spec(torch.ops.aten.neg.default, torch.arange(99.0), backend="eager"))
    assert 'torch.load("inputs.pt", weights_only=True)["inputs"]' in many


def test_a_title_stays_a_comment():
    text = snippet(spec(MM, torch.ones(1, 1), torch.ones(1, 1), title="a\nimport os\u2028b"), ())
    assert text.splitlines()[0].startswith("# a\\nimport os")
