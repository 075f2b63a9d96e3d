"""The accumulation-order probe: kernels with known trees are revealed exactly, and where it cannot tell, it says so."""

import json
import math

import numpy as np
import pytest
import torch

from shadowrun.cli.main import main
from shadowrun.studies.published.mask_probe import DTYPES, MaskProbe, SumKernel, orders
from shadowrun.studies.published.summation_order import KERNELS, kernel_of, probe_platform
from shadowrun.studies.published.summation_tree import Contradiction, SummationTree, build_tree

pytestmark = pytest.mark.usefixtures("forked_processes")


def chain(leaves):
    """Nodes of a sum of these numbers one after another; nodes are counted from len(leaves)."""
    tree, current = [], leaves[0]
    for leaf in leaves[1:]:
        tree.append((current, leaf))
        current = len(leaves) + len(tree) - 1
    return SummationTree(len(leaves), tuple(tree))


class Adder:
    """A kernel in Python that records the tree of its additions: numbers are pairs of value and node."""

    def __init__(self, accumulator):
        self.accumulator = accumulator
        self.nodes = []

    def run(self, algorithm, summands):
        """The sum, (1,), in the summands' dtype."""
        self.nodes, self.n = [], len(summands)
        values = [(summand.to(self.accumulator), leaf) for leaf, summand in enumerate(summands)]
        return algorithm(self, values)[0].to(summands.dtype).reshape(1)

    def add(self, *parts):
        value = parts[0][0]
        for other, _ in parts[1:]:
            value = value + other
        self.nodes.append(tuple(node for _, node in parts))
        return value, self.n + len(self.nodes) - 1

    @property
    def tree(self):
        return SummationTree(self.n, tuple(self.nodes))


def sequential(adder, values):
    total = values[0]
    for value in values[1:]:
        total = adder.add(total, value)
    return total


def reverse(adder, values):
    return sequential(adder, values[::-1])


def pairwise(adder, values):
    if len(values) == 1:
        return values[0]
    middle = len(values) // 2
    return adder.add(pairwise(adder, values[:middle]), pairwise(adder, values[middle:]))


def lanes(adder, values, n_lanes=8):
    """Lanes of a vector unit, added across at the end; a scalar tail."""
    body = len(values) - len(values) % n_lanes
    sums = [sequential(adder, values[lane:body:n_lanes]) for lane in range(n_lanes)]
    return sequential(adder, [pairwise(adder, sums), *values[body:]])


def blocked(adder, values, size=10):
    return sequential(adder, [sequential(adder, values[at : at + size]) for at in range(0, len(values), size)])


def random_order(adder, values):
    rng = np.random.default_rng(len(values))
    values = list(values)
    while len(values) > 1:
        left = values.pop(int(rng.integers(len(values))))
        right = values.pop(int(rng.integers(len(values))))
        values.append(adder.add(left, right))
    return values[0]


def probe_of(run, n, dtype=torch.float32):
    kernel = SumKernel("test", torch.ops.aten.sum.default, (n,), n, lambda s: (s,))
    return MaskProbe(kernel, dtype, lambda inputs: run(*inputs))


