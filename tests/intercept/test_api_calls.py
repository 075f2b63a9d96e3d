"""`api=True`: which function or module of torch made each operator call, and what the program does not notice of it."""

import threading
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shadowrun
from shadowrun.intercept import torchapi
from shadowrun.intercept.api_calls import function_name


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(4, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        y = self.layers(self.gru(x)[0]) @ self.weight
        return F.scaled_dot_product_attention(y, y, y) + torch.linalg.norm(F.softmax(y, -1))


def functions_of(program, *, target="cpu[mkldnn=off]", **options):
    with shadowrun.compare(target, api=True, **options) as run:
        program()
    assert not stack()
    return {f.function: f for f in run.api_coverage().functions}


def stack():
    return torch.overrides._get_current_function_mode_stack()


def train():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 2, 4)).sum().backward()
    optimizer.step()


def test_the_outermost_function_or_module_of_torch():
    found = functions_of(train)
    assert {"nn.GRU", "nn.Linear", "nn.Tanh", "F.softmax", "torch.linalg.norm", "optim.AdamW.step"} <= found.keys()
    inside = {"aten::bmm", "aten::_scaled_dot_product_flash_attention_for_cpu"}  # of torch 2.13, and from 2.14 on
    assert inside & {*found["F.scaled_dot_product_attention"].operators}
    assert "torch.ones" in found
    assert not {"F.linear", "nn.Sequential", "torch._VF.gru"} & found.keys()


def test_backward_belongs_to_the_function_that_made_the_node():
    found = functions_of(train)
    assert "aten::tanh_backward" in found["nn.Tanh"].operators
    assert "aten::_softmax_backward_data" in found["F.softmax"].operators
    assert not any("backward" in op for op in found["Tensor.backward"].operators)


def test_two_functions_on_one_line_are_told_apart():
    def program():
        x = torch.ones(3, requires_grad=True)
        (torch.sin(x) + x.cos()).sum().backward()

    found = functions_of(program)
    # The derivative of sin calls cos, and that of cos calls sin.
    assert {"aten::sin", "aten::cos"} <= set(found["torch.sin"].operators)
    assert {"aten::sin", "aten::cos"} <= set(found["Tensor.cos"].operators)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.mm, "torch.mm"),
        (torch.Tensor.mm, "Tensor.mm"),
        (torch.Tensor.__matmul__, "Tensor.__matmul__"),
        (torch.Tensor.grad.__get__, "Tensor.grad"),
        (F.relu, "F.relu"),
        (F.gelu, "F.gelu"),
        (F.linear, "F.linear"),
        (torch.linalg.inv, "torch.linalg.inv"),
        (torch.fft.fft, "torch.fft.fft"),
        (torch.special.erf, "torch.special.erf"),
        (torch.einsum, "torch.einsum"),
        (torch.Tensor.backward, "Tensor.backward"),
        (torch.ops.aten.mm.default, "aten.mm.default"),
    ],
)
def test_names_are_those_that_programs_write(function, name):
    assert function_name(function) == name


def test_grades(clean_sim):
    def program():
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to("sim")
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(torch.ones(2, 4, device="sim")).sum().backward()
        optimizer.step()
        torch.lerp(torch.ones(2, device="sim"), torch.ones(2, device="sim"), 0.5)

    with clean_sim.flaws("missing-lerp"):
        found = functions_of(program, target="sim")
    assert found["nn.Linear"].grade == "full"
    assert found["optim.AdamW.step"].grade == "partial"
    assert found["optim.AdamW.step"].lacking == ("aten::lerp_.Scalar",)
    assert found["torch.lerp"].grade == "none"


def test_another_function_mode_is_left_alone():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def program():
        with Mode():
            x = torch.ones(2)
        return x + 1

    functions_of(program)
    assert seen == [torch.ones]
    run = shadowrun.compare("cpu[mkldnn=off]", api=True)
    mode = Mode()
    run.start()
    mode.__enter__()
    run.stop()  # ours lies below
    assert stack() == [mode]
    mode.__exit__(None, None, None)
    assert not stack()


