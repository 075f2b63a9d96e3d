"""Right implementations of 16-bit operators: how many of torch's own samples are called wrong, which should be none.

python -m tests.ground_truth.short_dtypes [--dtype bfloat16] [--way PATTERN] [--op TEXT] [--every N] [--samples N]

Each operator that a sample of `op_db` dispatches, forward and backward, is judged on its own, with every way of
computing it below as the target; so are some larger calls, since those samples are small. 1 if any is called wrong.
"""

import argparse
import collections
import contextlib
import fnmatch
import sys
import warnings

import torch
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from shadowrun.judge.judge import Judge
from shadowrun.types import Cause, Status
from tests.case_kit import make_case
from tests.transparency.cases import cases, operators

SHORT = (torch.bfloat16, torch.float16)
NAMES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
KNOWN = {
    ("aten::cosh", Cause.REFERENCE): "the CPU's vector kernel overflows early",
    ("aten::sinh", Cause.REFERENCE): "the CPU's vector kernel overflows early",
    ("aten::linalg_matrix_exp", Cause.REFERENCE): "NaN in 16 bits where float32 gives numbers around 10",
    ("aten::soft_margin_loss", Cause.REFERENCE): "its exponential overflows float16 where the loss is 12",
    ("aten::soft_margin_loss_backward", Cause.REFERENCE): "the same: NaN",
}
"""True bugs of the CPU: `test_real_platforms` and `test_short_dtypes` show them without shadowrun."""


def rounded_once(func):
    """The ideal device: everything in float32, and one rounding at the end."""
    if "nextafter" in func.name():
        return None  # The neighbour in float32 is another number.

    def wide(value):
        if isinstance(value, torch.Tensor):
            return value.float() if value.dtype in SHORT else value
        return torch.float32 if value in SHORT else value

    def run(*args, **kwargs):
        wide_args, wide_kwargs = tree_map(wide, (args, kwargs))
        out = func(*wide_args, **wide_kwargs)
        like = func(*tree_map(copied, args), **tree_map(copied, kwargs))
        for given, written in zip(_tensors((args, kwargs)), _tensors((wide_args, wide_kwargs)), strict=True):
            if given is not written:
                # An argument for results grows to their size.
                given.resize_(written.shape).copy_(written)
        return tree_map(lambda a, b: a.to(b.dtype) if isinstance(a, torch.Tensor) else a, out, like)

    return run


def one_thread(func):
    """torch's own kernels instead of oneDNN's, sums in one piece."""

    def run(*args, **kwargs):
        enabled, threads = torch.backends.mkldnn.enabled, torch.get_num_threads()
        torch._C._set_mkldnn_enabled(False)
        torch.set_num_threads(1)
        try:
            return func(*args, **kwargs)
        finally:
            torch._C._set_mkldnn_enabled(enabled)
            torch.set_num_threads(threads)

    return run


def in_steps(func):
    """torch's own decomposition into simpler operators, each of which rounds its result."""
    return decomposition_table.get(func)


WAYS = {"rounded once": rounded_once, "mkldnn off, one thread": one_thread, "in steps": in_steps}