ALGORITHMS = (sequential, reverse, pairwise, lanes, blocked, random_order)
ACCUMULATORS = [
    *((dtype, dtype) for dtype in DTYPES.values()),
    *((torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float64)),
    (torch.bfloat16, torch.float64),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(("dtype", "accumulator"), ACCUMULATORS, ids=str)
def test_a_known_tree_is_revealed(algorithm, dtype, accumulator):
    n = 37
    adder = Adder(accumulator)
    (order,) = orders(probe_of(lambda s: adder.run(algorithm, s), n, dtype))
    assert order.reason == ""
    assert order.tree.digest == adder.tree.digest
    assert order.accumulator == str(accumulator).removeprefix("torch.")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_summands(n):
    adder = Adder(torch.float32)
    (order,) = orders(probe_of(lambda s: adder.run(sequential, s), n))
    assert order.tree == adder.tree


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_counts_over_a_dtypes_exact_integers(dtype):
    """300 summands: bfloat16 counts to 256, float16's units are tiny."""

    def two_halves_then_one_after_another(summands):
        halves = summands.float().reshape(2, 150).numpy()
        return torch.from_numpy(np.add.accumulate(halves[0] + halves[1])[-1:]).to(dtype)

    (order,) = orders(probe_of(two_halves_then_one_after_another, 300, dtype))
    pairs = tuple((i, i + 150) for i in range(150))
    chained = tuple((450 + i - 1, 301 + i) for i in range(1, 149))
    assert order.tree.digest == SummationTree(300, (*pairs, (300, 301), *chained)).digest
    assert order.accumulator == "float32"


def test_different_orders_have_different_hashes_and_a_swap_has_the_same():
    digests = []
    for algorithm in ALGORITHMS:
        adder = Adder(torch.float32)
        adder.run(algorithm, torch.ones(37))
        digests.append(adder.tree.digest)
    assert len(set(digests)) == len(ALGORITHMS)
    assert SummationTree(3, ((0, 1), (3, 2))).digest == SummationTree(3, ((1, 0), (2, 3))).digest
    assert SummationTree(3, ((0, 1), (3, 2))).digest != SummationTree(3, ((0, 2), (3, 1))).digest


def fused_chain(width):
    """A matrix unit: the sum so far and `width` products are aligned to the largest, cut off, and added exactly."""

    def add(values):
        values = values.double()
        largest = values.abs().max()
        step = 2.0 ** (math.frexp(largest.item())[1] - 24) if largest else 1.0
        return (torch.trunc(values / step) * step).sum().float()

    def run(summands):
        total = torch.zeros(())
        for at in range(0, len(summands), width):
            total = add(torch.cat((total.reshape(1), summands[at : at + width].float())))
        return total.to(summands.dtype).reshape(1)

    return run


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_fused_additions_are_nodes_with_many_children(dtype):
    (order,) = orders(probe_of(fused_chain(8), 24, dtype))
    first = tuple(range(8))
    expected = SummationTree(24, (first, (24, *range(8, 16)), (25, *range(16, 24))))
    assert order.tree.digest == expected.digest
    assert order.tree.widest == 9
    assert order.accumulator == ""
    assert "up to 9 summands at once" in order.tree.shape()


def kahan(summands):
    total, lost = summands[0], torch.zeros(())
    for summand in summands[1:]:
        y = summand - lost
        t = total + y
        lost = (t - total) - y
        total = t
    return total.reshape(1)


def test_a_compensated_sum_is_not_confirmed():
    (order,) = orders(probe_of(kahan, 20))
    assert order.accumulator == ""


def test_an_exact_sum_cannot_be_told():
    (order,) = orders(probe_of(lambda s: torch.tensor([math.fsum(s.tolist())]), 20))
    assert order.tree is None
    assert "M swallows no one" in order.reason


def test_a_wide_accumulator_cannot_be_told():
    (order,) = orders(probe_of(lambda s: s.double().sum().half().reshape(1), 20, torch.float16))
    assert order.tree is None
    assert "wider than the masks reach" in order.reason


def test_transformed_inputs_cannot_be_told():
    transform = torch.tensor([[1.0, 1.0], [1.0, -1.0]])

    def run(summands):
        spectrum = transform @ summands.reshape(2, -1)
        return (spectrum.sum(1) * 0.3).sum().reshape(1) / 0.6

    (order,) = orders(probe_of(run, 20))
    assert order.tree is None
    assert order.reason


def test_flushed_units_cannot_be_told():
    tiny = torch.finfo(torch.float16).tiny

    def run(summands):
        total = sequential(
            Adder(torch.float32), [(s.float(), 0) for s in summands if s.abs() > tiny] or [(tiny * 0, 0)]
        )
        return torch.as_tensor(total[0]).half().reshape(1)

    # Units of float16 are its smallest normal number: only a kernel that flushes even that loses them.
    (order,) = orders(probe_of(run, 20, torch.float16))
    assert order.tree is None
    assert "flushed" in order.reason


def test_elements_with_different_orders_are_separate():
    one, other = Adder(torch.float32), Adder(torch.float32)
    (a, b) = orders(
        probe_of(lambda s: torch.cat((one.run(sequential, s), other.run(pairwise, s), one.run(sequential, s))), 12)
    )
    assert (a.outputs, b.outputs) == ((0, 2), (1,))
    assert (a.tree.digest, b.tree.digest) == (one.tree.digest, other.tree.digest)


def test_sizes_of_no_tree_are_a_contradiction():
    with pytest.raises(Contradiction):
        build_tree(4, lambda i, j: 3)


def test_a_long_chain_is_no_recursion():
    n = 3000
    tree = build_tree(n, lambda i, j: j + 1)
    assert tree.digest == chain(range(n)).digest
    assert tree.shape() == "sequential"
    assert tree.outline() == [(0, f"0 + 1 + … + {n - 1}")]


def test_words():
    shapes = {}
    for algorithm in ALGORITHMS:
        adder = Adder(torch.float32)
        adder.run(algorithm, torch.ones(64))
        shapes[algorithm] = adder.tree.shape()
    assert shapes[sequential] == "sequential"
    assert shapes[reverse] == "reversed"
    assert shapes[pairwise] == "pairwise"
    assert shapes[lanes] == "8 lanes of 8, stride 8; depth 10"
    assert shapes[random_order].startswith("irregular")


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("bmm", "sum_dim0")])
@pytest.mark.parametrize("spec", ["cpu", "sim"])
def test_torchs_own_kernels_have_stable_trees_that_reproduce_their_results(name, spec):
    kernel = kernel_of(name, KERNELS[name][2][0])
    (first,), (again,) = (probe_platform(spec, [kernel], ["float32"]) for _ in range(2))
    assert first.error == ""
    assert [o.tree.digest for o in first.orders] == [o.tree.digest for o in again.orders]
    for order in first.orders:
        assert order.tree.widest > 2 or order.accumulator == "float32"


