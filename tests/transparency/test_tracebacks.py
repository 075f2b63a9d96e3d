"""The tracebacks that a program makes itself have next to no frames of shadowrun's, and meta tensors are no failure."""

import traceback
import warnings

import pytest
import torch

import shadowrun
from shadowrun import Status, native


def _of_an_operator():
    try:
        torch.ones(3) @ torch.ones(5)
    except RuntimeError:
        return traceback.format_exc()


def _of_a_call_met_first():
    try:
        torch.ones(3).view(5)
    except RuntimeError:
        return traceback.format_exc()


def _of_modules():
    net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(3, 4)))
    try:
        net(torch.ones(2, 5))
    except RuntimeError:
        return traceback.format_exc()


@pytest.mark.skipif(native.core is None, reason="only the compiled part can take its caller's frames out")
@pytest.mark.parametrize("program", [_of_an_operator, _of_a_call_met_first])
@pytest.mark.parametrize("target", ["cpu", "sim"])
def test_operators(clean_sim, target, program):
    plain = program()
    with shadowrun.compare(target):
        assert program() == plain
        assert program() == plain


@pytest.mark.skipif(native.core is None, reason="only the compiled part can take its caller's frames out")
@pytest.mark.parametrize("target", ["cpu", "sim"])
def test_modules_have_one_frame_more_which_looks_as_torchs_does(clean_sim, target):
    plain = _of_modules().splitlines()
    with shadowrun.compare(target):
        found = _of_modules().splitlines()
    at = next(i for i, line in enumerate(plain) if line.endswith("in _wrapped_call_impl"))
    assert found[at : at + 2] == plain[at : at + 2]
    assert found[:at] + found[at + 2 :] == plain


@pytest.mark.parametrize("target", ["cpu", "sim"])
def test_a_call_of_meta_tensors_and_others_is_unverified(clean_sim, target):
    x, net = torch.ones(1, 2), torch.nn.Linear(2, 2, bias=False, device="meta")
    with warnings.catch_warnings(), shadowrun.compare(target) as run:
        warnings.simplefilter("error")
        net(x)
    assert run.counts()[Status.ERROR] == 0
    assert not run.internal_failures()
