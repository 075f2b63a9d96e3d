"""The float64 oracle: what the operator should have returned, and how well its inputs determine that.

The operator runs on the CPU with its floating inputs widened to float64, once as they are and a few times with every
input perturbed by about one unit roundoff of the dtype that the operator computes in (Monte Carlo arithmetic, MCA).
The spread of the results measures the condition: an error of that size cannot be distinguished from rounding.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from shadowrun.judge.rounding.rounding_bounds import reduction_length
from shadowrun.numerics.elements import plain
from shadowrun.numerics.excess import Truth
from shadowrun.numerics.precision import FORMATS
from shadowrun.operators.case import exact_copy, item_of, tensors
from shadowrun.operators.facts import base_name
from shadowrun.operators.vendor_ops import evaluate
from shadowrun.strided import span
from shadowrun.torch_private import is_zero_tensor, schema_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from shadowrun.operators.case import Case, Value

__all__ = ["FEW_RUNS", "MANY_RUNS", "NoOracle", "Oracle", "bytes_needed", "n_terms"]

FEW_RUNS: Final = 4
"""Perturbed runs before a first opinion: the greatest of four normal deviates is below a tenth of their standard
deviation in 4 of 100,000 elements."""
MANY_RUNS: Final = 16
"""Perturbed runs before a call is a mismatch: the same happens once in 10**18 elements."""

# Of a factor of `Oracle._perturb_values`, in squared roundoffs: 0.5 to 1, of either sign.
_VARIANCE: Final = 7 / 12
# Standard deviations that the greatest magnitude of 16 normal deviates has on average (2.08).
_GREATEST_OF_MANY: Final = 2.0

_WIDE: Final = {
    **dict.fromkeys(FORMATS, torch.float64),
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
    torch.complex128: torch.complex128,
}
_REAL: Final = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


_COMPRESSED: Final = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


# Relative step that float64 can make: half of it, its unit roundoff, is rounded away upwards, and often downwards.
_MIN_STEP = 2.0**-52


class NoOracle(Exception):  # noqa: N818 (a reason, not an error)
    """There is no oracle for this call; the message says why."""


class Oracle:
    """The oracle on one call.

    Args:
        case: The call.
        max_bytes: Memory that the widened inputs and results may take.

    Attributes:
        truths: One for each result; None for results that are no tensor of numbers.
        n_perturbed_runs: Runs on perturbed inputs so far.

    Raises:
        NoOracle: If the call is too large, or the operator does not run in float64.
    """

    def __init__(self, case: Case, max_bytes: int) -> None:
        self._case = case
        needed = bytes_needed(case)
        if needed > max_bytes:
            raise NoOracle(f"no float64 oracle: it needs {needed / 2**20:.0f} MiB")
        self.roundoff = compute_roundoff(case)
        self._coarsest = max(self.roundoff, result_roundoff(case))
        self.n_perturbed_runs = 0
        # Of its own and seeded: the program's stream stays, and the same call always has the same verdict.
        self._steps = _Steps()
        self._values = self._run(None)
        self.truths = tuple(_truth(v) for v in self._values)

    def perturb(self, n_runs: int) -> None:
        """Run on perturbed inputs until there are `n_runs` such runs, widening the spreads."""
        # For products, one run on squared inputs gives what 16 perturbed runs would.
        if not self.n_perturbed_runs and self._estimate_spread():
            self.n_perturbed_runs = MANY_RUNS
        for _ in range(self.n_perturbed_runs, n_runs):
            for truth, value in zip(self.truths, self._evaluate(self._perturbed, perturb=True), strict=True):
                if truth is not None:
                    _widen(truth, value)
        self.n_perturbed_runs = max(self.n_perturbed_runs, n_runs)

    def _estimate_spread(self) -> bool:
        """Widen the spreads by what perturbed runs would give, where the operator itself computes that."""
        # A result of an operator that is linear in each of its inputs moves by the sum of its terms, each times a
        # random factor: a normal deviate whose variance is the sum of the squared terms.
        case, factors = self._case, self._case.facts.n_factors
        floats = [t for t in tensors(case.args, case.kwargs) if t.is_floating_point() or t.is_complex()]
        # A scale would have to be squared too.
        scaled = any(case.arguments().get(name, 1) not in (0, 1) for name in ("alpha", "beta"))
        if not factors or scaled or len({t.dtype for t in floats}) != 1 or floats[0].dtype not in FORMATS:
            return False
        try:
            squares = [_array(v) if isinstance(v, torch.Tensor) else None for v in self.on_changed_inputs(torch.square)]
        except NoOracle:
            return False
        pairs = [(t, v) for t, v in zip(self.truths, squares, strict=True) if t is not None and v is not None]
        # Squares overflow from 1e154 on in float64; then perturbed runs measure the spread.
        if any(t.value.size != v.size or not np.isfinite(v).all() for t, v in pairs):
            return False
        deviation = max(self._roundoff_of(floats[0]), _MIN_STEP) * (factors * _VARIANCE) ** 0.5
        for truth, squared in pairs:
            np.maximum(truth.spread, _GREATEST_OF_MANY * deviation * np.sqrt(squared), out=truth.spread)
        return True

    def note_open_classes(self, position: int) -> None:
        """Mark the elements of a sum whose terms overflow in one order and not in another.

        `Truth.flips` gets those whose terms exceed the greatest number of the accumulator, taken by magnitude: a right
        kernel may return infinity there, or NaN for two partial sums of opposite sign, and another the finite sum. A
        kernel with a fused multiply-add does not round the product that another rounds to infinity.
        """
        truth, expected = self.truths[position], self._case.expected[position]
        if truth is None or not isinstance(expected, torch.Tensor):
            return
        # Kernels add up 16-bit terms in float32.
        dtype = _REAL.get(expected.dtype, expected.dtype)
        largest = FORMATS[dtype if dtype is torch.float64 else torch.float32].largest
        for product in _products(self._case):
            whole = torch.broadcast_to(product, expected.shape)
            np.logical_or(truth.flips, _array(whole.isfinite() & (whole.abs() > largest)), out=truth.flips)
        if not self._case.facts.n_factors:
            return
        # NaN or infinity in an input decides the class in any order.
        if not all(bool(t.isfinite().all()) for t in tensors(self._case.args, self._case.kwargs)):
            return
        size = self.on_changed_inputs(torch.abs)[position]
        if isinstance(size, torch.Tensor) and (found := np.abs(_array(size))).size == truth.flips.size:
            # A factor `beta` below 0 makes a difference of two infinite sizes: NaN is beyond the largest too.
            np.logical_or(truth.flips, ~(found < largest), out=truth.flips)

    def on_changed_inputs(
        self,
        change: Callable[[torch.Tensor], torch.Tensor],
        only: Callable[[torch.Tensor], bool] = lambda _: True,
    ) -> tuple[Value, ...]:
        """Results on changed inputs, in float64.

        Args:
            change: Takes the flat values of a floating input, float64, and gives others of the same size.
            only: Which inputs are changed.
        """
        return self._run(change, only)

    def with_argument(self, name: str, value: object) -> tuple[Value, ...]:
        """Results with another value of one argument, in float64.

        Args:
            name: Its name in the schema.
            value: Instead of what was given.
        """
        return self._evaluate(lambda t: widen(t, None), replaced={name: value})

    def _run(
        self,
        change: Callable[[torch.Tensor], torch.Tensor] | None,
        only: Callable[[torch.Tensor], bool] = lambda _: True,
    ) -> tuple[Value, ...]:
        return self._evaluate(lambda t: widen(t, change if only(t) else None))

    def _evaluate(
        self,
        convert: Callable[[torch.Tensor], torch.Tensor],
        *,
        perturb: bool = False,
        replaced: Mapping[str, object] = MappingProxyType({}),
    ) -> tuple[Value, ...]:
        case = self._case
        try:
            args, kwargs = case.fresh_inputs(convert)
            args, kwargs = self._rewrite(args, kwargs, perturb=perturb)
            schema = schema_of(case.func).arguments
            args = tuple(replaced.get(schema[i].name, a) for i, a in enumerate(args))
            given = {a.name for a in schema[: len(args)]}
            kwargs = {**kwargs, **{k: v for k, v in replaced.items() if k not in given}}
            # On the CPU in float64: an operator that is wrong there is taken for the truth (docs/verdicts.md, limits).
            names, values = evaluate(case, args, kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            reason = str(error).partition("\n")[0][:160]
            raise NoOracle(f"no float64 oracle: {reason}") from error
        # A call that stands in for the operator may give its first results only.
        if names[: len(case.names)] != case.names:
            raise NoOracle(f"no float64 oracle: it returned {', '.join(names)}")
        return values[: len(case.names)]

    def _perturbed(self, t: torch.Tensor) -> torch.Tensor:
        return widen(t, lambda flat: self._perturb_values(flat, self._roundoff_of(t)))

    def _roundoff_of(self, t: torch.Tensor) -> float:
        # A 16-bit operator with one float32 input (saved statistics) still rounds its 16-bit values to 16 bits.
        fmt = FORMATS.get(_REAL.get(t.dtype, t.dtype))
        return self.roundoff if fmt is None else max(self.roundoff, min(fmt.roundoff, self._coarsest))

    def _perturb_values(self, flat: torch.Tensor, roundoff: float) -> torch.Tensor:
        return flat.mul_(self._steps.take(flat.numel()).mul(max(roundoff, _MIN_STEP)).add_(1.0))

    def _rewrite(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, perturb: bool) -> Any:
        schema = schema_of(self._case.func).arguments
        floats = any(t.is_floating_point() or t.is_complex() for t in tensors(args, kwargs))
        numbers = self._case.facts.from_numbers

        def change(name: str, value: Any) -> Any:
            # An argument such as `dtype=torch.float16` would round the truth to that dtype.
            if isinstance(value, torch.dtype):
                return _WIDE.get(value, value)
            if isinstance(value, torch.device):
                return torch.device("cpu")
            # The CPU's softmax refuses this conversion.
            if name == "half_to_float":
                return False
            held = type(value) is float and not (floats and float(np.float32(value)) == value)
            if perturb and (held or (name in numbers and type(value) is int)):
                # A device may hold a scalar in its compute dtype; exponents such as 2.0 must stay.
                return value * (1 + self.roundoff * self._steps.uniform())
            return value

        changed = tuple(change(schema[i].name, a) for i, a in enumerate(args))
        by_name = {k: change(k, v) for k, v in kwargs.items()}
        results = [v for v in self._case.expected if isinstance(v, torch.Tensor)]
        if numbers and by_name.get("dtype") is None and all(v.is_floating_point() for v in results):
            # No input is wider than the call's, and the default dtype would round the truth.
            by_name["dtype"] = torch.float64
        return changed, by_name


class _Steps:
    """Random steps, from the same stream in each oracle; the beginning of the stream is drawn once for all."""

    _first = torch.empty(0, dtype=torch.float64)
    _seed = 0x5EED
    _most = 1 << 21

    def __init__(self) -> None:
        self._at = 0

    def take(self, n: int) -> torch.Tensor:
        """The next `n` of the stream; not to be written to.

        Each is a sign times 0.5 to 1: no run is wasted on small steps, and equal inputs get different values.
        """
        start, self._at = self._at, self._at + n
        if self._at > self._most:
            return self._drawn(start, n)
        first = _Steps._first
        if first.numel() < self._at:
            # A power of two: a larger call each time would otherwise draw all of it again.
            first = _Steps._first = self._drawn(0, min(self._most, 1 << (self._at - 1).bit_length()))
        return first[start : self._at]

    def uniform(self) -> float:
        """The next number of the stream, from -1 to 1."""
        step = float(self.take(1))
        return 2.0 * (step + 1.0 if step < 0 else step) - 1.0

    def _drawn(self, start: int, n: int) -> torch.Tensor:
        stream = np.random.PCG64(self._seed)
        stream.advance(start)
        r = np.random.Generator(stream).random(n)
        return torch.from_numpy(np.where(r < 0.5, -1.0 + r, r))


def bytes_needed(case: Case) -> int:
    """Memory that the widened inputs and results of a call take, with their intermediate values."""
    # 16 bytes for each element of an input and 40 for each of a result: widened values, truth, spread and a perturbed
    # run.
    needed = sum(16 * _n_elements(t) for t in tensors(case.args, case.kwargs))
    return needed + sum(40 * v.numel() for v in case.expected if isinstance(v, torch.Tensor))


def compute_roundoff(case: Case) -> float:
    """Unit roundoff of the dtype in which the operator may be expected to compute.

    That is the widest of its floating inputs, or of its results if it has none. 16-bit operators may be expected to
    compute in float32, but not each step of them: a library may round the product before it adds the bias.
    """
    inputs = list(tensors(case.args, case.kwargs))
    # A Python number arrives as a 0-dim float64 tensor, and does not decide the dtype of the operator.
    dimensioned = [t for t in inputs if t.dim() > 0] or inputs
    dtypes = [_REAL.get(t.dtype, t.dtype) for t in dimensioned]
    known = [d for d in dtypes if d in FORMATS]
    if not known:
        results = [v.dtype for v in case.expected if isinstance(v, torch.Tensor)]
        known = [d for d in (_REAL.get(d, d) for d in results) if d in FORMATS] or [torch.float32]
    return min(FORMATS[d].roundoff for d in known)


def result_roundoff(case: Case) -> float:
    """Unit roundoff of the finest floating result, 0 without any: what each 16-bit value on its way there may be."""
    dtypes = [_REAL.get(v.dtype, v.dtype) for v in case.expected if isinstance(v, torch.Tensor)]
    return min((FORMATS[d].roundoff for d in dtypes if d in FORMATS), default=0.0)


def n_terms(case: Case, position: int) -> float:
    """About how many terms enter each element of a result; see `judge.rounding.rounding_bounds.reduction_length`."""
    value = case.expected[position]
    size = value.numel() if isinstance(value, torch.Tensor) else 1
    given = _inputs_of(case, position) if case.facts.lists else tensors(case.args, case.kwargs)
    return reduction_length((t.numel() for t in given if t.is_floating_point()), size)


def _inputs_of(case: Case, position: int) -> Iterator[torch.Tensor]:
    """Tensors from which one item of an operator of lists is computed."""
    item = item_of(case.names[position])
    for value in (*case.args, *case.kwargs.values()):
        if not isinstance(value, (list, tuple)):
            yield from tensors((value,), {})
        elif item is not None and item < len(value):
            yield from tensors((value[item],), {})


def widen(t: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor] | None) -> torch.Tensor:
    """Copy a tensor to float64 or complex128 with its exact layout; integers and bools stay.

    Args:
        t: CPU tensor.
        change: Applied to the flat real values, a fresh float64 tensor.
    """
    if not (t.is_floating_point() or t.is_complex()):
        return exact_copy(t)
    wide = _WIDE.get(t.dtype, torch.float64)
    if t.layout != torch.strided:
        copied = t.detach().to(wide, copy=True)
        if change is not None:
            # `values()` raises on a COO tensor that is not coalesced.
            copied = copied.coalesce() if copied.layout == torch.sparse_coo else copied
            values = copied.values()
            values.copy_(_changed(values.clone(), change))
        return copied
    if t.is_conj() or t.is_neg() or is_zero_tensor(t):
        # Such a view has the memory of another tensor, or none: `as_strided` over it would lose its flag.
        base = exact_copy(t)
        return widen(torch.zeros_like(base) if is_zero_tensor(t) else base.resolve_conj().resolve_neg(), change)
    # Also gaps between strides and repeated elements stay, since a kernel may choose another path by layout.
    flat = t.detach().as_strided((_n_elements(t),), (1,), t.storage_offset()).to(wide, copy=True)
    if change is not None:
        flat = _changed(flat, change)
    return flat.as_strided(t.shape, t.stride(), 0)


def _products(case: Case) -> list[torch.Tensor]:
    """Products and differences that a kernel may round before it adds the rest, in float64; of real numbers only."""
    given = case.arguments()
    if any(t.is_complex() for t in tensors(case.args, case.kwargs)) or isinstance(given.get("self"), (list, tuple)):
        return []
    named = {k: v.to(torch.float64) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    match base_name(case.op):
        case "addcmul":
            a, b, value = named["tensor1"], named["tensor2"], named["value"]
            return [a * b, value * a, value * a * b]
        case "addcdiv":
            a, b, value = named["tensor1"], named["tensor2"], named["value"]
            return [a / b, value * a, value * a / b]
        case "add" | "sub":
            return [torch.as_tensor(named["alpha"] * named["other"])] if named["alpha"] != 1 else []
        case "rsub":
            return [named["alpha"] * named["self"]] if named["alpha"] != 1 else []
        case "lerp":
            distance = named["end"] - named["self"]
            return [distance, distance * named["weight"]]
    return []


def _changed(values: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if values.is_complex():
        real = torch.view_as_real(values).reshape(-1)
        return torch.view_as_complex(change(real).reshape(*values.shape, 2))
    return change(values.reshape(-1)).reshape(values.shape)


def _n_elements(t: torch.Tensor) -> int:
    """Elements of a copy of a tensor, the gaps between its strides among them."""
    # Sparse and nested tensors raise when they are asked for strides. Of a compressed one, `numel` counts the zeros
    # that it does not store: the oracle would refuse a matrix whose copies are small.
    if t.layout != torch.strided or t.is_nested:
        return t.values().numel() if t.layout in _COMPRESSED else t.numel()
    return span(t.shape, t.stride())


def _array(value: torch.Tensor) -> npt.NDArray[Any]:
    flat = plain(value).reshape(-1)
    return flat.numpy()


def _truth(value: Value) -> Truth | None:
    if not isinstance(value, torch.Tensor):
        if value is None:
            return None
        value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    array = _array(value).copy()
    size = np.abs(array.astype(np.float64))
    if value.is_complex():
        # A component near 0 has the rounding error of the whole number, so the modulus is the unit of both.
        size = np.repeat(np.hypot(size[0::2], size[1::2]), 2)
    return Truth(array, size, np.zeros(array.size), np.zeros(array.size, bool))


def _widen(truth: Truth, value: Value) -> None:
    perturbed = _array(value if isinstance(value, torch.Tensor) else torch.tensor(value))
    if perturbed.size != truth.value.size:
        # The number of elements depends on the values, and rounding decides it.
        truth.flips[:] = True
        return
    with np.errstate(all="ignore"):
        gap = np.abs(perturbed.astype(np.float64) - truth.value.astype(np.float64))
    if truth.value.dtype != np.float64:
        # An integer that rounding of the inputs can change (argmax, a comparison) is undefined, not wrong.
        np.logical_or(truth.flips, perturbed != truth.value, out=truth.flips)
    else:
        same = (perturbed == truth.value) | (np.isnan(perturbed) & np.isnan(truth.value))
        changed = ~(np.isfinite(perturbed) & np.isfinite(truth.value)) & ~same
        np.logical_or(truth.flips, changed, out=truth.flips)
    np.maximum(truth.spread, gap, out=truth.spread, where=np.isfinite(gap))
