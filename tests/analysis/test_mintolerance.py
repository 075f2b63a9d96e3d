"""The least tolerance: with it the judge lets real results pass, and with less it does not."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun.analysis import MinTolerance
from shadowrun.judge.judge import Judge
from shadowrun.run import Run
from shadowrun.store import DataFile
from shadowrun.types import Phase, RunInfo, Status
from tests.case_kit import make_case

aten = torch.ops.aten


def found(*cases, path=None):
    """The one finding of cases that mismatch, as if they were calls of one line."""
    data = DataFile.create(path, RunInfo("npu", "cpu"))
    for seq, case in enumerate(cases):
        verdict, diffs = Judge()(case)
        assert verdict.status is Status.MISMATCH, verdict
        context = data.context_id(case.func.name(), "", ("f32",), "", "", Phase.FORWARD, "a.py:1 in f", "npu")
        data.add_diffs(seq, diffs)
        data.add((seq, 0, context, data.verdict_id(verdict), -1.0, -1.0, -1.0, -1.0))
    data.close()
    return Run(data).findings()


def least(*cases) -> MinTolerance:
    tolerances = [finding.min_tolerance for finding in found(*cases)]
    return MinTolerance(max(t.rtol for t in tolerances), max(t.atol for t in tolerances))


def verdict_with(case, *, rtol=0.0, atol=0.0):
    return Judge(rtol=rtol, atol=atol)(case)[0].status


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
@pytest.mark.parametrize("size", [3, 1000, 40_000])
def test_it_is_enough_and_no_less_is(dtype, size):
    g = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=g, dtype=torch.float64).to(dtype)
    off = 1 + torch.randn(size, generator=g).abs().to(torch.float64) / 7
    case = make_case(aten.exp.default, lambda t: (t.exp() * off).to(dtype), x)
    t = least(case)
    assert math.isfinite(t.rtol + t.atol)
    assert verdict_with(case, rtol=t.rtol) is Status.MATCH
    assert verdict_with(case, atol=t.atol) is Status.MATCH
    assert verdict_with(case, rtol=t.rtol * 0.9999) is Status.MISMATCH
    assert verdict_with(case, atol=t.atol * 0.9999) is Status.MISMATCH


def test_it_is_that_of_all_calls():
    x = torch.linspace(1, 2, 50)
    small, large = (make_case(aten.exp.default, lambda t, f=f: t.exp() * f, x) for f in (1.01, 1.5))
    assert least(small, large) == least(large)
    assert least(small).rtol == pytest.approx(0.01, rel=1e-3)


def test_no_relative_one_where_the_reference_is_zero():
    case = make_case(aten.relu.default, lambda t: t.relu() + 0.25, torch.tensor([-1.0, 2.0, 3.0]))
    t = least(case)
    assert t.rtol == math.inf
    assert t.atol == pytest.approx(0.25, rel=1e-4)
    assert verdict_with(case, rtol=1e30) is Status.MISMATCH
    assert verdict_with(case, atol=t.atol) is Status.MATCH


@pytest.mark.parametrize(
    "target",
    [
        lambda t: t.exp().double(),
        lambda t: t.exp()[:2],
        lambda t: t.exp().nan_to_num(),
        lambda t: torch.where(t > 1, math.inf, t.exp()),
    ],
    ids=["dtype", "shape", "nan", "inf"],
)
def test_none_where_form_or_classes_differ(target):
    case = make_case(aten.exp.default, target, torch.tensor([0.5, math.nan, 2.0]))
    assert least(case) == MinTolerance(math.inf, math.inf)
    assert verdict_with(case, rtol=1e30, atol=1e30) is Status.MISMATCH


def test_none_for_integers():
    x = torch.arange(5)
    case = make_case(aten.mul.Tensor, lambda a, b: a * b + 1, x, x)
    assert least(case) == MinTolerance(math.inf, math.inf)
    assert verdict_with(case, rtol=10, atol=10) is Status.MISMATCH


def test_other_findings_have_none():
    with shadowrun.compare("cpu[threads=1]", settings=False) as run:
        torch.ones(3).exp()
    assert all(finding.min_tolerance is None for finding in run.findings())


def test_a_file_of_schema_1_has_no_count_of_zeros(tmp_path):
    """Then whether a relative tolerance is enough is not known, and none is promised."""
    path = tmp_path / "old.shadowrun"
    connection = sqlite3.connect(path)
    connection.executescript((Path(__file__).parents[1] / "store" / "schema-1.sql").read_text())
    connection.close()
    run = shadowrun.load(path)
    (finding,) = run.findings()
    assert finding.min_tolerance == MinTolerance(math.inf, pytest.approx(0.5, rel=1e-5))
    assert finding.worst.n_from_zero == -1
    assert run.first_divergence().diffs[0].n_from_zero == -1
