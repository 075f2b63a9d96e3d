"""The study `order`: in which order the kernels of a platform add, and which platforms share an order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import PlatformError, UsageError
from shadowrun.intercept.plan import make_plan
from shadowrun.platforms import resolve
from shadowrun.replay.executor import Executor
from shadowrun.report.document import (
    Block,
    Column,
    Document,
    Fact,
    Facts,
    Figure,
    Limits,
    Note,
    Records,
    Section,
    Table,
)
from shadowrun.studies.classes.equivalence import letter
from shadowrun.studies.grid import machine_fact
from shadowrun.studies.published.mask_probe import DTYPES, TRIALS, MaskProbe, Order, SumKernel, orders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from shadowrun.platforms.device import Platform
    from shadowrun.studies.published.summation_tree import SummationTree

__all__ = [
    "KERNELS",
    "MAX_SUMMANDS",
    "PLATFORMS",
    "QUICK_PLATFORMS",
    "ProbedKernel",
    "kernel_of",
    "order_document",
    "probe_platform",
    "read_shape",
    "tree_section",
]

# Operators whose order of additions the probe reveals, and their inputs.
#
# Masks are put into one input, and the other holds ones: products are exact, so that a fused multiply-add makes no
# difference, and every element of the result is the sum of the same summands.

# A pairwise order of n takes n/2 log2(n) calls, half of `MAX_CALLS` at 4096.
MAX_SUMMANDS = 4096
MAX_ELEMENTS = 1 << 24

_aten = torch.ops.aten


def _sum(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    if len(shape) == 1:
        return _aten.sum.default, shape[0], lambda s: (s,)
    rows, n = shape
    return _aten.sum.dim_IntList, n, lambda s: (s.repeat(rows, 1), [-1])


def _sum_dim0(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    n, columns = shape
    return _aten.sum.dim_IntList, n, lambda s: (s[:, None].repeat(1, columns), [0])


def _dot(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    return _aten.dot.default, shape[0], lambda s: (s, torch.ones_like(s))


def _mv(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    rows, n = shape
    return _aten.mv.default, n, lambda s: (s.repeat(rows, 1), torch.ones_like(s))


def _mm(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    rows, n, columns = shape
    return _aten.mm.default, n, lambda s: (s.repeat(rows, 1), s.new_ones(n, columns))


def _bmm(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    batch, rows, n, columns = shape
    return _aten.bmm.default, n, lambda s: (s.repeat(batch, rows, 1), s.new_ones(batch, n, columns))


def _conv(shape: tuple[int, ...]) -> tuple[torch._ops.OpOverload, int, Callable[..., tuple[Any, ...]]]:
    batch, channels, height, width, filters, side = shape
    # No padding: windows at an edge would have fewer summands.
    options = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)

    def inputs(s: torch.Tensor) -> tuple[Any, ...]:
        weight = s.reshape(1, channels, side, side).repeat(filters, 1, 1, 1)
        return (s.new_ones(batch, channels, height, width), weight, *options)

    return _aten.convolution.default, channels * side * side, inputs


KERNELS = {
    "sum": (_sum, ("n", "rows x n"), ((64,), (8, 64))),
    "sum_dim0": (_sum_dim0, ("n x columns",), ((64, 8),)),
    "dot": (_dot, ("n",), ((64,),)),
    "mv": (_mv, ("rows x n",), ((8, 64),)),
    "mm": (_mm, ("rows x n x columns",), ((8, 64, 8),)),
    "bmm": (_bmm, ("batch x rows x n x columns",), ((2, 8, 64, 8),)),
    "conv": (_conv, ("batch x channels x height x width x filters x side",), ((1, 4, 8, 8, 8, 3),)),
}
"""Name to its inputs, the meaning of its sizes, and the shapes that are probed unless others are asked for."""


def kernel_of(name: str, shape: tuple[int, ...]) -> SumKernel:
    """An operator with inputs of a shape.

    Args:
        name: One of `KERNELS`.
        shape: Sizes, as `read_shape` reads them.

    Raises:
        UsageError: The number of sizes is wrong, or the shape is too large.
    """
    make, meanings, _ = KERNELS[name]
    if len(shape) not in {meaning.count(" x ") + 1 for meaning in meanings}:
        raise UsageError(
            f"--shape {name}={'x'.join(map(str, shape))}: {name} has the sizes {' or '.join(meanings)}.",
            slug="bad-option",
        )
    if name == "conv" and shape[5] > min(shape[2:4]):
        raise UsageError(f"--shape {name}: a window of {shape[5]} is larger than the input.", slug="bad-option")
    operator, n, inputs = make(shape)
    if n > MAX_SUMMANDS or math.prod(shape) > MAX_ELEMENTS:
        raise UsageError(
            f"--shape {name}={'x'.join(map(str, shape))}: at most {MAX_SUMMANDS:,} summands and "
            f"{MAX_ELEMENTS:,} products can be probed.",
            slug="bad-option",
        )
    return SumKernel(name, operator, shape, n, inputs)


def read_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Read ``mm=8x64x8``.

    Raises:
        UsageError: Unknown operator, or no sizes.
    """
    name, _, sizes = text.partition("=")
    if name not in KERNELS:
        raise UsageError(f"--shape {text!r}: use one of {', '.join(KERNELS)}, as in mm=8x64x8.", slug="bad-option")
    words = sizes.lower().split("x")
    if not all(word.isascii() and word.isdecimal() and int(word[:9]) > 0 for word in words):
        raise UsageError(f"--shape {text!r}: sizes are whole numbers from 1 on, as in {name}=…x….", slug="bad-option")
    return name, tuple(int(word[:9]) for word in words)


