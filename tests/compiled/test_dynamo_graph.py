"""What a backend does to forward and backward together: the backward that the program really runs is compared."""

import textwrap

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

import shadowrun
from shadowrun.cli.main import main
from shadowrun.compiled.outcome import RegionOutcome
from tests.compiled import models, planted

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def right(module, _inputs):
    return make_boxed_func(module.forward)


def other_tanh_backward(module, _inputs):
    for node in module.graph.nodes:
        if node.target is aten.tanh_backward.default:
            node.target = aten.sigmoid_backward.default
    module.recompile()
    return make_boxed_func(module.forward)


def without_a_product(module, _inputs):
    products = [n for n in module.graph.nodes if n.target is aten.mul.Tensor]
    for node in products[-1:]:
        node.replace_all_uses_with(node.args[0])
        module.graph.erase_node(node)
    module.recompile()
    return make_boxed_func(module.forward)


def other_joint_graph(joint, inputs, **options):
    other_tanh_backward(joint, inputs)
    return default_partition(joint, inputs, **options)


def wrong_with_symbols(module, inputs):
    symbols = any(isinstance(i, torch.SymInt) for i in inputs)
    return make_boxed_func(lambda *args: [o * 1.01 if symbols and _is_float(o) else o for o in module(*args)])


def _is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def swapped_on_dynamos_own(module, _inputs):
    for node in module.graph.nodes:
        if node.target in (torch.sub, torch.Tensor.sub) or getattr(node.target, "__name__", "") == "sub":
            node.args = (node.args[1], node.args[0])
    module.recompile()
    return torch.compiler.disable(module.forward)


class Net(nn.Module):
    def __init__(self, draws=False):
        super().__init__()
        self.a, self.b, self.draws = nn.Linear(8, 8), nn.Linear(8, 1), draws

    def forward(self, x):
        h = torch.tanh(self.a(x))
        h = nn.functional.dropout(h, 0.25) if self.draws else h
        return torch.sub(self.b(h) * self.a.bias.sum(), x)


WRONG = {
    "a product dropped by bw_compiler": aot_autograd(fw_compiler=right, bw_compiler=without_a_product),
    "another gradient of tanh in bw_compiler": aot_autograd(fw_compiler=right, bw_compiler=other_tanh_backward),
    "partition_fn changes the joint graph": aot_autograd(
        fw_compiler=right, bw_compiler=right, partition_fn=other_joint_graph
    ),
    "only with sizes as symbols": aot_autograd(fw_compiler=wrong_with_symbols, bw_compiler=right),
    "operands swapped on Dynamo's own graph": swapped_on_dynamos_own,
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("draws", [False, True])
def test_a_fault_of_the_program_as_a_whole_is_found(name, draws):
    """No single graph of plain operators shows it, also where the program draws."""
    dynamic = name == "only with sizes as symbols"
    given = Net(draws), torch.randn(4, 8)
    report = shadowrun.compile_check(*given, backend=WRONG[name], ladder=False, dynamic=dynamic or None)
    assert report.outcome is RegionOutcome.MISMATCH, report.summary()
    assert not report.ok
    assert any("forward and backward together" in note for note in report.notes)


def test_a_program_that_draws_nothing_is_not_taken_for_one_that_does():
    model, x = models.make("gated")
    fault = planted.FAULTS["tanh a little too small"]
    report = shadowrun.compile_check(model, x, backend=planted.compiler(fault))
    assert RegionOutcome.UNVERIFIED not in {s.outcome for s in report.ladder}


def with_other_random_numbers(backward):
    def lower(module, inputs):
        for node in module.graph.nodes:
            if node.target is aten.native_dropout.default:
                node.target = planted.other_dropout
        module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=lower, bw_compiler=backward)


def test_other_draws_hide_no_wrong_backward_and_are_unverified_without_one():
    report = shadowrun.compile_check(
        Net(draws=True), torch.randn(4, 8), backend=with_other_random_numbers(right), ladder=False
    )
    assert report.outcome is RegionOutcome.UNVERIFIED
    assert {r.outcome for r in report.regions} == {RegionOutcome.OK, RegionOutcome.UNVERIFIED}
    wrong = with_other_random_numbers(other_tanh_backward)
    report = shadowrun.compile_check(Net(draws=True), torch.randn(4, 8), backend=wrong, ladder=False)
    assert report.outcome is RegionOutcome.MISMATCH
    assert report.regions[-1].name == "graph 0 as Dynamo made it"
    assert report.regions[-1].outcome is RegionOutcome.MISMATCH


def test_what_is_not_verified_is_not_ok_unless_that_is_asked_for():
    given = Net(draws=True), torch.randn(4, 8)
    report = shadowrun.compile_check(*given, backend=with_other_random_numbers(right), ladder=False)
    assert not report.ok
    assert not report.failed
    assert "allow_unverified=True" in report.summary()
    report = shadowrun.compile_check(
        *given, backend=with_other_random_numbers(right), ladder=False, allow_unverified=True
    )
    assert report.outcome is RegionOutcome.UNVERIFIED
    assert report.ok


TRAIN = """
    import sys
    import torch
    from torch import nn
    from tests.compiled.test_dynamo_graph import Net, WRONG, with_other_random_numbers, right
    from torch._dynamo.backends.common import aot_autograd

    backends = WRONG | {{
        "right": aot_autograd(fw_compiler=right, bw_compiler=right),
        "other random numbers": with_other_random_numbers(right)
    }}
    model = Net({draws})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    compiled = torch.compile(model, backend=backends[{name!r}])
    for step in range(3):
        optimizer.zero_grad()
        compiled(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    print("program:", model.a.weight.sum().item())
"""


def run_program(folder, name, draws=False, *options):
    (folder / "train.py").write_text(textwrap.dedent(TRAIN).format(name=name, draws=draws), encoding="utf-8")
    return main(["compile", *options, str(folder / "train.py")])


@pytest.mark.parametrize("name", [n for n in WRONG if n != "only with sizes as symbols"])
def test_a_program_with_such_a_fault_fails(tmp_path, capsys, name):
    assert run_program(tmp_path, name) == 1
    assert "graph 0 as Dynamo made it: mismatch" in capsys.readouterr().out


def test_a_right_program_passes_and_one_that_cannot_be_verified_has_a_status_of_its_own(tmp_path, capsys):
    assert run_program(tmp_path, "right", True) == 0
    assert "graph 0 as Dynamo made it: ok" in capsys.readouterr().out
    assert run_program(tmp_path, "other random numbers", True) == 3
    assert "--allow-unverified" in capsys.readouterr().out
    assert run_program(tmp_path, "other random numbers", True, "--allow-unverified") == 0


def test_the_program_is_not_touched_by_it(tmp_path, capsys):
    torch.manual_seed(3)
    assert run_program(tmp_path, "right", True) == 0
    ours = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("program:"))
    torch._dynamo.reset()
    torch.manual_seed(3)
    source = textwrap.dedent(TRAIN).format(name="right", draws=True)
    exec(compile(source, "train.py", "exec"), {})
    assert capsys.readouterr().out.strip() == ours