def test_the_default_device_still_works():
    run = shadowrun.compare("cpu[mkldnn=off]", api=True)
    with run, torch.device("meta"):
        assert torch.ones(2).device.type == "meta"
    assert not stack()


def test_other_threads_have_no_functions():
    def work():
        torch.sin(torch.ones(2))

    def program():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    with shadowrun.compare("cpu[mkldnn=off]", api=True) as run:
        program()
    coverage = run.api_coverage()
    assert coverage.functions == ()
    assert coverage.n_other_calls == sum(run.counts().values()) - run.counts()[shadowrun.Status.SKIPPED]


def test_a_compiled_function_has_one_graph_of_the_same_size():
    nodes = []

    def backend(graph, _):
        # By number: under a function mode, Dynamo writes `x @ x` as a method call.
        nodes.append(len(graph.graph.nodes))
        return graph.forward

    def function(x):
        return F.gelu(x @ x) + F.softmax(x, -1)

    for api in (False, True):
        torch._dynamo.reset()
        with shadowrun.compare("cpu[mkldnn=off]", api=api):
            torch.compile(function, backend=backend, fullgraph=True)(torch.ones(2, 2))
    assert nodes[0] == nodes[1]


def test_an_exception_leaves_nothing_behind():
    with pytest.raises(RuntimeError, match="size"), shadowrun.compare("cpu[mkldnn=off]", api=True):
        torch.ones(2) + torch.ones(3)
    assert not stack()
    assert torchapi.top_mode() is None


def test_combined_files_keep_the_functions(tmp_path):
    for rank in range(2):
        with shadowrun.compare("cpu[mkldnn=off]", api=True, file=tmp_path / f"{rank}.shadowrun"):
            torch.sin(torch.ones(2))
    combined = shadowrun.combine([tmp_path / "0.shadowrun", tmp_path / "1.shadowrun"], tmp_path / "all.shadowrun")
    assert {f.function: f.n_calls for f in combined.api_coverage().functions} == {"torch.sin": 2, "torch.ones": 2}


def test_what_is_refused():
    with pytest.raises(shadowrun.UsageError, match="use only one"):
        shadowrun.compare("cpu", api=True, budget=1.2)
    with shadowrun.compare("cpu[mkldnn=off]") as run:
        torch.ones(2)
    with pytest.raises(shadowrun.UsageError, match="record it with api=True"):
        run.api_coverage()


def test_a_module_of_torch_sees_no_function_mode():
    """`nn.TransformerEncoderLayer` takes its fused kernel only without one."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    inside = []
    tanh = nn.Tanh()
    tanh.register_forward_hook(lambda *_: inside.append(len(stack())))

    class Own(nn.Module):
        def forward(self, x):
            inside.append(len(stack()))
            return torch.sin(x)

    def program():
        with torch.no_grad():
            tanh(layer(torch.ones(2, 4, 16)))
        nn.Sequential(Own())(torch.ones(2))

    found = functions_of(program)
    assert inside == [0, 1]
    assert found["nn.TransformerEncoderLayer"].operators == ("aten::_transformer_encoder_layer_fwd",)
    assert "torch.sin" in found


def test_a_module_of_the_program_inside_a_module_of_torch():
    class Own(nn.Module):
        self_attn = types.SimpleNamespace(batch_first=True)

        def forward(self, x, **_):
            return torch.sin(x)

    encoder = nn.TransformerEncoder(Own(), 1, enable_nested_tensor=False)
    found = functions_of(lambda: encoder(torch.ones(2, 4, 16, requires_grad=True)).sum().backward())
    assert found["torch.sin"].operators == ("aten::cos", "aten::mul.Tensor", "aten::sin")


def test_a_stop_inside_a_module():
    run = shadowrun.compare("cpu[mkldnn=off]", api=True)
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(lambda *_: run.stop())
    run.start()
    linear(torch.ones(2))
    assert not stack()
    assert "nn.Linear" in {f.function for f in run.api_coverage().functions}