PLATFORMS = (
    *("cpu", "cpu[isa=default]", "cpu[isa=avx2]", "cpu[mkl_cbwr=COMPATIBLE]", "cpu[onednn_isa=AVX2]"),
    *("cpu[mkldnn=off]", "cpu[threads=1]"),
)
QUICK_PLATFORMS = ("cpu", "cpu[isa=default]")

PUBLISHED = (
    "Published (FPRev, arXiv 2411.00442): trees for n = 4 to 512 on 3 CPUs and on V100, A100, H100, whose matrix units "
    "have fused nodes. Measured earlier for this project on an Intel Xeon with AVX-512, n = 64, over MKL's instruction "
    "sets: dot 4 trees, mm 2; sum, mean, mv, cumsum and a 1x1 convolution 1. Confirmed: the tree reproduces the "
    f"kernel's results on {TRIALS} random inputs bit for bit, with additions in that dtype."
)
"""Shown next to this machine's figures."""

MAX_BYTES = 1 << 30
MAX_DRAWN = 128
"""Leaves of a tree that is drawn; larger ones have an outline only."""


@dataclass(frozen=True, slots=True)
class ProbedKernel:
    """What the probe found for one kernel on one platform.

    Attributes:
        kernel: The operator and its shape.
        dtype: Name of the dtype.
        platform: As reports show it.
        orders: Its orders; empty if the platform cannot run it.
        error: Why it cannot run it.
        n_calls: Calls that the probe made.
    """

    kernel: SumKernel
    dtype: str
    platform: str
    orders: tuple[Order, ...]
    error: str = ""
    n_calls: int = 0


def probe_platform(
    spec: str,
    kernels: Sequence[SumKernel],
    dtypes: Sequence[str],
    on_kernel: Callable[[SumKernel], None] = lambda _: None,
) -> list[ProbedKernel]:
    """Probe every kernel in every dtype on one platform.

    Args:
        spec: The platform.
        kernels: What to probe.
        dtypes: Names, of `DTYPES`.
        on_kernel: Called before each.

    Raises:
        PlatformError: This machine does not have it.
    """
    platform = resolve(spec)
    try:
        platform.start()
        found = []
        for dtype in dtypes:
            for kernel in kernels:
                on_kernel(kernel)
                found.append(_probe(platform, kernel, dtype))
        return found
    finally:
        platform.stop()


def _probe(platform: Platform, kernel: SumKernel, dtype: str) -> ProbedKernel:
    executor, plan = Executor(platform), make_plan(kernel.operator, 0)

    def run(inputs: tuple[Any, ...]) -> torch.Tensor:
        args, kwargs = executor.to_device(plan, inputs, {}, platform.device, MAX_BYTES)
        result = executor.run(plan, args, kwargs).out
        platform.synchronize()
        on_cpu: torch.Tensor = result.cpu()
        return on_cpu

    probe = MaskProbe(kernel, DTYPES[dtype], run)
    try:
        with torch.no_grad():
            found = tuple(orders(probe))
    except PlatformError:
        raise
    except (RuntimeError, TypeError) as error:  # an unsupported dtype, or what a backend raises
        text = str(error).partition("\n")[0][:200]
        return ProbedKernel(kernel, dtype, str(platform), (), text, probe.n_calls)
    return ProbedKernel(kernel, dtype, str(platform), found, "", probe.n_calls)


