import subprocess
import sys

import pytest
import torch

from shadowrun.intercept.plan import make_plan
from shadowrun.repro.calls import script_call
from shadowrun.repro.platform_setup import platform_setup_of
from shadowrun.repro.script import ScriptSpec
from shadowrun.repro.snippet import snippet

MM = torch.ops.aten.mm.default


def spec(op, *args, target="sim", facts=None, kind="mismatch", title="aten::mm is wrong", **kwargs):
    call = script_call(make_plan(op, 0), args, kwargs, ["output 0"])
    sides = platform_setup_of(target, facts or {}), platform_setup_of("cpu", {})
    return ScriptSpec(kind, title, (), target=sides[0], ref=sides[1], **call)


def test_a_snippet_is_short_and_shows_the_fault():
    text = snippet(spec(MM, torch.tensor([[1 / 3]]), torch.tensor([[3.0]])), ("matmul-in-bf16",))
    assert len(text.splitlines()) <= 15
    done = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, check=True)
    assert "1.0020" in done.stdout
    assert "tensor([[1.]])" in done.stdout


def test_an_environment_is_given_in_a_comment():
    text = snippet(spec(MM, torch.ones(1, 1), torch.ones(1, 1), target="cpu[isa=default]"))
    assert "with ATEN_CPU_CAPABILITY=default in front" in text
    compile(text, "snippet", "exec")


def test_values_survive_as_text():
    x = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 0.1])
    text = snippet(spec(torch.ops.aten.relu.default, x), ())
    scope = {}
    exec(text.split("for device")[0].replace('sim.enable("sim", ', "dict("), scope)
    assert 'float("nan")' in text
    assert torch.equal(scope["call"]("cpu")["output 0"].nan_to_num(9), x.relu().nan_to_num(9))


@pytest.mark.parametrize(
    "args",
    [
        (torch.ones(8, 8), torch.ones(8, 8)),
        (torch.ones(2, 3).t(), torch.ones(2, 2)),
        (torch.ones(0, 3), torch.ones(3, 1)),
    ],
)
def test_what_numbers_do_not_show_has_no_snippet(args):
    assert snippet(spec(MM, *args), ()) == ""


def test_settings_of_both_calls_and_other_kinds_have_none():
    args = torch.ones(1, 1), torch.ones(1, 1)
    assert snippet(spec(MM, *args, target="cpu[threads=1]")) == ""
    assert snippet(spec(MM, *args, kind="memory"), ()) == ""


def test_a_title_stays_a_comment():
    text = snippet(spec(MM, torch.ones(1, 1), torch.ones(1, 1), title="a\nimport os\u2028b"), ())
    assert text.splitlines()[0].startswith("# a\\nimport os")
