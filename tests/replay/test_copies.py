"""Copies of a call's tensors: bits, layouts and aliasing are kept, and the originals stay."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowrun.intercept.plan import make_plan
from shadowrun.numerics.bits import bits_equal
from shadowrun.replay.copies import OverBudget, copy_mutated, mirror, move, tensors_in

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
ADD_ = make_plan(torch.ops.aten.add_.Tensor, 0)
ADD_OUT = make_plan(torch.ops.aten.add.out, 1)
FOREACH = make_plan(torch.ops.aten._foreach_add_.List, 2)


@st.composite
def layouts(draw):
    """A tensor of any layout that views can make, over a base of random bits."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    base = torch.arange(max(1, math.prod(shape)) * 2 + 7).to(dtype)
    t = base[draw(st.integers(0, 3)) :][: math.prod(shape)].view(shape)
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["transpose", "slice", "expand", "select", "unsqueeze", "diagonal", "conj", "neg"]))
        dim = draw(st.integers(0, t.dim() - 1)) if t.dim() else 0
        if kind == "transpose" and t.dim() > 1:
            t = t.transpose(dim, draw(st.integers(0, t.dim() - 1)))
        elif kind == "slice" and t.dim():
            t = t[(slice(None),) * dim + (slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 3))),)]
        elif kind == "expand":
            t = t.expand(draw(st.integers(0, 3)), *t.shape)
        elif kind == "select" and t.dim() and t.shape[dim]:
            t = t.select(dim, draw(st.integers(0, t.shape[dim] - 1)))
        elif kind == "unsqueeze":
            t = t.unsqueeze(dim)
        elif kind == "diagonal" and t.dim() > 1:
            t = t.diagonal()
        elif kind == "conj":
            t = t.conj()
        elif kind == "neg" and t.dtype is not torch.bool:
            t = t._neg_view()
    return t


def same(copy, original):
    assert copy is not original
    assert copy.dtype is original.dtype
    assert copy.shape == original.shape
    assert copy.stride() == original.stride()
    assert (copy.is_conj(), copy.is_neg()) == (original.is_conj(), original.is_neg())
    assert bits_equal(copy.cpu().resolve_conj().resolve_neg(), original.cpu().resolve_conj().resolve_neg())


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_a_moved_tensor_has_the_same_bits_and_strides(t):
    version = t._version
    copy = move(t, CPU)
    same(copy, t)
    assert t._version == version
    if t.numel():
        assert copy.untyped_storage().data_ptr() != t.untyped_storage().data_ptr()


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_what_is_written_to_is_copied_as_it_lies(t):
    args, kwargs = copy_mutated(ADD_, (t, 1), {"alpha": 2}, 1 << 30)
    same(args[0], t)
    assert (args[1], kwargs) == (1, {"alpha": 2})


@settings(max_examples=60, deadline=None)
@given(layouts(), layouts())
def test_what_is_only_read_is_not_copied_here_and_is_copied_elsewhere(a, b):
    args, _ = copy_mutated(ADD_, (a, b), {}, 1 << 30)
    assert args[1] is b
    (first, second), _ = mirror((a, b), {}, CPU, 1 << 30)
    same(first, a)
    same(second, b)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.integers(0, 3))
def test_arguments_that_overlap_go_on_doing_so(n, m, start, other):
    base = torch.arange(12.0)
    a, b = base[start : start + n], base[other : other + m]
    for (x, y), _ in (
        copy_mutated(ADD_, (a, b), {}, 1 << 30),
        mirror((a, b), {}, CPU, 1 << 30, written=[a]),
    ):
        same(x, a)
        same(y, b)
        x.fill_(100)
        assert bits_equal(
            y, torch.where((torch.arange(m) + other >= start) & (torch.arange(m) + other < start + n), 100.0, b)
        )
    assert base.tolist() == list(range(12)), "the originals stay"


def test_one_tensor_in_several_places_stays_one():
    x = torch.ones(3)
    for (a, b, (c, d)), kwargs in (
        copy_mutated(ADD_, (x, x, [x, None]), {"out": x}, 1 << 30),
        mirror((x, x, [x, None]), {"out": x}, CPU, 1 << 30),
    ):
        assert a is b is c is kwargs["out"]
        assert a is not x
        assert d is None


def test_lists_that_are_written_to():
    base = torch.arange(6.0)
    left, right = [base[:3], base[3:]], [base[3:], base[:3]]
    (mine, theirs), _ = copy_mutated(FOREACH, (left, right), {}, 1 << 30)
    torch._foreach_add_(mine, theirs)
    torch._foreach_add_(left, right)
    assert [t.tolist() for t in mine] == [t.tolist() for t in left], "the second sees what the first wrote"