def order_document(probed: Sequence[ProbedKernel], absent: Iterable[tuple[str, str]]) -> Document:
    """Report of the orders, each drawn once.

    Args:
        probed: What the probe found.
        absent: Platforms that this machine lacks, and why.
    """
    # In the order of the first platform, so that letter A is its first tree.
    trees = {o.tree.digest: o.tree for p in probed for o in p.orders if o.tree is not None}
    names = {digest: letter(number) for number, digest in enumerate(trees)}
    platforms = list(dict.fromkeys(p.platform for p in probed))
    blocks: list[Block] = [
        Facts((machine_fact(), Fact("platforms", ", ".join(platforms)))),
        Note("Equal letters: equal order of additions. Where one result has several orders, each has its own row."),
        *(Note(f"{spec}: left out: {why}", "dim") for spec, why in absent),
        _table(probed, names, platforms),
        Note(PUBLISHED, "dim"),
    ]
    figures = tuple(tree_section(f"{names[d]}: {tree.shape()} ({d})", tree, MAX_DRAWN) for d, tree in trees.items())
    if figures:
        blocks.append(Section("Orders", figures, count=len(figures)))
    records = Records(
        ("operator", "shape", "dtype", "platform", "elements", "hash", "order", "depth", "widest", "rounds to", "note"),
        tuple(row for p in probed for row in _records(p)),
    )
    data = {
        "format": 1,
        "study": "order",
        "machine": machine_fact().text,
        "kernels": [_kernel_data(p) for p in probed],
        "trees": {d: {"n": t.n_leaves, "nodes": [list(node) for node in t.nodes]} for d, t in trees.items()},
    }
    return Document("order of additions", tuple(blocks), data, records)


def _table(probed: Sequence[ProbedKernel], names: dict[str, str], platforms: list[str]) -> Table:
    """One row for each operator, shape, dtype and order, with the platforms that have it."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for p in probed:
        for row in _cells(p, names):
            rows.setdefault((p.kernel.name, "x".join(map(str, p.kernel.shape)), p.dtype, *row), []).append(p.platform)
    columns = (
        *(Column("operator", "name"), Column("shape"), Column("dtype"), Column("order"), Column("in words")),
        *(Column("elements", "number", 1), Column("confirmed"), Column("platforms")),
    )
    # Rows of one operator follow each other, in the order of the first platform.
    kernels = list(dict.fromkeys(row[:3] for row in rows))
    ordered = sorted(rows, key=lambda row: kernels.index(row[:3]))
    cells = tuple(
        (*row, f"all {len(platforms)}" if found == platforms else ", ".join(found))
        for row, found in ((row, rows[row]) for row in ordered)
    )
    return Table(columns, cells, noun="rows: -f csv lists all", limits=Limits(100, 200, 1000))


def _cells(p: ProbedKernel, names: dict[str, str]) -> Iterable[tuple[str, str, str, str]]:
    if not p.orders:
        yield "", f"cannot run: {p.error}", "", ""
    for o in p.orders:
        letter = names[o.tree.digest] if o.tree is not None else "?"
        words = o.tree.shape() if o.tree is not None else f"not determined: {o.reason}"
        yield letter, words, str(len(o.outputs)), _confirmation(o)


def _confirmation(order: Order) -> str:
    """Whether the tree alone explains the kernel's rounding."""
    if order.tree is None or order.tree.n_leaves < 2:
        return ""
    # A node of three or more is a fused addition of a matrix unit: Python's additions in the dtype cannot repeat it.
    if order.tree.widest > 2:
        return "no: fused"
    # A compensated sum has a tree too, but does not round as the tree does.
    return f"in {order.accumulator}" if order.accumulator else "NO: rounds in another way"


