"""How small a systematic error is found: a kernel that is right but for a factor 1 + e, and the least e it is told by.

python -m tests.ground_truth.sensitivity [--row TEXT] [--calls N]

The kernel computes in float64, multiplies by 1 + e and rounds once; e is found by bisection to 15 %. Beside it, how
far right kernels are off by norm: torch's own, and the same sum in blocks or in another order. With --calls, that many
calls of one signature are judged one after another, and any of them may tell.
"""

import argparse
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from shadowrun.judge.judge import Judge
from shadowrun.types import Status
from tests.case_kit import make_case

aten = torch.ops.aten
SMALLEST, GREATEST, STEP = 1e-9, 0.3, 1.15


def normal(*shape, dtype=torch.float32, positive=False):
    """Random values; positive ones are uniform."""
    return (torch.rand(*shape) if positive else torch.randn(*shape)).to(dtype)


def wide(value):
    """The same in float64."""
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def in_blocks(a, b, k=32):
    """A product by blocks in float32, rounded once."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for i in range(0, a.shape[1], k):
        total = total + a[:, i : i + k].float() @ b[i : i + k].float()
    return total.to(a.dtype)


def one_by_one(a, b):
    """A product whose terms are added one after the other."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for i in range(a.shape[1]):
        total = total + a[:, i : i + 1].float() * b[i : i + 1].float()
    return total.to(a.dtype)


def in_turn(x, dim):
    """A sum over one dimension in float32, one term after the other (torch's own cumsum adds in float64)."""
    return torch.from_numpy(np.add.accumulate(x.float().numpy(), axis=dim).take(-1, axis=dim))


def lanes(x, n):
    """A sum by n lanes, each one term after the other."""
    return in_turn(torch.nn.functional.pad(x, (0, -x.numel() % n)).view(-1, n), 0).sum().to(x.dtype)


def softmax(x, dim, _half):
    """By powers of two and a reciprocal."""
    e = torch.exp2((x.float() - x.float().amax(dim, keepdim=True)) * 1.4426950408889634)
    return (e * (1 / e.sum(dim, keepdim=True))).to(x.dtype)


def layer_norm(x, _shape, w, b, eps):
    """By the sum of squares."""
    mean = x.mean(-1, keepdim=True)
    rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) - mean * mean + eps)
    return (x * rstd - mean * rstd) * w + b, mean, rstd


def layer_norm_one_by_one(x, _shape, w, b, eps):
    """Its sums term after term, and a root that is one unit off."""
    mean = in_turn(x, -1).unsqueeze(-1) / x.shape[-1]
    rstd = torch.rsqrt(in_turn((x - mean) ** 2, -1).unsqueeze(-1) / x.shape[-1] + eps) * (1 + 2**-23)
    return (x - mean) * rstd * w + b, mean, rstd


