"""How torch finds the mode's method: by C strings, which the mode answers itself, and as Python finds anything else."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref

import pytest
import torch

import shadowrun
from shadowrun import native
from shadowrun.intercept import torchapi
from shadowrun.intercept.dispatch import ShadowMode
from tests.native.both_ways import both_ways, handled

pytestmark = pytest.mark.skipif(native.core is None, reason="there is no compiled part to compare with")

_by_c_string = ctypes.pythonapi.PyObject_GetAttrString
_by_c_string.argtypes = [ctypes.py_object, ctypes.c_char_p]
_by_c_string.restype = ctypes.py_object
aten = torch.ops.aten


def test_torch_calls_the_compiled_method():
    code, n_in_python = ShadowMode.__torch_dispatch__.__code__, [0]

    def watch(frame, event, _):
        n_in_python[0] += event == "call" and frame.f_code is code

    with shadowrun.compare("cpu") as run:
        x = torch.ones(3)
        sys.setprofile(watch)
        try:
            for _ in range(10):
                x.neg()
        finally:
            sys.setprofile(None)
    assert handled(run)
    assert n_in_python == [1]  # the first call of an operator


def test_what_c_strings_find():
    with shadowrun.compare("cpu") as run:
        mode = run._mode
        method = _by_c_string(mode, b"__torch_dispatch__")
        assert method is mode._method
        assert _by_c_string(method, b"__self__") is mode
        assert method.__self__ is mode
        assert _by_c_string(mode, b"observes") is True
        assert _by_c_string(mode, b"_plans") is mode._plans
        assert _by_c_string(method, b"leave")() is None
        with pytest.raises(AttributeError, match="nothing_like_it"):
            _by_c_string(mode, b"nothing_like_it")
        with pytest.raises(AttributeError, match="nothing_like_it"):
            _by_c_string(method, b"nothing_like_it")
    assert _by_c_string(mode, b"__torch_dispatch__") == mode.__torch_dispatch__  # Python's own, from here on
    assert mode.__torch_dispatch__.__func__ is ShadowMode.__torch_dispatch__


def test_a_mode_of_a_subclass_goes_by_python():
    class Named(ShadowMode):
        name = "of a subclass"

    with shadowrun.compare("cpu") as run:
        mode = Named(run._replayer)
        assert _by_c_string(mode, b"__torch_dispatch__") == mode.__torch_dispatch__
        assert _by_c_string(mode, b"name") == "of a subclass"


@pytest.mark.parametrize("wrong", [3, torch.Tensor, int, ShadowMode, type("Plain", (), {})])
def test_other_types_stay_as_they_are(wrong):
    with pytest.raises(TypeError):
        native.core.install_dispatch_slot(wrong)
    test_what_c_strings_find()


def test_a_slot_that_holds_something_else_is_no_method():
    with shadowrun.compare("cpu") as run:
        mode = ShadowMode(run._replayer)
        for value in (None, 3, len):
            mode._method = value
            assert _by_c_string(mode, b"__torch_dispatch__") == mode.__torch_dispatch__
        del mode._method
        assert _by_c_string(mode, b"__torch_dispatch__") == mode.__torch_dispatch__


def test_methods_cannot_be_made_in_python():
    with pytest.raises(TypeError):
        native.core.DispatchMethod()


def test_a_mode_that_was_left_is_freed_at_once():
    with shadowrun.compare("cpu") as run:
        mode = ShadowMode(run._replayer)
        with mode:
            torch.ones(2).neg()
        left = weakref.ref(mode)
        gc.disable()
        try:
            del mode
            assert left() is None
        finally:
            gc.enable()


def test_a_mode_that_was_not_left_is_collected():
    with shadowrun.compare("cpu") as run:
        mode = ShadowMode(run._replayer)
        forgotten, method = weakref.ref(mode), mode._method
        del mode
        gc.collect()
        assert forgotten() is not None  # its method holds it
        assert method.__self__ is forgotten()
        del method
        gc.collect()
        assert forgotten() is None


def test_a_method_that_was_left_hands_calls_to_python():
    with shadowrun.compare("cpu") as run:
        method, x, own_ns = run._mode._method, torch.ones(2), []
        torchapi.pop_mode(run._mode)
        try:
            for k in range(6):
                if k == 4:
                    method.leave()
                assert torch.equal(method(aten.neg.default, (torch.Tensor,), (x,), {}), -x)
                own_ns.append(run._replayer.native_handler.own_ns)
        finally:
            torchapi.push_mode(run._mode)
    assert own_ns[3] > own_ns[1]
    assert own_ns[3] == own_ns[5]
    assert [r.verdict.status for r in run.records(op="aten::neg")] == [shadowrun.Status.MATCH] * 6


class Doubling(torchapi.DispatchMode):
    """A mode of the program, which changes results."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is aten.neg.default else out


def _program(_):
    x = torch.arange(4.0, requires_grad=True)
    y = (torch.nn.functional.linear(x.sin(), torch.ones(2, 4)) * 3).exp()
    y.sum().backward()
    with torch.no_grad():
        x.add_(x.grad)
    return x.detach().clone(), y.detach()


def test_modes_below_and_phases():
    both_ways(_program)
    with Doubling(), shadowrun.compare("cpu") as run:
        out = torch.ones(2).neg()
    assert out.tolist() == [-2.0, -2.0]
    assert [r.verdict.status for r in run.records(op="aten::neg")] == [shadowrun.Status.MISMATCH]  # the mode's doing
    with shadowrun.compare("cpu") as run:
        _program(None)
    phases = {(r.call.op, r.call.phase.value) for r in run.records()}
    assert ("aten::sin", "forward") in phases
    assert ("aten::cos", "backward") in phases
