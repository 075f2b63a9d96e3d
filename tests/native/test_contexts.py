"""Keys of contexts: two calls have equal keys in C where they have in Python, and the other way round."""

from __future__ import annotations

import collections
import contextlib
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shadowrun
from shadowrun import native
from shadowrun.native.tensors import context_key
from shadowrun.recording.recorder import _python_key
from tests.native.both_ways import handled

pytestmark = pytest.mark.skipif(native.core is None, reason="there is no compiled part to compare with")
often = settings(max_examples=300, deadline=None)


class Subclass(torch.Tensor):
    pass


class Other:
    pass


DTYPES = [torch.float32, torch.float64, torch.int64, torch.bool]
forms = st.tuples(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES))
tensors = st.one_of(
    forms.map(lambda f: torch.zeros(f[0], dtype=f[1])),
    forms.map(lambda f: torch.nn.Parameter(torch.zeros(f[0], dtype=f[1]), requires_grad=False)),
    forms.map(lambda f: torch.zeros(f[0], dtype=f[1]).as_subclass(Subclass)),
    forms.map(lambda f: torch.empty(f[0], dtype=f[1], device="meta")),
    forms.map(lambda f: torch.zeros(f[0], dtype=f[1]).to_sparse()),
)
# From few values, so that equal ones are common. No True next to 1: Python takes them for one, rightly or not.
leaves = st.one_of(
    tensors,
    st.sampled_from([0, 1, -1, 2, 1023, 1024, 1025, -1024, -1025, 2**31, 2**63, -(2**63), 2**200]),
    st.floats(),
    st.sampled_from([None, "", "a", "sum", "mean", "é", torch.float32, torch.int64, torch.strided]),
    st.sampled_from([torch.device("cpu"), torch.device("meta"), torch.channels_last, torch.contiguous_format]),
    st.builds(Other),
    st.sampled_from([np.float64(1), np.int64(1), np.bool_(True), 1 + 2j, float, int, Other, b"a"]),
)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=6) | st.lists(inner, max_size=6).map(tuple), max_leaves=8
)
calls = st.tuples(
    st.lists(values, max_size=4).map(tuple),
    st.dictionaries(st.sampled_from(["dim", "out", "dtype"]), values, max_size=2),
)


def structure(value):
    """What Python's key leaves out: where lists begin, and which of its parts are a tensor's."""
    if isinstance(value, (list, tuple)):
        return [len(value), *(structure(v) for v in value[:4])]
    return ("tensor", value.dim()) if isinstance(value, torch.Tensor) else ""


def of_call(call):
    return [structure(v) for v in (*call[0], *call[1].values())], len(call[0])


CPU = torch.device("cpu")


def keys(call, index=3, device=CPU, place=("Net.0", "forward", "train.py:3 in step")):
    return context_key(index, device, place, *call), _python_key(index, device, place, *call)


@often
@given(calls, calls)
def test_equal_exactly_where_pythons_are(one, other):
    (mine, theirs), (mine_2, theirs_2) = keys(one), keys(other)
    assert mine == keys(one)[0]
    assert hash(mine) == hash(keys(one)[0])
    if of_call(one) == of_call(other):
        assert (mine == mine_2) is (theirs == theirs_2), (one, other)
    else:
        assert mine != mine_2


@often
@given(calls, st.data())
def test_a_call_with_one_value_exchanged(call, data):
    args, kwargs = call
    if not args:
        return
    i = data.draw(st.integers(0, len(args) - 1))
    changed = (*args[:i], data.draw(values), *args[i + 1 :]), kwargs
    (mine, theirs), (mine_2, theirs_2) = keys(call), keys(changed)
    if of_call(call) == of_call(changed):
        assert (mine == mine_2) is (theirs == theirs_2), (call, changed)
    else:
        assert mine != mine_2


@pytest.mark.parametrize("n", [1, 3, 4, 5, 40, 300, 3000])
def test_many_arguments(n):
    """More than there is room for at first: bytes, objects, names."""
    for make in (lambda i: torch.ones(i % 3, 2), str, lambda i: i, lambda _: Other(), lambda i: [i, str(i)]):
        args = tuple(make(i) for i in range(n))
        named = {f"name{i}": make(i) for i in range(n)}
        assert keys((args, named))[0] == keys((args, dict(named)))[0]
        assert keys((args, named))[0] != keys((args, {}))[0]
        changed = (*args[:-1], torch.ones(5))
        assert keys((args, named))[0] != keys((changed, named))[0]


def test_all_that_makes_a_context():
    call = (torch.ones(2),), {}
    base = keys(call)[0]
    assert base != keys(call, index=4)[0]
    assert base != keys(call, device=torch.device("meta"))[0]
    for i in range(3):
        place = ["Net.0", "forward", "train.py:3 in step"]
        place[i] = "another"
        assert base != keys(call, place=tuple(place))[0]


def test_true_and_one_are_two_values():
    assert keys(((True,), {}))[0] != keys(((1,), {}))[0]
    assert keys(((False,), {}))[0] != keys(((0,), {}))[0]


class Raising:
    @property
    def __class__(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [1, v], lambda v: [[torch.ones(2), "a", v]]])
def test_what_raises_leaves_nothing_behind(wrap):
    text, x, bad = "a text of its own", torch.ones(2), wrap(Raising())
    counts = sys.getrefcount(text), sys.getrefcount(x)
    for call in (((text, x, bad), {}), ((), {"name": text, "other": bad})):
        for _ in range(50):
            with contextlib.suppress(KeyboardInterrupt):
                context_key(0, torch.device("cpu"), ("", "", ""), *call)
                raise AssertionError("an interrupt that was lost")
    del call
    assert (sys.getrefcount(text), sys.getrefcount(x)) == counts


def test_wrong_calls():
    for args in ((), (1, 2, 3, 4, 5), (1, torch.device("cpu"), ("", ""), (), {}), (1, None, ("", "", ""), [], {})):
        with pytest.raises(TypeError):
            context_key(*args)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_nested_tensor_has_no_shape():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for key in (context_key, _python_key):
        with pytest.raises(RuntimeError):
            key(0, torch.device("cpu"), ("", "", ""), (nested,), {})


def test_contexts_in_one_slot_of_the_cache_are_told_apart():
    inputs = {n: torch.ones(n) for n in (2, 3)}
    with shadowrun.compare("cpu") as run:
        run._replayer.native_handler.collide()
        for _ in range(5):
            for x in inputs.values():
                x.sin()
                x.cos()
            inputs[2].sin()
    assert handled(run)
    calls = collections.Counter((r.call.op, r.call.inputs, r.call.site) for r in run.records())
    assert len(calls) == 5, "the sin of another line among them"
    assert set(calls.values()) == {5}
    assert [r.call.op for r in run.records()] == ["aten::sin", "aten::cos", "aten::sin", "aten::cos", "aten::sin"] * 5
