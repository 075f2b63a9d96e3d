"""Faults that are planted in a GPU's kernels are found, and placed on the right operator."""

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun import Cause, Status
from tests.models import assert_same, digits, tokens, train

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def planted():
    """Replace kernels of CUDA's by wrong ones, written in Python."""
    libraries = []

    def plant(name, function):
        library = torch.library.Library("aten", "IMPL", "CUDA")
        libraries.append(library)
        library.impl(name, function, "CUDA")

    yield plant
    for library in libraries:
        library._destroy()


def exact_gelu(x, *, approximate="none"):
    return x * 0.5 * (1 + torch.erf(x * 0.70710678))


def wrong_gelu(x, *, approximate="none"):
    return exact_gelu(x) * 1.001


def one_wrong_element(x, dim, half_to_float):
    e = (x - x.amax(dim, keepdim=True)).exp()
    out = e / e.sum(dim, keepdim=True)
    out.view(-1)[-1] += 1e-3
    return out


@pytest.mark.parametrize("options", [{}, {"asynchronous": False}], ids=str)
def test_a_wrong_gelu_is_found_in_its_module(planted, options):
    planted("gelu", wrong_gelu)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
    with shadowrun.compare("cuda", **options) as run:
        model(torch.randn(16, 32).cuda()).sum().backward()
    wrong = list(run.records(status=Status.MISMATCH))
    assert {r.call.op for r in wrong} == {"aten::gelu"}
    assert {r.call.module for r in wrong} == {"Sequential.1"}
    assert [f.op for f in run.findings() if f.kind == "mismatch"] == ["aten::gelu"]


@pytest.mark.parametrize("options", [{}, {"asynchronous": False}], ids=str)
def test_one_wrong_element_is_found(planted, options):
    planted("_softmax", one_wrong_element)
    with shadowrun.compare("cuda", **options) as run:
        torch.randn(64, 1000, device="cuda").softmax(-1)
    assert [r.call.op for r in run.records(status=Status.MISMATCH)] == ["aten::_softmax"]


def test_tf32_is_told_apart_from_a_fault():
    a, b = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with shadowrun.compare("cuda") as run:
            a @ b
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    (record,) = run.records(status=Status.MISMATCH)
    assert (record.call.op, record.verdict.cause) == ("aten::mm", Cause.REDUCED_PRECISION)


@pytest.mark.parametrize("make", [digits, tokens])
def test_one_gpu_under_two_settings_differs_in_products_only(make):
    plain = train(make, "cuda", steps=2)
    run = shadowrun.compare("cuda[tf32=on]", ref="cuda[tf32=off]")
    train(make, "cuda", steps=2, run=run)
    assert plain
    products = {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::convolution",
        "aten::convolution_backward",
    }
    assert {r.call.op for r in run.records(status=Status.MISMATCH)} <= products


@pytest.mark.parametrize("make", [digits, tokens])
def test_one_gpu_against_itself_in_float64_matches(make):
    plain = train(make, "cuda", steps=2)
    run = shadowrun.compare("cuda", ref="cuda[compute=float64]")
    assert_same(train(make, "cuda", steps=2, run=run), plain)
    counts = run.counts()
    assert counts[Status.MISMATCH] == counts[Status.ERROR] == 0, run.findings()
    assert counts[Status.MATCH] > 50


def test_tf32_is_found_without_another_device():
    a, b = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    with shadowrun.compare("cuda[tf32=on]", ref="cuda[compute=float64,tf32=off]") as run:
        a @ b
    (record,) = run.records(status=Status.MISMATCH)
    assert (record.call.op, record.verdict.cause) == ("aten::mm", Cause.REDUCED_PRECISION)
    assert record.verdict.explanation.startswith("inputs rounded to tf32")


def test_one_gpu_with_itself_matches():
    run = shadowrun.compare("cuda", ref="cuda[tf32=off]")
    train(tokens, "cuda", steps=3, run=run)
    assert run.counts()[Status.MISMATCH] == run.counts()[Status.ERROR] == 0
    assert run.counts()[Status.MATCH] > 80