def attention_backward(q, k, v):
    """Arguments of the gradient of attention on the CPU."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return torch.randn(out.shape).to(out.dtype), q, k, v, out, lse, 0.0, False


@dataclass(frozen=True)
class Row:
    """An operator, what makes its arguments, and other right kernels."""

    op: Any
    make: Any
    others: tuple = field(default=())


_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ROWS = {
    **{
        f"mm {str(dtype)[6:]} K={k}, {sign}": Row(
            aten.mm.default,
            lambda k=k, sign=sign, dtype=dtype: (
                normal(64, k, dtype=dtype, positive=sign == "positive"),
                normal(k, 64, dtype=dtype, positive=sign == "positive"),
            ),
            (in_blocks, one_by_one),
        )
        for dtype, signs in ((torch.float32, ("any sign", "positive")), (torch.bfloat16, ("any sign",)))
        for k in (128, 4096)
        for sign in signs
    },
    "softmax float32 [64,256]": Row(aten._softmax.default, lambda: (normal(64, 256), -1, False), (softmax,)),
    "layer_norm float32 [64,256]": Row(
        aten.native_layer_norm.default,
        lambda: (normal(64, 256), [256], normal(256), normal(256), 1e-5),
        (layer_norm, layer_norm_one_by_one),
    ),
    **{
        f"sum float32 1e6, {sign}": Row(
            aten.sum.default,
            lambda sign=sign: (normal(1000000, positive=sign == "positive"),),
            (lambda x: lanes(x, 8), lambda x: lanes(x, 1024)),
        )
        for sign in ("any sign", "positive")
    },
    "conv2d float32 16 channels, 3x3": Row(
        aten.convolution.default,
        lambda: (normal(4, 16, 20, 20), normal(16, 16, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
    "softmax float16 [64,256]": Row(
        aten._softmax.default, lambda: (normal(64, 256, dtype=torch.float16), -1, False), (softmax,)
    ),
    "gelu bfloat16": Row(aten.gelu.default, lambda: (normal(64, 256, dtype=torch.bfloat16),)),
    "silu float16": Row(aten.silu.default, lambda: (normal(64, 256, dtype=torch.float16),)),
    "var bfloat16 [256,64]": Row(aten.var.dim, lambda: (normal(256, 64, dtype=torch.bfloat16), [1])),
    "group norm bfloat16 [4,16,12,12]": Row(
        aten.native_group_norm.default,
        lambda: (
            *(normal(*shape, dtype=torch.bfloat16) for shape in ((4, 16, 12, 12), (16,), (16,))),
            *(4, 16, 144, 4, 1e-5),
        ),
    ),
    "attention backward bfloat16": Row(
        _BACKWARD, lambda: attention_backward(*(normal(2, 2, 64, 32, dtype=torch.bfloat16) for _ in range(3)))
    ),
}


def exact(op, args):
    """All results in float64."""
    out = op(*map(wide, args))
    return out if isinstance(out, tuple) else (out,)


def off_by(op, e):
    """The right kernel times 1 + e."""

    def run(*args):
        like = op(*args)
        several = isinstance(like, tuple)
        values = tuple(
            (v * (1 + e)).to(r.dtype) if r.is_floating_point() else r
            for v, r in zip(exact(op, args), like if several else (like,), strict=True)
        )
        return values if several else values[0]

    return run


def found(row, e, calls, seed=0):
    """Whether any of some calls is called wrong."""
    judge = Judge(hypotheses=False)
    for i in range(calls):
        torch.manual_seed(seed + i)
        if judge(make_case(row.op, off_by(row.op, e), *row.make()))[0].status is Status.MISMATCH:
            return True
    return False


def least(row, calls=1):
    """The least e that is found; infinite if not even the greatest is, 0 if the right kernel itself is called wrong."""
    if found(row, 0.0, calls):
        return 0.0
    low, high = math.log(SMALLEST), math.log(GREATEST)
    if not found(row, GREATEST, calls):
        return math.inf
    while high - low > math.log(STEP):
        middle = (low + high) / 2
        low, high = (low, middle) if found(row, math.exp(middle), calls) else (middle, high)
    return math.exp(high)


def right(row, seed=0):
    """How far right kernels are off by norm, relative to the result, at most."""
    torch.manual_seed(seed)
    args = row.make()
    truth = exact(row.op, args)[0]
    errors = []
    for kernel in (row.op, *row.others):
        out = kernel(*args)
        out = out[0] if isinstance(out, tuple) else out
        errors.append(float((out.double() - truth).norm() / truth.norm()))
    return max(errors)


def main(arguments=None):
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--row", default="", help="only rows whose name contains this")
    parser.add_argument("--calls", type=int, default=1)
    options = parser.parse_args(arguments)
    print("| operator | least e found | right, by norm | times |\n| --- | --- | --- | --- |")
    for name, row in ROWS.items():
        if options.row in name:
            e, own = least(row, options.calls), right(row)
            print(f"| {name} | {e:.1e} | {own:.1e} | {e / own:.1f} |", flush=True)


if __name__ == "__main__":
    main()
