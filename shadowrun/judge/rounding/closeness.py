"""Closeness: results so near to the reference's that the difference is rounding, without asking the oracle.

On another device almost every sum differs by rounding, and the float64 oracle with its perturbations takes twenty
times as long as the operator. Most calls are decided by less:

* Results within a few units in the last place of each other, at every element.
* Sums and products: the errors of rounding add up like the terms do, so their size is the root of the sum of the
  squared terms. An operator that is linear in each of its inputs gives that sum itself, on squared inputs.
* Short chains of arithmetic (optimizers): the sum of the magnitudes, which the operator gives on magnitudes.
* Layer norms and softmaxes: what an error of the inputs does to each element, in closed form (`row_sizes`).

The bounds lie far below those of the oracle (`bounds`), and are held against the reference instead of the truth: what
passes here is at most that much farther from the truth than the reference is. What does not pass is not yet a mismatch:
the oracle decides.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.judge.oracle import n_terms
from shadowrun.judge.result_diff import flat_values
from shadowrun.judge.rounding.bias import (
    DIFFERING,
    ENOUGH,
    ONE_WAY,
    TOWARD_ZERO,
    UNITS,
    has_common_factor,
    has_weighted_factor,
    may_be_biased,
)
from shadowrun.numerics.precision import FORMATS
from shadowrun.operators.case import tensors
from shadowrun.operators.facts import facts, ulp_bound
from shadowrun.operators.vendor_ops import evaluate
from shadowrun.torch_private import schema_of
from shadowrun.types import Cause, Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shadowrun.numerics.precision import FloatFormat
    from shadowrun.operators.case import Case, Value
    from shadowrun.types import TensorDiff

__all__ = [
    "ClosenessCheck",
    "allowed_ulp",
    "few_ulp",
    "has_row_sizes",
    "needs_judge",
    "row_sizes",
    "squared_arguments",
    "sum_tolerance",
    "sum_units",
]

FEW_ULP: Final = 4
"""Units in the last place that any operator may be off: the bounds of the oracle begin at 16 unit roundoffs, 8 ULP."""
FEW_ULP_COARSE: Final = 1
"""The same for results of 16 and 8 bits: one more rounding."""
SUM_UNITS: Final = 16.0
SUM_ROOT: Final = 0.5
MAX_UNITS: Final = 48.0
"""Unit roundoffs of the result and of the root of its squared terms, and further ones for each root of the number of
terms: half of `units.BOUND` and `units.ROOT`. The least fault of a float32 sum that we know is 80 off; tf32 in
positive terms 600 with 1024 of them, 157 with 16,384, 78 with 65,536."""
CHAIN_UNITS: Final = 4.0
"""Unit roundoffs of the sum of magnitudes: each step of a chain of three is rounded once."""
ROW_UNITS: Final = 8.0
"""The same of the result and of the standard deviation that `row_sizes` gives: a quarter of `rounding_bounds.BOUND`. Of
16 perturbed runs, the greatest is below a quarter of it in 1 of 10**11 elements. Kernels of another instruction set are
up to 7 away."""
_ROW_COPIES: Final = 8
"""Tensors like an input that `row_sizes` holds at a time."""
MAX_TERMS: Final = 1 << 16
"""Terms of a sum from which tf32 in its inputs shows in all elements together only (`products`)."""


SCALES: Final = ("alpha", "beta", "value", "weight")
"""Numbers among the arguments that are factors of terms: changed as these are."""


def few_ulp(fmt: FloatFormat) -> int:
    """Units in the last place that any operator may be off in a result of this format."""
    return FEW_ULP if fmt.mantissa >= 23 else FEW_ULP_COARSE


def sum_units(terms: float) -> float:
    """Units of rounding that a sum of so many terms may be off."""
    return min(SUM_UNITS + SUM_ROOT * float(terms**0.5), MAX_UNITS)


class ClosenessCheck:
    """Tests the results of one call.

    Args:
        case: The call.
        max_bytes: Memory that the operator on other inputs may take.
    """

    def __init__(self, case: Case, max_bytes: int) -> None:
        self._case = case
        self._max_bytes = max_bytes
        self._facts = case.facts
        self._has_rows = has_row_sizes(case.op)
        self._sizes: tuple[Value, ...] | None = None
        self._asked = False

    def verdict(self, position: int, d: TensorDiff) -> Verdict | None:
        """MATCH for a result that is close to the reference's; None where the oracle has to decide.

        Args:
            position: Which result; both sides have one form.
            d: Its statistics.
        """
        fmt = FORMATS.get(flat_values(self._case.expected[position]).dtype)
        # A difference of class is a finding whatever the distance, so it is left to the later steps.
        odd = d.n_nan or d.n_inf or d.n_subnormal or (d.n_zero_sign and self._facts.keeps_zero_sign)
        if fmt is None or odd or not fmt.signed or position in self._facts.by_equation:
            return None
        # In bfloat16 one ULP is 0.4 to 0.8 % of the value; four would hide an accumulation in 16 bits.
        if d.max_ulp <= few_ulp(fmt):
            if may_be_biased(self._case, position, d):
                return None
            return _rounding(f"max {d.max_ulp} ULP")
        # The estimate below is for sums in their own dtype; 16-bit sums are accumulated in float32.
        if fmt.mantissa < 23:
            return None
        terms = n_terms(self._case, position)
        size = self._size(position) if terms <= MAX_TERMS else None
        if size is None:
            return None
        units = self._units(position)
        actual, expected = (flat_values(v[position]) for v in (self._case.actual, self._case.expected))
        unit = expected.abs().add_(size).mul_(units * fmt.roundoff).add_(fmt.smallest)
        # None is below 0, and the greatest of them is NaN if any is.
        if not bool(torch.isfinite(unit.max())):
            return None
        gap = actual - expected
        if not float(gap.abs().sub_(unit).max()) <= 0.0:
            return None
        # A factor within the bound of each element is a fault all the same.
        if has_common_factor(gap, expected, fmt.roundoff):
            return None
        if self._has_rows and has_weighted_factor(gap, expected, fmt.roundoff):
            return None
        return _rounding(f"max {d.max_ulp} ULP, within {units:g} units of rounding of the reference")

    def limit(self, position: int) -> str:
        """Up to what a result is close, in words."""
        fmt = FORMATS.get(flat_values(self._case.expected[position]).dtype)
        if fmt is None:
            return "bits"
        if fmt.mantissa < 23:
            return f"{few_ulp(fmt)} ULP"
        units = f", or {self._units(position):g} units of rounding" if self._sizes is not None else ""
        return f"{few_ulp(fmt)} ULP{units}"

    def _units(self, position: int) -> float:
        if not self._facts.n_factors:
            return ROW_UNITS if self._has_rows else CHAIN_UNITS
        return sum_units(n_terms(self._case, position))

    def _size(self, position: int) -> torch.Tensor | None:
        """Size of the rounding errors at each element, flat, in unit roundoffs; None where the operator has none."""
        squared = self._facts.n_factors > 0
        if not self._asked:
            self._asked = True
            if squared:
                self._sizes = self._evaluated(torch.square, lambda x: x * x)
            elif self._facts.chain:
                self._sizes = self._evaluated(torch.abs, abs)
            elif self._has_rows:
                self._sizes = self._of_rows()
        if self._sizes is None or not isinstance(self._sizes[position], torch.Tensor):
            return None
        size = flat_values(self._sizes[position])
        return size.sqrt() if squared else size.abs()

    def _of_rows(self) -> tuple[Value, ...] | None:
        case = self._case
        given = [t for t in tensors((*case.args, *case.expected), case.kwargs) if t.is_floating_point()]
        # Sums in 16 bits are accumulated in float32: these sizes are for one dtype.
        if len({t.dtype for t in given}) != 1 or any(t.layout is not torch.strided for t in given):
            return None
        if _ROW_COPIES * max(t.nbytes for t in given) > self._max_bytes:
            return None
        with torch.no_grad():
            return row_sizes(case)

    def _evaluated(
        self, change: Callable[[torch.Tensor], torch.Tensor], change_number: Callable[[Any], Any]
    ) -> tuple[Value, ...] | None:
        """Results of the operator on other inputs, in the dtype that it has."""
        case = self._case
        if sum(t.nbytes for t in tensors((*case.args, *case.expected, *case.expected), case.kwargs)) > self._max_bytes:
            return None
        floats = [t for t in tensors(case.args, case.kwargs) if t.is_floating_point() or t.is_complex()]
        # Squares of 16-bit values overflow (float16 from 256 on) or lose their digits.
        if any(t.dtype not in (torch.float32, torch.float64) or t.layout is not torch.strided for t in floats):
            return None
        schema = schema_of(case.func).arguments

        minuend = case.arguments().get(self._facts.subtracts_from)
        negated = {id(t) for t in tensors((minuend,), {})}

        def changed(t: torch.Tensor) -> torch.Tensor:
            found = change(t.detach()) if t.is_floating_point() else t.detach().clone()
            return found.neg_() if id(t) in negated else found

        def number(name: str, value: Any) -> Any:
            return change_number(value) if name in SCALES and type(value) is float else value

        args, kwargs = case.fresh_inputs(changed)
        args = tuple(number(schema[i].name, a) for i, a in enumerate(args))
        kwargs = {k: number(k, v) for k, v in kwargs.items()}
        try:
            names, values = evaluate(case, args, kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            return None
        return values if names == case.names else None


def _rounding(evidence: str) -> Verdict:
    return Verdict(Status.MATCH, Cause.ROUNDING, "", evidence)


# The first rule of closeness on an accelerator: results a few units in the last place apart stay there.
#
# Where a reference computes in another dtype, nearly every float result differs in its last bit, and to bring each one
# to the host would take longer than the step. One flag says whether the judge has to look.

# Kernels add up 16-bit terms in float32.
_ROUNDOFF: Final = FORMATS[torch.float32].roundoff


def allowed_ulp(op: str, t: torch.Tensor, position: int, arguments: Mapping[str, object]) -> int:
    """Units in the last place that a result may be off without a look of the judge; 0 if every bit counts.

    Args:
        op: ``aten::add.Tensor``.
        t: The result.
        position: Which of the results.
        arguments: Of the call, by name.
    """
    fmt = FORMATS.get(t.dtype)
    if fmt is None or not fmt.signed or position in facts(op).by_equation or t.dtype is torch.float64:
        return 0
    bound = ulp_bound(op, [t.dtype], dict(arguments))
    return few_ulp(fmt) if bound is None else min(few_ulp(fmt), bound)


def needs_judge(
    actual: torch.Tensor, expected: torch.Tensor, most: int, *, by_rows: bool, tolerance: torch.Tensor | None = None
) -> torch.Tensor:
    """Whether the judge has to look at a result, as a bool on its device.

    Args:
        actual: The target's result, float32 or shorter.
        expected: The reference's, in the same form.
        most: Units in the last place that they may be apart.
        by_rows: Statistics of rows may be rounded, which no count of signs shows.
        tolerance: How far elements may be apart in any case (`sum_tolerance`); None for the distance in ULP alone.
    """
    fmt = FORMATS[actual.dtype]
    differs = actual.view(fmt.view) != expected.view(fmt.view)
    least = torch.minimum(actual.abs(), expected.abs())
    plain = actual.isfinite() & expected.isfinite() & (least >= fmt.normal)
    a, e = (_in_order(t, fmt.view) for t in (actual, expected))
    # Two finite numbers are less than 2**32 - 2**24 apart, so that no great distance wraps to a small one.
    apart = (a - e).abs_() > most
    n = actual.numel()
    if tolerance is not None:
        gap = actual.to(torch.float32) - expected.to(torch.float32)  # NaN is within none
        apart = apart & ~(gap.abs() <= tolerance)
    found = (differs & (apart | ~plain)).any()
    if n < ENOUGH or (fmt.mantissa >= 23 and tolerance is None):
        return found
    if fmt.mantissa >= 23:
        # A factor within the tolerance of each element is a fault all the same; see `bias.has_common_factor`.
        return found | ((gap * expected).sum().abs() > UNITS * fmt.roundoff * expected.square().sum())
    # Rounding to nearest moves as many elements away from zero as towards it.
    many = differs.sum() >= DIFFERING * n
    away = torch.sign(a.abs() - e.abs()).sum()
    biased = (away <= -TOWARD_ZERO * n) | (away.abs() >= ONE_WAY * n)
    return found | (many if by_rows else many & biased)


def squared_arguments(
    plan_arguments: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a sum or product by which the operator gives the sum of its squared terms, in float32.

    Args:
        plan_arguments: Names in the schema, in order.
        args: Positional arguments.
        kwargs: By name.
    """

    def square(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(torch.float32).square() if value.is_floating_point() else value
        if isinstance(value, (list, tuple)):
            return [square(name, v) for v in value]
        return value * value if name in SCALES and type(value) is float else value

    return tuple(map(square, plan_arguments, args)), {k: square(k, v) for k, v in kwargs.items()}


def sum_tolerance(squared: torch.Tensor, expected: torch.Tensor, terms: float) -> torch.Tensor | None:
    """How far results of sums in float32 may be apart, by element; None where tf32 would fit in (`closeness`).

    Args:
        squared: Sums of the squared terms.
        expected: The reference's result.
        terms: How many terms enter each element.
    """
    if terms > MAX_TERMS or squared.shape != expected.shape:
        return None
    # The result itself is rounded to its own dtype: that is what `most` of `needs_judge` is for.
    size = squared.to(torch.float32).sqrt()
    if expected.dtype is torch.float32:
        size = size + expected.abs()
    return (size * (sum_units(terms) * _ROUNDOFF)).nan_to_num_(0.0, 0.0, 0.0)


def _in_order(t: torch.Tensor, view: torch.dtype) -> torch.Tensor:
    """Integers in the order of the floats: magnitudes with a sign, so that neighbours are 1 apart."""
    bits = t.view(view).to(torch.int32)
    return torch.where(bits < 0, -(bits & torch.iinfo(view).max), bits)


# How far rounding moves norms and softmaxes: the standard deviation of each element, in closed form.
#
# The oracle perturbs each input by about a unit roundoff and takes the spread of the results for the condition. For
# these operators the first derivatives are known, so the variance that such perturbations have is a few sums over each
# row: it needs no further run.

Sizes = tuple[torch.Tensor, ...]


def has_row_sizes(op: str) -> bool:
    """Whether `row_sizes` knows an operator, by its qualified name."""
    return op in _FORMULAS


def row_sizes(case: Case) -> Sizes | None:
    """Standard deviation of each result where each input is off by a unit roundoff, in unit roundoffs.

    Values that are not finite mean: not known. None where the results are not those of the formula.
    """
    named = case.arguments()
    sizes = _FORMULAS[case.op](named, case.expected)
    if len(sizes) != len(case.expected):
        # A gradient that is not wanted is no result.
        wanted = named.get("output_mask", ())
        sizes = tuple([size for size, is_wanted in zip(sizes, wanted, strict=False) if is_wanted])
    return sizes if [_n_elements(s) for s in sizes] == [_n_elements(e) for e in case.expected] else None


# Each formula is written in place: a fresh tensor costs page faults, which take longer than the arithmetic on it.


def _layer_norm(named: dict[str, Any], _: Any) -> Sizes:
    x, shape, weight, bias = named["input"], named["normalized_shape"], named["weight"], named["bias"]
    rows, n = _inner(shape), prod(shape)
    normal = x - x.mean(rows, True)
    square = normal * normal
    # `var_mean` on the CPU takes as long as fifty passes.
    rstd = square.mean(rows, True).add_(named["eps"]).rsqrt_()
    normal.mul_(rstd)
    torch.mul(x, x, out=square)
    of_mean = square.sum(rows, True).sqrt_().div_(n)
    found, of_normal, moved = _of_normal(square, normal, rows, n)
    of_rstd = moved.sqrt_().mul_(rstd * rstd).div_(n)
    found.mul_(rstd * rstd)
    if weight is not None:
        # The weight is off as well.
        found.add_(of_normal).mul_(weight * weight)
    if bias is not None:
        found.add_(bias * bias)
    return _root(found), of_mean, of_rstd


def _of_normal(
    square: torch.Tensor, normal: torch.Tensor, rows: tuple[int, ...], n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum over j of ``square_j * (delta_ij - (1 + normal_i normal_j) / n) ** 2``: the derivative of a normalization.

    Returns:
        The sum for each element i; ``normal ** 2``; the sum of ``square * normal ** 2`` over each row.
    """
    of_normal = normal * normal
    found = square * normal
    s0, s1 = square.sum(rows, True), found.sum(rows, True)
    s2 = found.mul_(normal).sum(rows, True)
    torch.add(of_normal, 1.0, out=found).mul_(-2.0 / n).add_(1.0).mul_(square)
    found.addcmul_(normal, s1, value=2.0 / (n * n)).addcmul_(of_normal, s2, value=1.0 / (n * n))
    return found.add_(s0, alpha=1.0 / (n * n)), of_normal, s2


def _layer_norm_backward(named: dict[str, Any], _: Any) -> Sizes:
    grad, x, shape, weight = named["grad_out"], named["input"], named["normalized_shape"], named["weight"]
    mean, rstd = named["mean"], named["rstd"]
    rows, n = _inner(shape), prod(shape)
    batch = tuple(range(x.dim() - len(shape)))
    normal = (x - mean).mul_(rstd)
    a = grad if weight is None else grad * weight
    scratch = a * normal
    c1, c2 = a.mean(rows, True), scratch.mean(rows, True)
    square = a * a
    found, of_normal, _moved = _of_normal(square, normal, rows, n)
    if weight is not None:
        # The gradient and the weight are off each by itself, and enter alike.
        found.mul_(2.0)
    scaled = (x * x).mul_(rstd * rstd)
    # Of the input itself.
    found.addcmul_(of_normal, square.mul_(scaled).sum(rows, True), value=1.0 / (n * n))
    found.addcmul_(scratch.mul_(2.0 / n).add_(c2).mul_(scaled), c2)
    # Of the mean, and of the reciprocal of the deviation.
    torch.mul(normal, c2, out=scratch)
    found.add_(torch.sub(a, scratch, alpha=3.0, out=square).sub_(c1).square_())
    found.add_(torch.mul(normal, c1, out=scratch).add_(c2).mul_(mean * rstd).square_())
    of_input = _root(found.mul_(rstd * rstd))
    torch.mul(grad, grad, out=square)
    moved = of_normal.mul_(2.0).add_(scaled).add_((mean * rstd).square_()).mul_(square)
    if batch:
        moved, square = moved.sum(batch), square.sum(batch)
    return of_input, _root(moved), square.sqrt_()


def _softmax(named: dict[str, Any], expected: Any) -> Sizes:
    x, y, dim = named["self"], expected[0], named["dim"]
    # What is masked out by -inf is 0, and stays so.
    square = x.masked_fill(y == 0, 0.0).square_()
    scratch = y * y
    total = scratch.mul_(square).sum(dim, True)
    found = torch.mul(y, -2.0, out=scratch).add_(1.0).mul_(square).add_(total)
    return (_root(found).mul_(y),)


def _softmax_backward(named: dict[str, Any], _: Any) -> Sizes:
    grad, y, dim = named["grad_output"], named["output"], named["dim"]
    product = grad * y
    rest = grad - product.sum(dim, True)
    scratch = product * product
    both = scratch.sum(dim, True).mul_(2.0)
    found = torch.mul(y, -2.0, out=scratch).add_(1.0).mul_(grad).mul_(grad).add_(both)
    found.addcmul_(rest, product.mul_(-2.0).add_(rest))
    return (_root(found).mul_(y),)


def _log_softmax(named: dict[str, Any], expected: Any) -> Sizes:
    square, y, dim = named["self"].square(), expected[0].exp(), named["dim"]
    total = (y * y).mul_(square).sum(dim, True)
    return (_root(y.mul_(-2.0).add_(1.0).mul_(square).add_(total)),)


def _log_softmax_backward(named: dict[str, Any], _: Any) -> Sizes:
    grad, out, dim = named["grad_output"], named["output"], named["dim"]
    y, square = out.exp(), grad * grad
    moved = (y * out).mul_(grad.sum(dim, True)).square_()
    moved.addcmul_(y.square(), square.sum(dim, True))
    return (_root(moved.add_(y.mul_(-2.0).add_(1.0).mul_(square))),)


def _n_elements(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else -1


def _root(variance: torch.Tensor) -> torch.Tensor:
    # Terms that cancel may leave a rounding error below 0.
    return variance.clamp_min_(0.0).sqrt_()


def _inner(shape: Any) -> tuple[int, ...]:
    return tuple(range(-len(shape), 0))


_FORMULAS: dict[str, Callable[[dict[str, Any], Any], Sizes]] = {
    "aten::native_layer_norm": _layer_norm,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::_softmax": _softmax,
    "aten::_safe_softmax": _softmax,
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_log_softmax": _log_softmax,
    "aten::_log_softmax_backward_data": _log_softmax_backward,
}
