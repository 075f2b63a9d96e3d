"""Regions that Inductor compiled for a GPU are compared as a whole, and its faults found."""

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun import Status
from tests.models import assert_same

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))

    def forward(self, x):
        return self.body(x).softmax(-1)


def trained(mode=None, run=None):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(model, mode=mode)
    x = torch.randn(16, 32).cuda()
    if run is not None:
        run.start()
    for _ in range(4):
        optimizer.zero_grad()
        step(x).square().sum().backward()
        optimizer.step()
        if run is not None:
            run.step()
    if run is not None:
        run.stop()
    return {k: v.cpu() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_compiled_program_is_unchanged_and_nothing_is_reported(mode):
    plain = trained(mode)
    run = shadowrun.compare("cuda", compiled=True)
    assert_same(trained(mode, run), plain)
    assert [(r.call.op, r.verdict) for r in run.records(status=[Status.MISMATCH, Status.ERROR])] == []


def test_compile_check_of_a_training_step_on_the_gpu():
    torch.manual_seed(0)
    report = shadowrun.compile_check(Net().cuda(), torch.randn(16, 32).cuda())
    assert report.ok, report
