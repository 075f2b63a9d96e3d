"""A CPU-only kernel in the program: the user's API call is what the target is asked for."""

import pytest
import torch
from torch.nn import functional as F

import shadowrun
from shadowrun import Status
from shadowrun.operators.cpu_only_ops import EQUIVALENTS
from shadowrun.operators.facts import facts

OPS = list(EQUIVALENTS)


def attend(dtype=torch.float32, causal=False, mask=False, scale=None):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 8, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    attn_mask = torch.randn(8, 8, dtype=dtype) if mask else None
    out = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=causal, scale=scale)
    (out * torch.randn(out.shape, dtype=dtype)).sum().backward()  # a plain sum's gradient cancels to nothing
    return out, q.grad, k.grad, v.grad


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"mask": True},
        {"scale": 0.3},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_attention_is_compared_forward_and_backward(clean_sim, options):
    plain = attend(**options)
    with shadowrun.compare("sim") as run:
        compared = attend(**options)
    assert all(torch.equal(a, b) for a, b in zip(compared, plain, strict=True))
    records = list(run.records(op="*attention*"))
    assert [r.call.op for r in records] == OPS
    assert {r.verdict.status for r in records} == {Status.MATCH}, [r.verdict for r in records]
    assert [f for f in run.findings() if f.kind != "slow"] == []


def test_wrong_values_of_the_target_are_found(clean_sim, monkeypatch):
    """The target computes attention by softmax and products: with one of them wrong, so is attention."""
    with clean_sim.flaws("softmax-error"), shadowrun.compare("sim") as run:
        attend()
    assert "mismatch" in {f.kind for f in run.findings() if "attention" in f.op}


def test_the_stand_ins_give_what_the_kernels_give():
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 5, 8) for _ in range(4))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, logsumexp = kernel(q, k, v, 0.0, True)
    (stand_in,) = EQUIVALENTS[OPS[0]](q, k, v, 0.0, True)
    torch.testing.assert_close(stand_in, out)
    expected = backward(grad, q, k, v, out, logsumexp, 0.0, True)
    actual = EQUIVALENTS[OPS[1]](grad, q, k, v, out, logsumexp, 0.0, True)
    torch.testing.assert_close(tuple(actual), expected)
    assert not q.requires_grad


def test_an_exception_in_a_stand_in_is_the_target_s():
    with pytest.raises(RuntimeError):
        EQUIVALENTS[OPS[0]](torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 5), torch.ones(1, 2, 3, 4))


def test_stand_ins_have_the_parameters_of_their_operators():
    import inspect

    for name, stand_in in EQUIVALENTS.items():
        schema = getattr(torch.ops.aten, name.split("::")[1]).default._schema
        assert list(inspect.signature(stand_in).parameters) == [a.name for a in schema.arguments]


@pytest.mark.parametrize(
    ("name", "specific"),
    [
        (OPS[0], True),
        ("aten::mkldnn_rnn_layer", True),
        ("aten::cudnn_batch_norm", True),
        ("mkldnn::_linear_pointwise", True),
        ("aten::add.Tensor", False),
        ("aten::native_batch_norm", False),
        ("aten::scaled_dot_product_attention", False),
    ],
)
def test_operators_of_one_kind_of_device(name, specific):
    assert facts(name).device_specific is specific


def test_a_device_s_own_operator_without_a_stand_in_is_unverified(clean_sim):
    x = torch.randn(3, 2, 4)
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(4, 5)
    with shadowrun.compare("sim") as run, torch.no_grad():
        lstm(x)
    kinds = {(r.call.op, r.verdict.status) for r in run.records() if facts(r.call.op).device_specific}
    assert {s for _, s in kinds} <= {Status.UNVERIFIED, Status.MATCH}
    assert "unsupported" not in {f.kind for f in run.findings()}
