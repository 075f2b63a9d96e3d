"""Closeness: results so near to the reference's that the difference is rounding, without asking the oracle.

On another device almost every sum differs by rounding, and the float64 oracle with its perturbations takes twenty
times as long as the operator. Most calls are decided by less:

* Results within a few units in the last place of each other, at every element.
* Sums and products: the errors of rounding add up like the terms do, so their size is the root of the sum of the
  squared terms. An operator that is linear in each of its inputs gives that sum itself, on squared inputs.
* Short chains of arithmetic (optimizers): the sum of the magnitudes, which the operator gives on magnitudes.
* Norms and softmaxes: what an error of the inputs does to each element, in closed form (`row_sizes`).
* Sums in 16 bits: the rounding of the float32 sum and of the result, at the few elements that are farther off.

The bounds lie far below those of the oracle (`bounds`), and are held against the reference instead of the truth: what
passes here is at most that much farther from the truth than the reference is. What does not pass is not yet a mismatch:
the oracle decides.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.judge.oracle import n_terms
from shadowrun.judge.result_diff import flat_values
from shadowrun.judge.rounding.bias import has_common_factor, may_be_biased
from shadowrun.judge.rounding.row_sizes import has_row_sizes, row_sizes
from shadowrun.numerics.device_statistics import COUNTED
from shadowrun.numerics.form import meta
from shadowrun.numerics.nearness import nearness
from shadowrun.numerics.precision import FORMATS
from shadowrun.operators.case import tensors
from shadowrun.operators.facts import ulp_bound
from shadowrun.operators.vendor_ops import evaluate
from shadowrun.torch_private import schema_of
from shadowrun.types import Cause, Status, TensorDiff, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shadowrun.numerics.device_statistics import DeviceStatistics
    from shadowrun.numerics.precision import FloatFormat
    from shadowrun.operators.case import Case, Value

__all__ = [
    "ClosenessCheck",
    "are_close",
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
_FEW: Final = 8
"""Their sizes are computed for the elements that need one where no more than one in so many does."""
_MANY: Final = 1 << 18
"""Elements of a result of arithmetic from which on to gather some takes less time than to compute all sizes."""
MAX_GATHERED: Final = 1 << 22
"""Elements of the rows, or of the columns, that a product takes at some elements of its result."""
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
        if fmt.mantissa < 23:
            return self._coarse(position, d, fmt)
        # The units of `row_sizes` do not grow with the number of terms.
        if not self._has_sizes or not (self._has_rows or n_terms(self._case, position) <= MAX_TERMS):
            return None
        units = self._units(position)
        actual, expected = (flat_values(v[position]) for v in (self._case.actual, self._case.expected))
        near = nearness(actual, expected, units * fmt.roundoff, fmt.smallest, weighted=self._has_rows)
        if near.far.numel():
            # Terms that cancel: their own size counts at these elements.
            size = self._size(position, near.far)
            if size is None:
                return None
            e = expected[near.far]
            allowed = size.mul_(units * fmt.roundoff).add_(e.abs().mul_(units * fmt.roundoff).add_(fmt.smallest))
            gap = actual[near.far].sub_(e).abs_()
            if not bool(allowed.isfinite().all()) or not bool((gap <= allowed).all()):
                return None
        # A factor within the bound of each element is a fault all the same.
        if has_common_factor(near, expected.numel(), fmt.roundoff):
            return None
        return _rounding(f"max {d.max_ulp} ULP, within {units:g} units of rounding of the reference")

    def _coarse(self, position: int, d: TensorDiff, fmt: FloatFormat) -> Verdict | None:
        """MATCH for a sum in 16 bits of which few elements are more than a unit off: it is accumulated in float32.

        Such elements cancel: the rounding of the float32 sum may be many units of what is left of it.
        """
        case = self._case
        if not self._facts.n_factors or n_terms(case, position) > MAX_TERMS or may_be_biased(case, position, d):
            return None
        a, e = (flat_values(v[position]) for v in (case.actual, case.expected))
        where = (a.view(fmt.view) != e.view(fmt.view)).nonzero().flatten()
        order = (_in_order(t[where], fmt.view) for t in (a, e))
        where = where[(next(order) - next(order)).abs() > few_ulp(fmt)]
        size = self._size_at(position, where)
        if size is None:
            return None
        a, e = a[where].to(torch.float32), e[where].to(torch.float32)
        # Two right sums are as far apart as their rounding, and then each is rounded to 16 bits.
        exponent = torch.maximum(a.abs(), e.abs()).frexp().exponent - 1
        spacing = (exponent - fmt.mantissa).to(torch.float32).exp2_()
        units = self._units(position)
        allowed = (size + e.abs()).mul_(units * _ROUNDOFF).add_(spacing.clamp_min_(fmt.smallest))
        if not bool(allowed.isfinite().all()) or not bool(((a - e).abs() <= allowed).all()):
            return None
        return _rounding(f"max {d.max_ulp} ULP, within 1 ULP and {units:g} units of rounding of the float32 sum")

    def _size_at(self, position: int, where: torch.Tensor) -> torch.Tensor | None:
        """As `_size`, of a sum in 16 bits at some elements of a result, in unit roundoffs of float32."""
        named, result = self._case.arguments(), self._case.expected[position]
        assert isinstance(result, torch.Tensor)
        shape, factors = result.shape, [named[name] for name in self._facts.factors]
        plain = factors and all(t.dim() == len(shape) and t.layout is torch.strided for t in factors)
        if not plain or result.is_complex() or where.numel() * factors[0].shape[-1] > MAX_GATHERED:
            # Squares of 16-bit values overflow (float16 from 256 on) or lose their digits.
            sizes = None
            if self._can_evaluate((torch.float32, torch.bfloat16, torch.float16)):
                sizes = self._evaluated(lambda t: t.to(torch.float32).square(), lambda x: x * x)
            value = sizes[position] if sizes is not None else None
            return flat_values(value)[where].to(torch.float32).sqrt() if isinstance(value, torch.Tensor) else None
        # A product at few elements is a sum for each, over a row and a column.
        *batch, i, j = torch.unravel_index(where, shape)
        left, right = factors[0][*batch, i], factors[1].mT[*batch, j]
        size: torch.Tensor = (left.to(torch.float32) * right.to(torch.float32)).square_().sum(1).sqrt_()
        if not self._facts.adds_self:
            return size
        added = named["self"].expand(shape)[*batch, i, j].to(torch.float32)
        product: torch.Tensor = size * named["alpha"]
        return product.hypot(added * named["beta"])

    def limit(self, position: int) -> str:
        """Up to what a result is close, in words."""
        fmt = FORMATS.get(flat_values(self._case.expected[position]).dtype)
        if fmt is None:
            return "bits"
        if fmt.mantissa < 23:
            return f"{few_ulp(fmt)} ULP"
        units = f", or {self._units(position):g} units of rounding" if self._has_sizes else ""
        return f"{few_ulp(fmt)} ULP{units}"

    def _units(self, position: int) -> float:
        if not self._facts.n_factors:
            return ROW_UNITS if self._has_rows else CHAIN_UNITS
        return sum_units(n_terms(self._case, position))

    @cached_property
    def _has_sizes(self) -> bool:
        """Whether the size of the rounding errors at each element is known, and takes no more memory than it may."""
        case = self._case
        if self._facts.n_factors or self._facts.chain:
            return self._can_evaluate((torch.float32, torch.float64))
        if not self._has_rows:
            return False
        given = [t for t in tensors((*case.args, *case.expected), case.kwargs) if t.is_floating_point()]
        # Statistics and gradients of 16-bit inputs are computed in float32, as these sizes are.
        dtypes = {t.dtype for t in given}
        of_float32 = torch.float32 in dtypes and dtypes <= {torch.float32, torch.bfloat16, torch.float16}
        plain = (len(dtypes) == 1 or of_float32) and all(t.layout is torch.strided for t in given)
        return plain and _ROW_COPIES * max(t.nbytes for t in given) <= self._max_bytes

    def _size(self, position: int, where: torch.Tensor) -> torch.Tensor | None:
        """Size of the rounding errors at some elements, in unit roundoffs."""
        result = flat_values(self._case.expected[position])
        few = where.numel() * _FEW <= result.numel()
        if few and self._facts.n_factors and result.dtype is torch.float32:
            return self._size_at(position, where)
        is_chain = self._facts.chain and not self._facts.n_factors and not _takes_lists(self._case)
        if few and is_chain and result.numel() >= _MANY:
            return self._chain_at(position, where)
        sizes = self._sizes
        if sizes is None or not isinstance(sizes[position], torch.Tensor):
            return None
        size = flat_values(sizes[position])[where]
        return size.sqrt_() if self._facts.n_factors else size.abs_()

    @cached_property
    def _sizes(self) -> tuple[Value, ...] | None:
        """For each result, sizes of the rounding errors at each element; of sums, their squares."""
        if self._facts.n_factors:
            return self._evaluated(torch.square, lambda x: x * x)
        if self._facts.chain:
            return self._evaluated(torch.abs, abs)
        with torch.no_grad():
            return row_sizes(self._case)

    def _chain_at(self, position: int, where: torch.Tensor) -> torch.Tensor | None:
        """As `_size`, of an operator that computes each element by itself."""
        result = self._case.expected[position]
        assert isinstance(result, torch.Tensor)
        index = torch.unravel_index(where, result.shape)
        sizes = self._evaluated(torch.abs, abs, lambda t: t.expand(result.shape)[index])
        value = sizes[position] if sizes is not None else None
        return value.abs() if isinstance(value, torch.Tensor) else None

    def _can_evaluate(self, dtypes: tuple[torch.dtype, ...]) -> bool:
        """Whether the operator may run on other inputs: by memory, and by the kinds of the inputs."""
        case = self._case
        if sum(t.nbytes for t in tensors((*case.args, *case.expected, *case.expected), case.kwargs)) > self._max_bytes:
            return False
        floats = (t for t in tensors(case.args, case.kwargs) if t.is_floating_point() or t.is_complex())
        return all(t.dtype in dtypes and t.layout is torch.strided for t in floats)

    def _evaluated(
        self,
        change: Callable[[torch.Tensor], torch.Tensor],
        change_number: Callable[[Any], Any],
        part: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[Value, ...] | None:
        """Results of the operator on other inputs: all of each or a part, with other values."""
        case = self._case
        schema = schema_of(case.func).arguments

        minuend = case.arguments().get(self._facts.subtracts_from)
        negated = {id(t) for t in tensors((minuend,), {})}

        def changed(t: torch.Tensor) -> torch.Tensor:
            found = t.detach() if part is None else part(t.detach())
            found = change(found) if t.is_floating_point() else found.clone()
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


def _takes_lists(case: Case) -> bool:
    return any(isinstance(value, (list, tuple)) for value in case.arguments().values())


def _rounding(evidence: str) -> Verdict:
    return Verdict(Status.MATCH, Cause.ROUNDING, "", evidence)


# Kernels add up 16-bit terms in float32.
_ROUNDOFF: Final = FORMATS[torch.float32].roundoff


def are_close(case: Case, found: Mapping[int, DeviceStatistics], max_bytes: int) -> bool:
    """Whether results are close to the reference's where they lie, on an accelerator: then the judge need not see them.

    Where a reference computes in another dtype, nearly every float result differs in its last bit, and to bring each to
    the host would take longer than the step.

    Args:
        case: The call, with all tensors on one device; its `run_target` and `run_reference` are not called.
        found: Statistics of results, by position; each is of one form on both sides.
        max_bytes: Memory that the operator on other inputs may take.
    """
    check = ClosenessCheck(case, max_bytes)
    dtypes = [t.dtype for t in tensors((*case.expected, *case.args), case.kwargs)]
    bound = ulp_bound(case.op, dtypes, case.arguments())
    for position, statistics in found.items():
        value = case.expected[position]
        if not statistics.n_different:
            continue
        if not isinstance(value, torch.Tensor) or value.dtype not in COUNTED:
            return False
        form = meta(value)
        d = TensorDiff(
            case.names[position],
            form,
            form,
            n_elements=value.numel(),
            n_different=statistics.n_different,
            max_ulp=statistics.max_ulp,
            n_nan=statistics.n_class,
            n_zero_sign=statistics.n_zero_sign,
        )
        if bound is None:
            if check.verdict(position, d) is None:
                return False
        elif d.n_nan or d.n_zero_sign or d.max_ulp > bound or may_be_biased(case, position, d):
            return False
    return True


def _in_order(t: torch.Tensor, view: torch.dtype) -> torch.Tensor:
    """Integers in the order of the floats: magnitudes with a sign, so that neighbours are 1 apart."""
    bits = t.view(view).to(torch.int32)
    return torch.where(bits < 0, -(bits & torch.iinfo(view).max), bits)
