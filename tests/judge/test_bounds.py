"""16-bit kernels that round on their way: right ones match, and what is wrong beyond that does not."""

import pytest
import torch

from shadowrun.judge.judge import Judge
from shadowrun.judge.rounding.bounds import has_one_stage, partial_sums
from shadowrun.types import Status
from tests.ground_truth.short_dtypes import one_thread

aten = torch.ops.aten
BF16, F16 = torch.bfloat16, torch.float16
short = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def backward_of_layer_norm(rows, n, dtype):
    x, w, b = normal(rows, n, dtype=dtype), normal(n, dtype=dtype), normal(n, dtype=dtype, seed=1)
    _, mean, rstd = aten.native_layer_norm.default(x, [n], w, b, 1e-5)
    return normal(rows, n, dtype=dtype, seed=2) + 0.5, x, [n], mean, rstd, w, b, [True] * 3


def convolution(k, dtype, *, transposed, n=4, c=8):
    x, w, b = normal(n, c, 16, 16, dtype=dtype), normal(c, c, k, k, dtype=dtype), normal(c, dtype=dtype)
    return x, w, b, [1, 1], [k // 2] * 2, [1, 1], transposed, [0, 0], 1


def backward_of_convolution(k, dtype, *, transposed=False):
    x, w, b, *rest = convolution(k, dtype, transposed=transposed)
    return torch.ones_like(x) + x.flip(0) / 4, x, w, [b.numel()], *rest, [True] * 3


def stored(rows):
    """Sum over the first dimension, each partial sum kept in the dtype of the rows."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


@short
@pytest.mark.parametrize("rows", [8, 64, 1024])
def test_gradients_of_a_norm_may_be_added_row_by_row(make_case, dtype, rows):
    op, args = aten.native_layer_norm_backward.default, backward_of_layer_norm(rows, 64, dtype)

    def kernel(grad, x, shape, mean, rstd, w, b, mask):
        first, *_ = op(grad, x, shape, mean, rstd, w, b, mask)
        normalised = ((x.float() - mean.float()) * rstd.float() * grad.float()).to(dtype)
        return first, stored(normalised), stored(grad)

    for target in (kernel, one_thread(op)):
        case = make_case(op, target, *args)
        assert [partial_sums(case, i) for i in range(3)] == [1, rows, rows]
        verdict, _ = Judge()(case)
        assert verdict.status is Status.MATCH, verdict

    def without_the_last_rows(*args):
        first, weight, bias = op(*args)
        return first, weight, bias - args[0][-rows // 4 :].float().sum(0).to(dtype)

    assert Judge()(make_case(op, without_the_last_rows, *args))[0].status is Status.MISMATCH


@short
@pytest.mark.parametrize("k", [3, 7])
@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_may_add_the_elements_of_their_kernel_in_memory(make_case, dtype, k, transposed):
    for op, args in (
        (aten.convolution.default, convolution(k, dtype, transposed=transposed)),
        (aten.convolution_backward.default, backward_of_convolution(k, dtype, transposed=transposed)),
    ):
        case = make_case(op, one_thread(op), *args)
        backward = op is aten.convolution_backward.default
        assert partial_sums(case, 0) == (k * k if transposed != backward else 1)
        assert not backward or (partial_sums(case, 1), partial_sums(case, 2)) == (4, 1)
        verdict, _ = Judge()(case)
        assert verdict.status is Status.MATCH, verdict


def test_a_convolution_that_adds_all_its_terms_in_16_bits_is_coarse(make_case):
    args = convolution(3, BF16, transposed=False, c=32)

    def coarse(x, w, b, *_):
        columns = torch.nn.functional.unfold(x.float(), 3, padding=1).to(BF16)  # samples, terms, places
        flat = w.reshape(w.shape[0], -1)
        products = columns.permute(1, 0, 2).unsqueeze(2) * flat.T[:, None, :, None]
        return (stored(products) + b[:, None]).reshape(x.shape)

    verdict, _ = Judge()(make_case(aten.convolution.default, coarse, *args))
    assert verdict.status is Status.MISMATCH


@short
def test_saved_statistics_in_float32_do_not_make_16_bit_inputs_exact(make_case, dtype):
    """The gradient of attention takes a float32 logsumexp; its probabilities may be rounded to 16 bits all the same."""
    q, k, v, grad = (normal(2, 3, 8, 16, dtype=dtype, seed=i) for i in range(4))
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)
    assert logsumexp.dtype is torch.float32
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def in_steps(grad, q, k, v, *_):
        scale = q.shape[-1] ** -0.5
        p = ((q * scale) @ k.mT).softmax(-1)
        scores = aten._softmax_backward_data(grad @ v.mT, p, -1, dtype)
        return scores @ k * scale, scores.mT @ (q * scale), p.mT @ grad

    args = (grad, q, k, v, out, logsumexp, 0.0, False)
    like = op(*args)

    def target(*args):
        return tuple(torch.empty_like(e).copy_(t) for e, t in zip(like, in_steps(*args), strict=True))

    verdict, diffs = Judge()(make_case(op, target, *args))
    assert verdict.status is Status.MATCH, verdict
    assert diffs
    off = lambda *a: (op(*a)[0] * 1.1, *op(*a)[1:])  # noqa: E731
    assert Judge()(make_case(op, off, *args))[0].status is Status.MISMATCH


def test_indices_tell_how_much_is_added_in_memory(make_case):
    index, values = torch.tensor([0, 2, 2, 2, 1]), normal(5, 4, dtype=BF16)
    zeros = torch.zeros(3, 4, dtype=BF16)
    calls = (
        (aten.index_add.default, zeros, 0, index, values),
        (aten.index_put.default, zeros, [index], values, True),
        (aten.scatter_add.default, zeros, 0, index[:, None].expand(5, 1), values[:, :1]),
        (aten.embedding_dense_backward.default, values, index, 3, -1, False),
    )
    for op, *args in calls:
        case = make_case(op, op, *args)
        assert partial_sums(case, 0) == 3, op
        assert not has_one_stage(case)
    two = make_case(aten.index_put.default, aten.index_put.default, zeros, [index, index % 2], values[:, 0], True)
    assert partial_sums(two, 0) == 3
    mask = torch.tensor([True, False, True])
    masked = make_case(aten.index_put.default, aten.index_put.default, zeros, [mask], values[:2], True)
    assert partial_sums(masked, 0) == 1


def test_what_has_one_stage(make_case):
    a = normal(4, 4, dtype=BF16)
    for op, args in ((aten.mm.default, (a, a)), (aten.add.Tensor, (a, a)), (aten.exp.default, (a,))):
        assert has_one_stage(make_case(op, op, *args)), op
    for op, args in (
        (aten.convolution.default, convolution(3, BF16, transposed=False)),
        (aten.mish.default, (a,)),
        (aten.native_layer_norm_backward.default, backward_of_layer_norm(4, 4, BF16)),
    ):
        assert not has_one_stage(make_case(op, op, *args)), op
