"""Inputs of cases: forms with the same values, what makes two cases one, and recorded calls read back."""

import pytest
import torch

import shadowrun
from shadowrun.studies.sweep import recorded_calls
from shadowrun.studies.sweep.case_programs import varied
from shadowrun.studies.sweep.cases import Part
from shadowrun.studies.sweep.inputs import (
    Sample,
    channels_last,
    copied,
    emptied,
    key,
    printed,
    strided,
    transposed,
    without_dims,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16])
def test_strided_has_the_same_values_in_another_form(shape, dtype):
    t = torch.randn(shape).to(dtype) if dtype is not torch.int64 else torch.randint(9, shape)
    s = strided(t)
    assert torch.equal(s, t)
    assert s.dtype is dtype
    assert not s.is_contiguous()
    assert s.stride() != t.stride()


def test_transposed_has_the_same_values_and_no_gaps():
    t = torch.randn(2, 3, 4)
    assert torch.equal(transposed(t), t)
    assert transposed(t).transpose(0, -1).is_contiguous()
    assert transposed(t[0, 0]) is t[0, 0] or transposed(t[0, 0]).is_contiguous()


def test_channels_last_changes_four_and_five_dimensions_only():
    t = torch.randn(2, 3, 4, 5)
    assert torch.equal(channels_last(t), t)
    assert channels_last(t).is_contiguous(memory_format=torch.channels_last)
    assert channels_last(torch.randn(2, 3, 4, 5, 6)).is_contiguous(memory_format=torch.channels_last_3d)
    flat = torch.randn(3, 4)
    assert channels_last(flat) is flat


def test_forms_that_change_nothing_make_no_case():
    flat, image = Sample(torch.randn(3, 4)), Sample(torch.randn(2, 3, 4, 5))
    assert [n for n, _ in varied([flat, image, flat], Part.CHANNELS_LAST)] == [1]
    assert [n for n, _ in varied([Sample(torch.tensor(1.0)), flat], Part.STRIDED)] == [1]
    assert [n for n, _ in varied([flat, image], Part.FORWARD)] == [0, 1]
    assert len(list(varied([flat] * 99, Part.EMPTY))) == 16


def test_without_dims_and_emptied():
    sample = Sample(torch.arange(6.0).reshape(3, 2), (torch.ones(3), torch.ones(2)), {"dim": 0})
    assert [t.shape for t in (sample.changed(without_dims).input, *sample.changed(without_dims).args)] == [()] * 3
    x, (same, other), kwargs = emptied(sample)
    assert (x.shape, same.shape, other.shape, kwargs) == ((0, 2), (0,), (2,), {"dim": 0})
    assert emptied(Sample(torch.ones(()))) is None


def test_copies_keep_layout_identity_and_gradients():
    t = torch.randn(4, 4)[:, ::2].requires_grad_()
    x, (again, number), kwargs = copied(Sample(t, (t, 3), {"device": "cpu", "dim": (0, 1)}), CPU, grad=True)
    assert x is again
    assert x is not t
    assert x.stride() == t.stride()
    assert x.requires_grad
    assert torch.equal(x, t)
    assert kwargs == {"device": CPU, "dim": (0, 1)}
    assert number == 3
    assert not copied(Sample(t), CPU, grad=False)[0].requires_grad


def test_what_makes_two_samples_one_case():
    def same(a, b):
        return key(Sample(a)) == key(Sample(b))

    assert same(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    assert not same(torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")]))
    assert not same(torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("inf")]))
    assert not same(torch.tensor([1.0, 2.0]), torch.tensor([1.0, -2.0]))
    assert not same(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
    assert not same(torch.tensor([1, 2]), torch.tensor([1, 1]))  # as an index, another case
    assert not same(torch.ones(2, 3), torch.ones(3, 2).t())
    assert not same(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert key(Sample(torch.ones(2), (1,))) != key(Sample(torch.ones(2), (True,)))
    assert key(Sample(torch.ones(2), (), {"p": 1})) != key(Sample(torch.ones(2), (), {"p": 2}))


def test_printed():
    sample = Sample([torch.ones(2, 3)], (1, None), {"mode": "mean"})
    assert printed(sample) == "[f32[2, 3]], 1, None, mode='mean'"


def test_recorded_calls_are_read_back(tmp_path):
    """What a run recorded is made again: the same operators with inputs of the same form."""
    file = tmp_path / "run.shadowrun"
    with shadowrun.compare("cpu[threads=1]", file=file):
        x = torch.randn(4, 6)
        torch.nn.functional.embedding(torch.tensor([[1, 2], [0, 3]]), x)
        torch.cat([x, x], 1).sum(dim=[0], dtype=torch.float64)
        x.to(torch.bfloat16).clamp_(min=-0.5, max=float("inf"))
        torch.nn.functional.gelu(x, approximate="tanh")
        torch.ones(3, device="cpu").add(2, alpha=3)
    calls = recorded_calls.read_calls(file)
    assert ("aten::gelu", "float32") in calls
    assert ("aten::clamp_", "bfloat16") in calls
    n = 0
    for (op, _), texts in calls.items():
        for text in texts:
            again = recorded_calls.sample(op, text, seed=0)
            assert printed(Sample(again.args[0], again.args[1:], again.kwargs)) == _as_printed(text), op
            recorded_calls.function(op)(None, *again.args, **again.kwargs)  # it runs
            n += 1
    assert n >= 6


def _as_printed(text):
    """The recorder writes devices and dtypes by `str`; here they are objects."""
    return text.replace("device=cpu", "device=device(type='cpu')")


@pytest.mark.parametrize("text", ["[f32[2], … 3 more]", "Generator", "f32[2], 'abc", "<object>"])
def test_what_has_no_text_is_told(text):
    with pytest.raises(recorded_calls.UnreadableCall):
        recorded_calls.sample("aten::cat", text, seed=0)


def test_recorded_values_are_valid_indices():
    again = recorded_calls.sample("aten::embedding", "f32[2, 9], i64[3, 4]", seed=0)
    assert again.args[1].max() < 2
    assert again.args[1].min() >= 0


def test_an_operator_that_is_not_here():
    with pytest.raises(recorded_calls.UnreadableCall, match="aten::nothing"):
        recorded_calls.function("aten::nothing.at_all")


def test_more_dimensions_than_torch_computes_with():
    many, more = torch.ones((1,) * 66), torch.full((1,) * 66, -1.0)
    assert key(Sample(many)) == key(Sample(many.clone()))
    assert key(Sample(many)) != key(Sample(more))
    assert printed(Sample(many)).startswith("f32[1, 1")
