"""Compilers of third parties, with their real failures: for `nox -s backends`, which installs them."""

import importlib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun.compiled.outcome import RegionOutcome
from tests.compiled import models

pytestmark = pytest.mark.filterwarnings("ignore")
FLOAT32 = {"config": {"INFERENCE_PRECISION_HINT": "f32"}}


@pytest.fixture(autouse=True)
def fresh():
    yield
    torch._dynamo.reset()


def registered(module):
    """Skips where the backend is not installed."""
    pytest.importorskip(module.partition(".")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(module)


@pytest.fixture
def turbine():
    registered("iree.turbine.dynamo")


@pytest.fixture
def openvino():
    registered("openvino.torch")


def short_products():
    """Whether OpenVINO would compute products in bfloat16 on this processor."""
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and any(flag in cpu.read_text() for flag in ("avx512_bf16", "amx_bf16"))


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).eval(), torch.randn(6, 8)


@pytest.mark.parametrize("name", ["perceptron", "transformer", "gated"])
def test_iree_is_right(turbine, name):
    model, x = models.make(name)
    report = shadowrun.compile_check(model.eval(), x, backend="turbine_cpu", train=False)
    assert report.ok, report.summary()
    assert report.verdict.status is shadowrun.Status.MATCH
    assert [r.outcome for r in report.regions] == [RegionOutcome.OK]


def test_the_operator_that_iree_cannot_compile_is_named(turbine, tmp_path):
    def counted(x):
        return torch.histc(x.exp(), 4, 0, 3).float() * 2

    report = shadowrun.compile_check(counted, torch.rand(16), backend="turbine_cpu", train=False, ladder=False)
    assert report.outcome is RegionOutcome.COMPILE_ERROR
    assert report.error.startswith("RuntimeError: JIT compilation failed")
    (culprit,) = report.regions[0].localised.culprits
    assert (culprit.op, culprit.how) == ("aten.histc.default", "alone")
    (made,) = report.repro(tmp_path, time_limit_s=5)
    assert made.shows_fault
    assert "JIT compilation failed" in made.said


def test_openvino_is_right_in_float32(openvino):
    model, x = layers()
    report = shadowrun.compile_check(model, x, backend="openvino", options=FLOAT32, train=False)
    assert report.ok, report.summary()
    assert report.verdict.evidence  # not handed back to PyTorch, which would be equal bit by bit


@pytest.mark.skipif(not short_products(), reason="this processor has no products in bfloat16")
def test_openvino_computes_products_in_bfloat16_which_is_found_and_shown(openvino, tmp_path):
    model, x = layers()
    report = shadowrun.compile_check(model, x, backend="openvino", train=False)
    assert report.outcome is RegionOutcome.MISMATCH
    culprits = report.regions[0].localised.culprits
    assert [(c.op, c.module) for c in culprits] == [("aten.addmm.default", "0"), ("aten.addmm.default", "2")]
    ours, eagers = culprits[0].errors.relative
    assert ours > 1e-4 > 1e-6 > eagers
    assert [s.name for s in report.ladder if s.outcome is RegionOutcome.MISMATCH] == ["openvino"]
    (made,) = report.repro(tmp_path, time_limit_s=5)
    assert made.shows_fault, made
    assert "shadowrun" not in "".join(line for line in made.script.read_text().splitlines() if "import" in line)


def test_training_that_a_backend_cannot_do_is_an_error_of_its_own_class(turbine):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    report = shadowrun.compile_check(model, torch.randn(2, 4), backend="turbine_cpu", ladder=False)
    if not report.ok:
        assert report.outcome in (RegionOutcome.COMPILE_ERROR, RegionOutcome.RUNTIME_ERROR)
        assert report.error.partition(":")[0].endswith("Error")
