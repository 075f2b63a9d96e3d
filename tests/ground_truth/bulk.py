"""The remembered bounds against the full ladder: both judge the same calls, which must get the same verdicts.

python -m tests.ground_truth.bulk [--calls N] [--seed N] [--op TEXT]

Calls of plain operators on new data, whose results are changed as other devices and faults change them: units in the
last place in some or all elements, zeros that become subnormal numbers, NaN, infinities, signs of zeros, factors that
no element shows; and calls of products on rounded inputs. One judge remembers what it said of each context, the other
climbs the ladder each time, and asks the oracle on each norm, softmax and sum in 16 bits that is not within a few units
in the last place. 1 if any status, cause or explanation differs.
"""

import argparse
import collections
import re
import sys
import time
from unittest import mock

import torch

from shadowrun.judge.cause.hypotheses import CERTAIN
from shadowrun.judge.cause.known_roundings import KnownRoundings
from shadowrun.judge.judge import Judge
from shadowrun.judge.remembered_bounds import RememberedBounds
from shadowrun.judge.rounding import closeness
from shadowrun.types import Cause
from tests.case_kit import make_case

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _contexts(generator):
    """Pairs of an operator and a function that gives new arguments for it."""

    def normal(*shape, dtype, zeros=0.2):
        x = torch.randn(*shape, generator=generator)
        # Zeros come from relu, dropout, padding and one-hot gradients.
        x = torch.where(torch.rand(*shape, generator=generator) < zeros, 0.0, x)
        return x.to(dtype)

    for dtype in FLOATS:
        for shape in ((5,), (8, 24), (64, 16)):

            def x(shape=shape, dtype=dtype, zeros=0.2):
                return normal(*shape, dtype=dtype, zeros=zeros)

            n = shape[-1]
            yield aten.add.Tensor, lambda x=x: (x(), x())
            yield aten.sub.Tensor, lambda x=x: (x(), x())
            yield aten.mul.Tensor, lambda x=x: (x(), x())
            yield aten.div.Tensor, lambda x=x: (x(), x(zeros=0.0))
            yield aten.sqrt.default, lambda x=x: (x().abs(),)
            yield aten.exp.default, lambda x=x: (x(),)
            yield aten.tanh.default, lambda x=x: (x(),)
            yield aten.sigmoid.default, lambda x=x: (x(),)
            yield aten.gelu.default, lambda x=x: (x(),)
            yield aten.silu_backward.default, lambda x=x: (x(), x())
            yield aten.tanh_backward.default, lambda x=x: (x(), x().tanh())
            yield aten.sigmoid_backward.default, lambda x=x: (x(), x().sigmoid())
            yield aten.addcmul.default, lambda x=x: (x(), x(), x())
            yield aten.lerp.Scalar, lambda x=x: (x(), x(), 0.1)
            yield aten.mul_.Tensor, lambda x=x: (x(), x())
            yield aten.addcdiv_.default, lambda x=x: (x(), x(), x().abs() + 1)
            yield aten._softmax.default, lambda x=x: (x(), -1, False)
            yield aten._log_softmax.default, lambda x=x: (x(), -1, False)
            yield aten.sum.dim_IntList, lambda x=x: (x(), [0], True)
            yield aten.mean.dim, lambda x=x: (x(), [-1])
            if len(shape) == 2:
                weight = (n, 12)
                yield aten.mm.default, lambda x=x, w=weight, t=dtype: (x(), normal(*w, dtype=t))
                yield (
                    aten.addmm.default,
                    lambda x=x, w=weight, t=dtype: (normal(w[1], dtype=t), x(), normal(*w, dtype=t)),
                )
                yield (
                    aten.native_layer_norm.default,
                    lambda x=x, n=n, t=dtype: (x(), [n], normal(n, dtype=t), normal(n, dtype=t), 1e-5),
                )
                yield aten._safe_softmax.default, lambda x=x: (x(), -1)

                def gradient(x=x, n=n, t=dtype):
                    given, weight = x(), normal(n, dtype=t)
                    _, mean, rstd = aten.native_layer_norm(given, [n], weight, weight, 1e-5)
                    return x(), given, [n], mean, rstd, weight, weight, [True] * 3

                yield aten.native_layer_norm_backward.default, gradient
                for softmax, name in ((torch.softmax, "_softmax"), (torch.log_softmax, "_log_softmax")):
                    backward = getattr(aten, f"{name}_backward_data").default
                    yield backward, lambda x=x, f=softmax, t=dtype: (x(), f(x(), -1), -1, t)
                yield (
                    aten.embedding_dense_backward.default,
                    lambda x=x, s=shape: (x(), torch.randint(0, 9, (s[0],), generator=generator), 9, -1, False),
                )

        yield from _norms_of_images(lambda *shape, t=dtype: normal(*shape, dtype=t, zeros=0.1))

        def lists(dtype=dtype, n=3):
            return [[normal(*shape, dtype=dtype, zeros=0.1) for shape in ((40,), (8, 24), (5,))] for _ in range(n)]

        yield aten._foreach_add.List, lambda f=lists: (*f(n=2),)
        yield aten._foreach_addcmul.Scalar, lambda f=lists: (*f(), 0.1)
        yield aten._foreach_lerp.Scalar, lambda f=lists: (*f(n=2), 0.1)