def copied(value):
    """A copy of a tensor, anything else as it is."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _tensors(values):
    return [v for v in torch.utils._pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]


class Judging(TorchDispatchMode):
    """Judges each 16-bit operator that runs, by each way.

    Attributes:
        ways: Names of the ways.
        judged: How often the bits differed, by way.
        wrong: What was called wrong.
    """

    def __init__(self, ways):
        super().__init__()
        self.ways = ways
        self.judged = collections.Counter()
        self.wrong = []
        self.label = ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout is torch.strided for t in given)
        named = not func.is_view and not _NEVER & set(func.tags) and "empty" not in func.name()
        if named and plain and any(t.dtype in SHORT for t in given):
            self._judge(func, args, kwargs)
        return func(*args, **kwargs)

    def _judge(self, func, args, kwargs):
        for name in self.ways:
            target = WAYS[name](func)
            if target is None:
                continue
            try:
                state = torch.get_rng_state()
                case = make_case(func, target, *tree_map(copied, args), **tree_map(copied, kwargs))
                torch.set_rng_state(state)
            except Exception:  # a way that does not know this operator, or not in that dtype
                continue
            verdict, diffs = Judge()(case)
            self.judged[name] += any(d.n_different for d in diffs)
            # Only the values are asked for: these ways may give another layout.
            form = verdict.cause is Cause.METADATA
            if verdict.status is Status.MISMATCH and not form and (func.name(), verdict.cause) not in KNOWN:
                shapes = [(str(t.dtype).removeprefix("torch."), *t.shape) for t in _tensors((args, kwargs))]
                self.wrong.append(
                    f"{name}: {func.name()} {shapes} in {self.label}: {verdict.cause}, {verdict.evidence}"
                )


_NEVER = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}


def convolution(n, c, k, size, transposed, dtype):
    """A convolution with its gradients."""
    x = torch.randn(n, c, size, size, dtype=dtype, requires_grad=True)
    w = torch.randn(c, c, k, k, dtype=dtype, requires_grad=True)
    b = torch.randn(c, dtype=dtype, requires_grad=True)
    function = torch.nn.functional.conv_transpose2d if transposed else torch.nn.functional.conv2d
    return function(x, w, b, padding=k // 2)


def normalised(make, *shape, dtype):
    """A layer of statistics with its gradients, on shifted data."""
    x = (torch.randn(*shape) + 0.5).to(dtype).requires_grad_()
    return make.to(dtype)(x)


def attention(length, dtype, **kwargs):
    """Attention with its gradients."""
    q, k, v = (torch.randn(2, 2, length, 32, dtype=dtype, requires_grad=True) for _ in range(3))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, **kwargs)


def product(n, k, dtype, spread=torch.randn):
    """A matrix product with its gradients."""
    a, b = (spread(*s).to(dtype).requires_grad_() for s in ((n, k), (k, n)))
    return a @ b


LARGER = {
    **{
        f"convolution, batch {n}, {c} channels, {k} x {k}, {'transposed' if t else 'plain'}": (
            lambda dtype, n=n, c=c, k=k, t=t: convolution(n, c, k, 16, t, dtype)
        )
        for n, c, k in ((2, 8, 3), (16, 4, 3), (2, 16, 7), (1, 32, 5), (64, 2, 3))
        for t in (False, True)
    },
    **{
        f"layer_norm of {rows} x {n}": lambda dtype, rows=rows, n=n: normalised(
            torch.nn.LayerNorm(n), rows, n, dtype=dtype
        )
        for rows, n in ((8, 64), (64, 64), (1024, 32), (256, 512))
    },
    "group_norm": lambda dtype: normalised(torch.nn.GroupNorm(4, 16), 16, 16, 12, 12, dtype=dtype),
    "batch_norm": lambda dtype: normalised(torch.nn.BatchNorm2d(8), 16, 8, 12, 12, dtype=dtype),
    "rms_norm": lambda dtype: normalised(torch.nn.RMSNorm(64), 256, 64, dtype=dtype),
    "attention": lambda dtype: attention(50, dtype),
    "attention, causal": lambda dtype: attention(128, dtype, is_causal=True),
    **{f"product of {k}": lambda dtype, k=k: product(24, k, dtype) for k in (7, 63, 64, 300, 4096)},
    **{f"product of {k}, positive": lambda dtype, k=k: product(24, k, dtype, torch.rand) for k in (63, 300, 4096)},
    "sum": lambda dtype: torch.rand(40, 3000).to(dtype).requires_grad_().sum(1),
    "softmax": lambda dtype: torch.randn(40, 300).to(dtype).requires_grad_().softmax(1),
    "log_softmax": lambda dtype: torch.randn(40, 300).to(dtype).requires_grad_().log_softmax(1),
    "embedding": lambda dtype: torch.nn.functional.embedding(
        torch.randint(0, 10, (500,)), torch.randn(10, 32).to(dtype).requires_grad_()
    ),
}
"""Calls with sums longer than those of `op_db`."""


def judge_samples(mode, dtype, names, samples):
    """All samples of some entries of `op_db`, forward and backward."""
    found = operators("op", dtype)
    for name in names:
        mode.label = name
        for case in cases("op", found[name], dtype, samples):
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _, run = case.prepare()
                with mode:
                    run({})
        yield name


def judge_larger(mode, dtype, names):
    """The larger calls."""
    for name in names:
        mode.label = name
        torch.manual_seed(0)
        with mode:
            out = LARGER[name](NAMES[dtype])
            out.backward(torch.randn(out.shape).to(out.dtype))
        yield name


def main(arguments=None):
    """Run, print what was called wrong, and give the number of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--way", default="*", help="pattern of the ways")
    parser.add_argument("--op", default="", help="only entries whose name contains this")
    parser.add_argument("--every", type=int, default=1, help="only every n-th entry")
    parser.add_argument("--first", type=int, default=0, help="and begin with this one")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--larger-only", action="store_true")
    options = parser.parse_args(arguments)
    ways = [way for way in WAYS if fnmatch.fnmatch(way, options.way)]
    wrong = 0
    for dtype in options.dtype:
        mode = Judging(ways)
        larger = [name for name in LARGER if options.op in name]
        names = [n for n in operators("op", dtype) if options.op in n][options.first :: options.every]
        shown = 0
        for step in (
            judge_larger(mode, dtype, larger),
            judge_samples(mode, dtype, [] if options.larger_only else names, options.samples),
        ):
            for _ in step:
                for line in mode.wrong[shown:]:
                    print(line, flush=True)
                shown = len(mode.wrong)
        wrong += shown
        print(f"{dtype}: {dict(mode.judged)} results differed; {shown} called wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
