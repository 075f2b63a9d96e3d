"""Mitigations that the child process applies itself, on real modules."""

import copy
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shadowrun.studies.mitigate.apply_in_process import applied


class Pair(NamedTuple):
    first: Any
    second: Any


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 4)
        self.seen = []

    def forward(self, x, *, scale=None):
        y = self.norm(self.conv(x))
        self.seen.append((x, y, scale))
        return {"logits": self.out(y.mean((2, 3))), "pair": Pair(y, [scale])}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def images():
    torch.manual_seed(1)
    return torch.randn(2, 3, 9, 9)


def test_float64_inside_and_the_own_dtype_outside(net, images):
    wanted = copy.deepcopy(net).double()(images.double(), scale=torch.ones(2).double())
    with applied(["float64"]):
        found = net(images, scale=torch.ones(2))
    x, y, scale = net.seen[0]
    assert {t.dtype for t in (x, y, scale, *net.parameters())} == {torch.float64}
    assert net.norm.running_mean.dtype == torch.float64
    assert found["logits"].dtype == found["pair"].first.dtype == found["pair"].second[0].dtype == torch.float32
    assert type(found["pair"]) is Pair
    assert torch.equal(found["logits"], wanted["logits"].float())


def test_float64_trains(net, images):
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    held = net.out.weight
    with applied(["float64"]):
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.CrossEntropyLoss()(net(images)["logits"], torch.tensor([1, 2]))
            loss.backward()
            optimizer.step()
    assert loss.dtype == torch.float32
    assert held is net.out.weight
    assert held.grad.dtype == held.dtype == torch.float64


def test_float64_leaves_what_is_float64_already(images):
    module = nn.Linear(9, 2).double()
    with applied(["float64"]):
        assert module(images.double()).dtype == torch.float64
        assert nn.Identity()(torch.arange(3)).dtype == torch.int64


def test_half_precision_modules_come_back_as_they_were(images):
    module = nn.Linear(9, 2).to(torch.bfloat16)
    with applied(["float64"]):
        assert module(images.to(torch.bfloat16)).dtype == torch.bfloat16


def test_channels_last(net, images):
    wanted = net(images)["logits"]
    net.seen.clear()
    with applied(["channels_last"]):
        found = net(images)["logits"]
    x, y, _ = net.seen[0]
    for t in (x, y, net.conv.weight):
        assert t.is_contiguous(memory_format=torch.channels_last)
        assert not t.is_contiguous()
    torch.testing.assert_close(found, wanted)


def test_truncation_of_what_innermost_modules_return(net, images):
    wanted = net(images)
    kept = net.seen.pop()[1]
    with applied(["truncate=12"]):
        found = net(images)
    y = net.seen.pop()[1]
    for t in (y, found["logits"]):
        assert not (t.view(torch.int32) & 0xFFF).any()
        assert (t.view(torch.int32) & 0x1000).any()
    assert torch.equal(found["pair"].first, y), "what the outer module returns is not truncated again"
    torch.testing.assert_close(y, kept, rtol=2**-10, atol=2**-10)
    assert found["logits"].requires_grad
    found["logits"].sum().backward()
    truncated = net.out.weight.grad.clone()
    net.out.weight.grad = None
    wanted["logits"].sum().backward()
    torch.testing.assert_close(truncated, net.out.weight.grad, rtol=2**-8, atol=2**-8)


def test_truncation_leaves_short_dtypes_and_integers():
    half = torch.randn(8).half()
    with applied(["truncate=10"]):
        assert torch.equal(nn.Identity()(half), half)
        assert torch.equal(nn.Identity()(torch.arange(8)), torch.arange(8))
        found = nn.Identity()(OrderedDict(x=torch.tensor([1.2345678], dtype=torch.float64)))
    assert type(found) is OrderedDict
    assert int(found["x"].view(torch.int64)) & 0x3FF == 0


def test_two_at_once_and_nothing_stays(net, images):
    original = nn.Module.__call__
    with applied(["float64", "truncate=30", "threads=1"]):
        net(images)
        assert nn.Module.__call__ is not original
    y = net.seen[0][1]
    assert y.dtype == torch.float64
    assert not (y.view(torch.int64) & 0x3FFFFFFF).any()
    assert nn.Module.__call__ is original


def test_a_compiled_module_is_one_graph():
    """Its inputs and results are wrapped; the modules inside are compiled as they are."""
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with applied(["float64", "truncate=8"]):
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        found = compiled(torch.ones(2, 4))
    assert found.dtype == torch.float32
    assert net[0].weight.dtype == torch.float64


def test_an_exception_of_the_program_passes(net):
    with applied(["float64"]):
        with pytest.raises(RuntimeError):
            net(torch.randn(2, 4, 9, 9))
        torch.manual_seed(1)
        assert net(torch.randn(2, 3, 9, 9))["logits"].dtype == torch.float32


def test_reductions_of_16_bit_products():
    flags = torch.backends.cuda.matmul
    before = flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction
    try:
        with applied(["bf16_reduction=off"]):
            assert not flags.allow_bf16_reduced_precision_reduction
            assert not flags.allow_fp16_reduced_precision_reduction
    finally:
        flags.allow_bf16_reduced_precision_reduction, flags.allow_fp16_reduced_precision_reduction = before