def _norms_of_images(normal):
    """Batch and group norms, and their gradients."""
    shape, sizes = (6, 4, 5, 5), (6, 4, 25, 2)

    def of_channels(n):
        return [normal(4) for _ in range(n)]

    def batch(training):
        return normal(*shape), *of_channels(3), normal(4).abs() + 1, training, 0.1, 1e-5

    def batch_gradient():
        x, w, _, means, variances, *_ = batch(True)
        _, mean, rstd = aten.native_batch_norm(x, w, None, means, variances, True, 0.1, 1e-5)
        return normal(*shape), x, w, means, variances, mean, rstd, True, 1e-5, [True] * 3

    def group_gradient():
        x, w = normal(*shape), normal(4)
        _, mean, rstd = aten.native_group_norm(x, w, None, *sizes, 1e-5)
        return normal(*shape), x, mean, rstd, w, *sizes, [True] * 3

    for training in (True, False):
        yield aten.native_batch_norm.default, lambda t=training: batch(t)
    yield aten.native_batch_norm_backward.default, batch_gradient
    yield aten.native_group_norm.default, lambda: (normal(*shape), *of_channels(2), *sizes, 1e-5)
    yield aten.native_group_norm_backward.default, group_gradient


def _products(generator):
    """The same for products and convolutions, whose inputs a device may round."""

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    # The last two are large enough for a sketch, and so are the last convolutions.
    for m, k, n in ((16, 24, 12), (40, 200, 9), (6, 1200, 64), (96, 70, 33), (1, 300, 160)):
        yield aten.mm.default, lambda m=m, k=k, n=n: (normal(m, k), normal(k, n))
        yield aten.mm.default, lambda m=m, k=k, n=n: (normal(m, k).abs(), normal(k, n).abs())
        yield aten.addmm.default, lambda m=m, k=k, n=n: (normal(n), normal(m, k), normal(k, n))
        yield aten.bmm.default, lambda m=m, k=k, n=n: (normal(3, m, k), normal(3, k, n))
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    yield aten.convolution.default, lambda: (normal(2, 3, 8, 8), normal(5, 3, 3, 3), normal(5), *settings)
    for bias in (None, 12):

        def x_and_weight(bias=bias):
            vectors = [None if bias is None else normal(bias)]
            return normal(3, 10, 9, 9), normal(12, 10, 3, 3), *vectors, *settings

        def gradient(bias=bias):
            # As behind a batch norm, whose gradient has a mean of 0.
            g = normal(3, 12, 9, 9)
            g -= g.mean((0, 2, 3), keepdim=True)
            sizes = None if bias is None else [bias]
            return g, normal(3, 10, 9, 9), normal(12, 10, 3, 3), sizes, *settings, [True, True, bias is not None]

        yield aten.convolution.default, x_and_weight
        yield aten.convolution_backward.default, gradient


def _ulps(t, n, where):
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return torch.where(where, (t.view(bits) + n).view(t.dtype), t)


def _change(t, kind, generator):
    """A result as another device, or a faulty one, would return it."""
    if not t.numel():
        return t
    t = t.clone()
    flat = t.view(-1)
    some = torch.rand(t.shape, generator=generator) < 0.3
    everywhere = torch.ones_like(some)
    place = int(torch.randint(0, flat.numel(), (), generator=generator))
    eps = torch.finfo(t.dtype).eps
    match kind:
        case "equal":
            return t
        case "flip":  # as the benchmark's device
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
            return (t.view(bits) ^ 1).view(t.dtype)
        case "some 1" | "some 2" | "some 4" | "some 9":
            return _ulps(t, int(kind[5:]), some)
        case "up 1" | "up 3" | "up 4" | "up 40":
            return _ulps(t, int(kind[3:]), everywhere)
        case "noise":
            return t * (1 + eps * (torch.rand(t.shape, generator=generator) - 0.5).to(t.dtype) * 6)
        case "near" | "far":
            # As the errors of a norm: of the size of the row, also where an element is near zero.
            k = {"near": 2, "far": 12}[kind] * float(torch.rand((), generator=generator))
            level = t.double().square().mean(-1, keepdim=True).sqrt() if t.dim() else t.double().abs()
            return (t + k * eps * level * torch.randn(t.shape, generator=generator)).to(t.dtype)
        case "factor":
            return t * (1 + 3 * eps)
        case "one":
            flat[place] += flat[place] * 0.01 + 1e-3
        case "nan" | "inf":
            flat[place] = float(kind)
        case "payload":
            flat[place] = float("nan")
        case "signs of zeros":
            return torch.where(t == 0, -t, t)
        case "zeros":
            return torch.where((t == 0) & some, torch.finfo(t.dtype).smallest_normal * torch.finfo(t.dtype).eps, t)
        case "flushed":
            return torch.where(t.abs() < torch.finfo(t.dtype).smallest_normal, t * 0, t)
        case "wrong zeros":
            return torch.where((t == 0) & some, torch.tensor(1e-30, dtype=t.dtype), t)
    return t