def test_the_command(capsys, tmp_path):
    page = tmp_path / "order.html"
    assert (
        main(
            [
                "study",
                "order",
                "--ops",
                "sum,mm",
                "--shape",
                "mm=2x16x2",
                "--target",
                "cpu",
                "-o",
                str(page),
                "-f",
                "json",
            ]
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    assert [k["operator"] for k in document["kernels"]] == ["sum", "sum", "mm"]
    (order,) = document["kernels"][2]["orders"]
    assert document["trees"][order["hash"]]["n"] == 16
    assert len(order["outputs"]) == 4
    text = page.read_text(encoding="utf-8")
    assert "<svg" in text
    assert "<path" in text


def test_a_platform_in_another_process(capsys):
    target = "cpu[isa=default]"
    assert main(["study", "order", "--ops", "dot", "--shape", "dot=16", "--target", "cpu", "--target", target]) == 0
    shown = capsys.readouterr().out
    assert target in shown
    assert "float32" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ops", "abacus"], "'abacus'"),
        (["--shape", "mm=8x8"], "rows x n x columns"),
        (["--shape", "mm"], "whole numbers"),
        (["--shape", "abs=8"], "use one of"),
        (["--shape", "sum=0"], "whole numbers"),
        (["--shape", "sum=100000"], "at most 4,096 summands"),
        (["--shape", "conv=1x1x2x2x1x3"], "larger than the input"),
        (["--shape", "mm=8x8x8", "--ops", "sum"], "--ops leaves mm out"),
        (["--dtypes", "int8"], "'int8'"),
        (["--target", "abacus"], "abacus"),
    ],
)
def test_bad_input(args, message, capsys):
    assert main(["study", "order", *args]) == 2
    assert message in capsys.readouterr().err
