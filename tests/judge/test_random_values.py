"""Draws that are handed over: right generators pass for every seed, wrong ones are found."""

import pytest
import torch
from torch.nn import functional as F

import shadowrun
from shadowrun import Cause, Status
from shadowrun.judge.random_values import implausible

aten = torch.ops.aten
N = 4000

CALLS = {
    "rand": (aten.rand.default, ([N],), {}),
    "rand_like": (aten.rand_like.default, (torch.ones(N),), {}),
    "uniform_": (aten.uniform_.default, (torch.ones(N), -3.0, 5.0), {}),
    "randn": (aten.randn.default, ([N],), {}),
    "randn bf16": (aten.randn.default, ([N],), {"dtype": torch.bfloat16}),
    "normal_": (aten.normal_.default, (torch.ones(N), 10.0, 0.1), {}),
    "normal_ half": (aten.normal_.default, (torch.ones(N, dtype=torch.half), -2.0, 3.0), {}),
    "bernoulli_": (aten.bernoulli_.float, (torch.ones(N), 0.03), {}),
    "bernoulli_ of the default": (aten.bernoulli_.float, (torch.full((N,), 3.0),), {}),
    "normal_ of the defaults": (aten.normal_.default, (torch.ones(N),), {}),
    "bernoulli": (aten.bernoulli.default, (torch.linspace(0, 0.5, N),), {}),
    "bernoulli_ by tensor": (aten.bernoulli_.Tensor, (torch.ones(N), torch.full((N,), 0.9)), {}),
    "randperm": (aten.randperm.default, (N,), {}),
    "randint": (aten.randint.default, (7, [N]), {}),
    "randint low": (aten.randint.low, (-3, 4, [N]), {}),
    "native_dropout": (aten.native_dropout.default, (torch.randn(N), 0.2, True), {}),
    "native_dropout half": (aten.native_dropout.default, (torch.randn(N).half(), 0.2, True), {}),
    "native_dropout all": (aten.native_dropout.default, (torch.ones(N), 1.0, True), {}),
    "native_dropout none": (aten.native_dropout.default, (torch.ones(N), 0.0, True), {}),
    "small": (aten.randn.default, ([3],), {}),
    "empty": (aten.rand.default, ([0],), {}),
    "no check": (aten.exponential_.default, (torch.ones(N),), {}),
}


def draw(func, args, kwargs):
    copies = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    result = func(*copies, **kwargs)
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("name", CALLS)
def test_right_draws_pass_for_every_seed(name):
    func, args, kwargs = CALLS[name]
    for seed in range(60):
        torch.manual_seed(seed)
        assert implausible(func, args, kwargs, draw(func, args, kwargs)) == "", seed


def dropped(p, mask_p=None, scale=None):
    x = torch.randn(N)
    mask = torch.rand(N) >= (p if mask_p is None else mask_p)
    return (x, p, True), [x * mask * (1 / (1 - p) if scale is None else scale), mask]


def wrong_mask():
    (x, p, train), (out, mask) = dropped(0.5)
    return (x, p, train), [out, mask.flip(0)]


WRONG = {
    "rand in [0, 2)": (aten.rand.default, ([N],), [torch.rand(N) * 2], "outside"),
    "rand in [0, 0.5)": (aten.rand.default, ([N],), [torch.rand(N) / 2], "mean 0.2"),
    "rand is constant": (aten.rand.default, ([N],), [torch.zeros(N)], "mean 0 of"),
    "rand has NaN": (aten.rand.default, ([N],), [torch.full((N,), float("nan"))], "mean nan"),
    "uniform_ forgets from": (aten.uniform_.default, (torch.ones(N), 2.0, 3.0), [torch.rand(N)], "outside"),
    "randn forgets the mean": (aten.normal_.default, (torch.ones(N), 1.0, 1.0), [torch.randn(N)], "mean"),
    "randn is infinite": (aten.randn.default, ([N],), [torch.full((N,), float("inf"))], "mean inf"),
    "bernoulli of 1 - p": (
        aten.bernoulli_.float,
        (torch.ones(N), 0.2),
        [(torch.rand(N) < 0.8).float()],
        "expected 0.2",
    ),
    "bernoulli scaled": (aten.bernoulli_.float, (torch.ones(N), 0.2), [(torch.rand(N) < 0.2) * 5.0], "other than"),
    "bernoulli by tensor of 1 - p": (
        aten.bernoulli.default,
        (torch.full((N,), 0.1),),
        [(torch.rand(N) < 0.9).float()],
        "expected 0.1",
    ),
    "randperm repeats": (aten.randperm.default, (4,), [torch.tensor([0, 2, 2, 3])], "no permutation"),
    "randperm from 1": (aten.randperm.default, (4,), [torch.tensor([1, 2, 3, 4])], "no permutation"),
    "randint reaches high": (aten.randint.default, (3, [N]), [torch.randint(0, 4, (N,))], "outside"),
    "randint below low": (aten.randint.low, (1, 3, [N]), [torch.randint(0, 3, (N,))], "outside"),
    "randint never high - 1": (aten.randint.default, (3, [N]), [torch.randint(0, 2, (N,))], "expected 1 "),
    "dropout with another p": (aten.native_dropout.default, *dropped(0.2, mask_p=0.4, scale=1.25), "mean"),
    "dropout unscaled": (aten.native_dropout.default, *dropped(0.2, scale=1.0), "not the input times"),
    "dropout with another mask": (aten.native_dropout.default, *wrong_mask(), "not the input times"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_draws_are_found(name):
    func, args, values, text = WRONG[name]
    assert text in implausible(func, args, {}, values)


def test_dropout_in_evaluation_is_not_held_to_its_p():
    x = torch.randn(N)
    assert implausible(aten.native_dropout.default, (x, 0.5, False), {}, [x, torch.ones(N, dtype=torch.bool)]) == ""


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_both_streams_stay_where_they_would_be(clean_sim, device):
    def draw():
        torch.manual_seed(1)
        torch.sim.manual_seed(1)
        x = torch.ones(100).to(device)
        values = [F.dropout(x), torch.rand_like(x), x.clone().normal_(), torch.randperm(20, device=device)]
        generator = torch.Generator().manual_seed(2)
        values.append(torch.rand(3, generator=generator))
        return [*(v.cpu() for v in values), torch.get_rng_state(), torch.sim.get_rng_state(), generator.get_state()]

    plain = draw()
    with shadowrun.compare("sim", slow_ratio=1e9) as run:
        compared = draw()
    assert [i for i, (a, b) in enumerate(zip(compared, plain, strict=True)) if not torch.equal(a, b)] == []
    random = [r.verdict for r in run.records(op="*rand*")] + [r.verdict for r in run.records(op="*normal_")]
    assert {v.status for v in random} == {Status.UNVERIFIED}
    assert {v.cause for v in random} == {Cause.RANDOMNESS}
    assert run.findings() == []