ROUNDINGS = {
    "bf16": lambda t: t.to(torch.bfloat16).float(),
    "tf32": lambda t: ((t.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32),
}
KINDS = (
    *("flip",) * 6, *("some 1",) * 3, "some 2", "some 4", "some 9", "up 1", "up 3", "up 4", "up 40", "noise", "noise",
    "near", "near", "far", "far",
    "factor", "one", "nan", "inf", "payload", "signs of zeros", "zeros", "zeros", "flushed", "wrong zeros", "equal",
)  # fmt: skip


def cases(seed, op=""):
    """Endless: the number of a context, and a call of it whose results differ in some way."""
    generator = torch.Generator().manual_seed(seed)
    contexts = [(f, make, KINDS) for f, make in _contexts(generator) if op in f.name()]
    for name in ROUNDINGS:
        # Nearly always of one kind, as on such a device; and what must not be taken for it.
        kinds = (*(name,) * 20, "flip", "one", "nan", "up 40", *(f"{name} and one",) * 2, f"{name} and nan")
        contexts += [(f, make, kinds) for f, make in _products(generator) if op in f.name()]
    while True:
        for number, (func, make, kinds) in enumerate(contexts):
            kind = kinds[int(torch.randint(0, len(kinds), (), generator=generator))]

            state = int(torch.randint(0, 1 << 30, (), generator=generator))

            def implementation(*args, func=func, kind=kind, state=state):
                own = torch.Generator().manual_seed(state)  # a second run of the target gives the same
                rounding, _, change = kind.partition(" and ")
                if rounding in ROUNDINGS:
                    kind = change or "equal"
                    args = [ROUNDINGS[rounding](a) if isinstance(a, torch.Tensor) and a.dim() > 1 else a for a in args]
                out = func(*args)
                results = tuple(out) if isinstance(out, (tuple, list)) else (out,)
                changed = tuple(
                    _change(r, kind, own) if r is not None and r.is_floating_point() else r for r in results
                )
                if func._schema.is_mutable:
                    args[0].copy_(changed[0])
                    return args[0]
                return type(out)(changed) if isinstance(out, (tuple, list)) else changed[0]

            yield number, kind, make_case(func, implementation, *make())


def compare(n, seed=0, op=""):
    """Judge so many calls both ways.

    Returns:
        How many were judged by the remembered bounds alone, and the calls that got other verdicts.
    """
    full, other, remembered, roundings = Judge(), Judge(), RememberedBounds(None), KnownRoundings()
    counts, wrong = collections.Counter(), []
    for _, (number, kind, case) in zip(range(n), cases(seed, op), strict=False):
        with (
            mock.patch.object(closeness, "has_row_sizes", return_value=False),
            mock.patch.object(closeness.ClosenessCheck, "_coarse", return_value=None),
        ):
            expected, _ = full(case)
        bounds = remembered.by_context.get(number)
        close = None if bounds is None else bounds.judge(case.actual, case.expected)
        known = None if close is not None else roundings.judge(number, case)
        if close is not None:
            counts["by remembered bounds"] += 1
        elif known is not None:
            close = known
            counts["by a known rounding"] += 1
        else:
            close = other(case, bounds)
            remembered.learn(number, case, *close)
            roundings.learn(number, case, *close)
            counts["climbed the ladder"] += 1
        counts[f"{expected.status}"] += 1
        actual = close[0]
        same = (actual.status, actual.cause, actual.explanation) == (
            expected.status,
            expected.cause,
            expected.explanation,
        )
        # Where a guess by the size of the errors and the rounding both hold, the calls before decide which of them the
        # ladder names.
        if not same and known is not None and _is_a_guess(actual, expected):
            counts["a rounding where the ladder guesses"] += 1
            continue
        # Only what the oracle added to the evidence is missing.
        evidence = re.sub(r", within (1 ULP and )?[\d.]+ units of .*", "", actual.evidence)
        if not same or (actual.cause is Cause.ROUNDING and not expected.evidence.startswith(evidence)):
            wrong.append((case.op, kind, [str(v.dtype) for v in case.expected], actual, expected))
    return counts, wrong


def _is_a_guess(actual, expected):
    return (actual.status, actual.cause) == (expected.status, expected.cause) and expected.confidence < CERTAIN


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", default="", help="only operators with this in their names")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    counts, wrong = compare(options.calls, options.seed, options.op)
    for found in wrong[:20]:
        print(*found)
    print(f"{options.calls} calls in {time.monotonic() - began:.0f} s: {dict(counts)}; {len(wrong)} other verdicts")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