def test_a_conjugate_on_the_storage_of_what_is_written_to():
    x = torch.tensor([1 + 2j, 3 - 1j])
    for (a, b), _ in (
        copy_mutated(ADD_, (x, x.conj()), {}, 1 << 30),
        mirror((x, x.conj()), {}, CPU, 1 << 30, written=[x]),
    ):
        assert b.is_conj()
        assert b.tolist() == x.conj().tolist()
        a.zero_()
        assert b.tolist() == [0, 0]
    y = x.conj().imag
    assert y.is_neg()
    (_, b), _ = copy_mutated(ADD_, (torch.view_as_real(x)[..., 1], y), {}, 1 << 30)
    assert b.tolist() == y.tolist()


def test_out_arguments_by_name():
    x, out = torch.ones(2), torch.zeros(2)
    (_, _), kwargs = copy_mutated(ADD_OUT, (x, x), {"out": out}, 1 << 30)
    assert kwargs["out"] is not out
    assert kwargs["out"].tolist() == [0, 0]


def test_the_budget_counts_what_is_copied():
    x = torch.ones(100)
    with pytest.raises(OverBudget):
        mirror((x,), {}, CPU, 399)
    mirror((x, x, [x]), {}, CPU, 400)
    with pytest.raises(OverBudget):
        copy_mutated(ADD_, (x, 1), {}, 399)
    copy_mutated(ADD_, (x[:2], 1), {}, 8)
    with pytest.raises(OverBudget):  # two parts of a large storage: all of it would be copied
        copy_mutated(ADD_, (x[:2], x[2:4]), {}, 100)
    with pytest.raises(OverBudget):
        mirror((x[:2], x[2:4]), {}, CPU, 100, written=[x])


def test_keywords_that_name_a_device_follow():
    _, kwargs = mirror((), {"device": torch.device("meta"), "pin_memory": True, "dtype": torch.float32}, CPU, 100)
    assert kwargs == {"device": CPU, "pin_memory": False, "dtype": torch.float32}
    assert mirror((), {"device": None}, CPU, 100)[1] == {"device": None}


def test_symbolic_zeros_become_zeros():
    zero = torch.ops.aten._efficientzerotensor([2, 3])
    assert zero._is_zerotensor()
    copy = move(zero, CPU)
    assert not copy._is_zerotensor()
    assert copy.tolist() == [[0] * 3] * 2


def test_tensors_in_nested_lists():
    x, y = torch.ones(1), torch.ones(2)
    assert [t.numel() for t in tensors_in((x, [y, None, (x,)], 3, "a"))] == [1, 2, 1]


def test_to_a_device_and_back(clean_sim):
    sim = torch.device("sim", 0)
    base = torch.arange(24.0).view(4, 6)
    for t in (base, base.t(), base[1:, ::2], base[0].expand(3, 6), base[0, 0], base[:0], base.t()[2:4, 1:]):
        there = move(t, sim)
        assert there.device.type == "sim"
        assert there.stride() == t.stride()
        same(move(there, CPU), t)


def test_overlapping_arguments_of_a_call_on_a_device_are_replayed_as_they_are(clean_sim):
    import shadowrun

    for device in ("cpu", "sim"):
        base = torch.arange(6.0).to(device)
        with shadowrun.compare("sim") as run:
            torch._foreach_add_([base[:3], base[3:]], [base[3:], base[:3]])
        assert run.findings() == [], run.findings()
        assert base.tolist() == [3, 5, 7, 6, 9, 12]


@pytest.mark.parametrize("target", ["sim", "cpu[threads=1]", "cpu[isa=default]"])
def test_elements_around_an_input_are_no_mismatch(clean_sim, target):
    """Copies have the elements of an input only: what lies around it on its storage cannot be compared elsewhere."""
    import shadowrun

    v = torch.arange(40.0)[8:28].view(4, 5)
    new = torch.full((3,), -1.0)
    with shadowrun.compare(target) as run:
        around = torch.as_strided_copy(v, (3,), (2,), 2), torch.as_strided_copy(v, (30,), (1,))
        torch.as_strided_scatter(v, new, (3,), (2,), 10)
        torch.as_strided_copy(v, (3,), (2,))
        torch.as_strided_scatter(v, new, (3,), (2,))
        torch.as_strided_copy(torch.arange(6.0), (3,), (1,), 2)
    assert [t.tolist() for t in around] == [[2, 4, 6], list(range(8, 38))]
    assert run.findings() == [], run.findings()
    compared = {row.op: (row.n_match, row.n_skipped) for row in run.summary()}
    assert compared["aten::as_strided_copy"] == (2, 2)
    assert compared["aten::as_strided_scatter"] == (1, 1)