def _records(p: ProbedKernel) -> Iterable[tuple[object, ...]]:
    head = (p.kernel.name, "x".join(map(str, p.kernel.shape)), p.dtype, p.platform)
    if not p.orders:
        yield (*head, 0, "", "", "", "", "", f"cannot run: {p.error}")
    for o in p.orders:
        if o.tree is None:
            yield (*head, len(o.outputs), "", "", "", "", "", f"not determined: {o.reason}")
        else:
            tree = o.tree
            yield (*head, len(o.outputs), tree.digest, tree.shape(), tree.depth, tree.widest, o.accumulator, "")


def _kernel_data(p: ProbedKernel) -> dict[str, Any]:
    return {
        "operator": p.kernel.name,
        "shape": list(p.kernel.shape),
        "dtype": p.dtype,
        "platform": p.platform,
        "n_summands": p.kernel.n,
        "n_calls": p.n_calls,
        "error": p.error,
        "orders": [
            {
                "hash": o.tree.digest if o.tree is not None else None,
                "in_words": o.tree.shape() if o.tree is not None else None,
                "reason": o.reason,
                "outputs": list(o.outputs),
                "confirmed_in": o.accumulator or None,
            }
            for o in p.orders
        ],
    }


_LEAF_PX = 15.0
_MARGIN_PX = 12.0
_LEVEL_PX = 18.0
_TALLEST_PX = 480.0
_PLAIN, _FUSED = "var(--accent, #0b6bcb)", "var(--red, #b3261e)"


def tree_section(title: str, tree: SummationTree, max_leaves: int) -> Section:
    """A summation tree as an outline, and drawn: summands at the bottom, the sum at the top.

    Args:
        title: What it is.
        tree: The tree.
        max_leaves: A larger one has an outline only.
    """
    rows = tuple(("· " * level + line,) for level, line in tree.outline())
    outline = Table((Column("sum"),), rows, noun="lines", limits=Limits(40, 100, 500))
    blocks: tuple[Block, ...] = (outline,)
    if tree.n_leaves <= max_leaves:
        fused = " Red: fused additions." if tree.widest > 2 else ""
        blocks = (Figure(_svg(tree), f"Summands below, their sum above.{fused}"), outline)
    return Section(title, blocks)


def _svg(tree: SummationTree) -> str:
    heights = [0] * tree.n_leaves
    for children in tree.nodes:
        heights.append(1 + max(heights[child] for child in children))
    level = min(_LEVEL_PX, _TALLEST_PX / max(1, heights[-1]))
    bottom = _MARGIN_PX + level * heights[-1]
    x = dict(zip(_leaves_in_order(tree), _positions(tree.n_leaves), strict=True))
    y = [round(bottom - level * height, 1) for height in heights]
    parts = []
    for number, children in enumerate(tree.nodes, tree.n_leaves):
        ends = sorted(x[child] for child in children)
        x[number] = round((ends[0] + ends[-1]) / 2, 1)
        path = f"M{ends[0]},{y[number]} H{ends[-1]}" + "".join(f" M{x[c]},{y[c]} V{y[number]}" for c in children)
        colour = _FUSED if len(children) > 2 else _PLAIN
        parts.append(f'<path d="{path}" style="fill: none; stroke: {colour}"/>')
    parts += [
        f'<text x="{x[leaf]}" y="{bottom + 12:.1f}" text-anchor="middle" font-size="10" '
        f'style="fill: var(--ink, #1d2126)">{leaf}</text>'
        for leaf in range(tree.n_leaves)
    ]
    width, height = 2 * _MARGIN_PX + _LEAF_PX * tree.n_leaves, bottom + 20
    return (
        f'<svg role="img" xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}"><title>Summation tree</title>{"".join(parts)}</svg>'
    )


def _positions(n: int) -> list[float]:
    return [round(_MARGIN_PX + _LEAF_PX * (i + 0.5), 1) for i in range(n)]


def _leaves_in_order(tree: SummationTree) -> list[int]:
    """Leaves from left to right, so that no two lines cross."""
    lowest = tree.first_leaves
    leaves, open_nodes = [], [tree.root]
    while open_nodes:
        node = open_nodes.pop()
        if node < tree.n_leaves:
            leaves.append(node)
        else:
            # A stack, not recursion: a sequential sum of 4096 is 4095 levels deep, beyond Python's limit.
            open_nodes += sorted(tree.nodes[node - tree.n_leaves], key=lowest.__getitem__, reverse=True)
    return leaves
