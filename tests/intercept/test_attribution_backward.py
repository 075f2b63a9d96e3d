"""Backward operators have the module and the line of their forward call; recomputed ones those of their module."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shadowrun
from shadowrun import Phase
from shadowrun.intercept import attribution


def calls(run, op):
    return [r.call for r in run.records(op=op)]


def only(run, op):
    (call,) = calls(run, op)
    return call


def test_backward_of_views_and_of_hooks_has_the_place_of_its_forward_call():
    class Viewing(nn.Module):
        def forward(self, x):
            y = x * 2
            return y[:, 1:].square()

    x = torch.ones(2, 3, requires_grad=True)
    seen = []
    with shadowrun.compare("cpu") as run:
        y = Viewing()(x)
        y.register_hook(lambda grad: seen.append(1) or grad.sin())
        y.sum().backward()
    assert seen
    scattered = only(run, "aten::slice_backward")
    assert (scattered.module, scattered.phase) == ("Viewing", Phase.BACKWARD)
    assert scattered.site.endswith("Viewing.forward")
    assert only(run, "aten::sin").phase is Phase.BACKWARD


def test_double_backward_belongs_to_the_module_too():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.ones(1, 3, requires_grad=True)
    with shadowrun.compare("cpu") as run:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        first = len(list(run.records()))
        gradient.square().sum().backward()
    second = [r.call for r in run.records() if r.call.seq >= first and r.call.phase is Phase.BACKWARD]
    assert {"Sequential.0", "Sequential.1"} <= {c.module for c in second}
    assert {c.module for c in calls(run, "aten::tanh_backward")} == {"Sequential.1"}


def test_the_link_between_forward_and_backward_survives_many_steps(monkeypatch):
    monkeypatch.setattr(attribution, "_MAX_LINKS", 50)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with shadowrun.compare("cpu") as run:
        for _ in range(40):
            model(torch.ones(1, 2)).sum().backward()
        n_links = len(run._attribution._links)
    assert {c.module for c in calls(run, "aten::threshold_backward")} == {"Sequential.1"}
    assert n_links <= 51


def test_nodes_from_before_the_comparison_have_no_forward_place():
    y = nn.ReLU()(torch.ones(2, requires_grad=True))
    with shadowrun.compare("cpu") as run:
        y.sum().backward()
    assert only(run, "aten::threshold_backward").phase is Phase.BACKWARD
    assert only(run, "aten::threshold_backward").module == ""


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_of_a_checkpoint_belongs_to_its_module(clean_sim, reentrant, device):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(3, 3)
            self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Sigmoid())

        def forward(self, x):
            return checkpoint(self.body, self.stem(x).sin(), use_reentrant=reentrant).cos()

    model = Checkpointed().to(device)
    with shadowrun.compare("sim" if device == "sim" else "cpu") as run:
        for _ in range(3):
            model(torch.ones(1, 3).to(device)).sum().backward()
            run.step()
    assert {c.module for c in calls(run, "aten::tanh")} == {"Checkpointed.body.1"}
    assert len(calls(run, "aten::tanh")) == 6, "recomputed in each backward"
    assert {c.module for c in calls(run, "aten::sigmoid")} == {"Checkpointed.body.3"}
    assert {c.module for c in calls(run, "aten::tanh_backward")} == {"Checkpointed.body.1"}
    assert {c.module for c in calls(run, "aten::sigmoid_backward")} == {"Checkpointed.body.3"}
    assert {c.phase for c in calls(run, "aten::tanh_backward")} == {Phase.BACKWARD}
    # The operators outside: sin's gradient multiplies by cos, cos's by sin.
    assert {c.module for c in calls(run, "aten::sin") + calls(run, "aten::cos")} == {"Checkpointed"}
    if device == "sim":
        assert {c.module for c in calls(run, "aten::sigmoid_backward")} == {"Checkpointed.body.3"}


def test_backward_called_inside_a_module_s_forward_belongs_to_the_forward_calls():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Tanh()

        def forward(self, x):
            (gradient,) = torch.autograd.grad(self.inner(x).sum(), x)
            return gradient.neg()

    with shadowrun.compare("cpu") as run:
        Penalty()(torch.ones(2, requires_grad=True))
    backward = only(run, "aten::tanh_backward")
    assert (backward.module, backward.phase) == ("Penalty.inner", Phase.BACKWARD)
    assert only(run, "aten::neg").module == "Penalty"
