"""Tolerances of the settings decide for the results that they name, and are not asked for equal ones."""

from __future__ import annotations

import torch

import shadowrun
from shadowrun.config import Config
from shadowrun.judge.judge import Judge
from shadowrun.types import Status

aten = torch.ops.aten


def judge(platform, tolerance):
    return Judge(tolerance=Config.from_options(settings=False, tolerance=tolerance).tolerance_on(platform))


def test_operator_dtype_and_platform(make_case):
    x = torch.linspace(0.5, 2, 100)
    exp = make_case(aten.exp.default, lambda t: t.exp() * 1.01, x)
    half = make_case(aten.exp.default, lambda t: t.exp() * 1.2, x.to(torch.bfloat16))
    sin = make_case(aten.sin.default, lambda t: t.sin() * 1.01, x)
    loose = {"rtol": 0.3, "atol": 0.0}
    for platform, rules, passing in (
        ("npu:0", {"aten::exp": loose}, [exp, half]),
        ("npu:0", {"aten::exp": loose | {"dtype": "bf16"}}, [half]),
        ("npu:0", {"*": loose | {"platform": "npu"}}, [exp, half, sin]),
        ("npu:0", {"*": loose | {"platform": "cuda"}}, []),
        ("npu:0", {"*": loose, "sin": {"rtol": 1e-6, "atol": 0.0}}, [exp, half]),
    ):
        for case in (exp, half, sin):
            expected = Status.MATCH if any(case is c for c in passing) else Status.MISMATCH
            assert judge(platform, rules)(case)[0].status is expected, (platform, rules, case.func)


def test_one_call_with_results_of_two_dtypes(make_case):
    """max returns values and indices: the tolerance is for the values alone."""
    x = torch.tensor([[1.0, 5.0, 3.0]])
    rules = {"*": {"rtol": 0.5, "atol": 0.0}}
    off = make_case(aten.max.dim, lambda t, d: (t.max(d).values * 1.1, t.max(d).indices), x, 1)
    assert judge("npu", rules)(off)[0].status is Status.MATCH
    other = make_case(aten.max.dim, lambda t, d: (t.max(d).values, t.max(d).indices + 1), x, 1)
    assert judge("npu", rules)(other)[0].status is Status.MISMATCH


def test_a_strict_rule_finds_rounding(make_case):
    case = make_case(aten.sum.dim_IntList, lambda t, d: t.flip(d).sum(d), torch.rand(8, 999), [1])
    assert Judge()(case)[0].status is Status.MATCH
    assert judge("npu", {"sum": {"rtol": 0.0, "atol": 0.0}})(case)[0].status is Status.MISMATCH


def test_equal_results_ask_for_no_tolerance(monkeypatch):
    asked = []
    monkeypatch.setattr(Config, "tolerance_on", lambda *_: lambda op, dtype: asked.append((op, dtype)))
    with shadowrun.compare("cpu[threads=1]", settings=False) as run:
        torch.ones(4, 4).exp()
    assert run.counts()[Status.MATCH] >= 1
    assert asked == []
