"""Whether a difference of two results is what rounding can make, for its operator and dtype.

Digests bound the distance from above: results that agree but for their lowest k mantissa bits are at most 2^k - 1 units
in the last place apart, in every element. Samples bound it from below. What lies between stays open:

* *yes*: all elements (by digests), or all sampled ones, are within what the judge allows two right implementations, and
  the samples show the difference: rounding is seldom in so few elements that none of 64 has it, and a fault may be;
* *no*: a sample is beyond it, or classes of values (NaN, infinities) differ, or the operator rounds nothing;
* *unknown*: anything else, such as a sum whose terms may have been as large as the norms of its inputs.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shadowrun.judge.rounding.rounding_bounds import (
    FAST_CONVOLUTION_PEAK,
    FAST_CONVOLUTION_RMS,
    reduction_length,
    rounding_bound,
)
from shadowrun.numerics.hash_ladder import mantissa_of
from shadowrun.numerics.raw_numbers import decoded, ulps_apart
from shadowrun.operators.facts import facts, ulp_bound
from shadowrun.recording.model import NONE
from shadowrun.studies.diff.compare import ARISING, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from shadowrun.operators.facts import OpFacts
    from shadowrun.studies.diff.compare import Difference
    from shadowrun.studies.diff.values import Values

__all__ = ["Judgement", "Rounding", "distances", "judge_rounding"]

Floats = Any  # npt.NDArray[np.float64], (n,)
Numbers = Any  # npt.NDArray[np.int64], (n,)
Flags = Any  # npt.NDArray[np.bool_], (n,)

_WIDTH: Final = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "complex64": 32, "complex128": 64}
_REAL: Final = {"complex64": "float32", "complex128": "float64"}
# Smallest normal number: bfloat16 has the exponents of float32.
_NORMAL: Final = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-14}
_CLASSES: Final = {"n_nan": "NaN", "n_pos_inf": "+inf", "n_neg_inf": "-inf"}
_FURTHER_CLASSES: Final = {"n_zero": "+0", "n_neg_zero": "-0", "n_subnormal": "subnormal"}


class Rounding(StrEnum):
    """Whether a difference is rounding-sized."""

    YES = "yes"
    UNKNOWN = "unknown"
    NO = "no"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The distance of two results.

    Attributes:
        rounding: Whether rounding can have made the difference.
        why: What decided.
        min_ulp: Greatest distance of the samples in units in the last place; NaN without samples.
        max_ulp: Upper bound for all elements; NaN where digests give none.
        relative: Greatest relative difference of the samples; NaN without samples.
        classes: Classes of values whose counts differ: ``("NaN", 0, 12)``.
        is_exact: All elements are in both recordings: `min_ulp` and `relative` are the greatest of all.
    """

    rounding: Rounding
    why: str
    min_ulp: float
    max_ulp: float
    relative: float
    classes: tuple[tuple[str, int, int], ...] = ()
    is_exact: bool = False


class _Samples(NamedTuple):
    """Distances of the samples of several results, see `_measure`."""

    ulp: list[float]
    relative: list[float]
    absolute: list[float]
    size: list[float]
    is_exact: list[bool]
    differ: list[bool]


@dataclass(frozen=True, slots=True)
class _Dtype:
    """A dtype by its name."""

    name: str

    @property
    def is_floating_point(self) -> bool:
        return self.name.startswith(("float", "bfloat"))

    @property
    def is_complex(self) -> bool:
        return self.name.startswith("complex")


def judge_rounding(difference: Difference, limit: int) -> dict[int, Judgement]:
    """Judge the pairs whose difference arises in the call itself, by their worst result.

    Args:
        difference: Two recordings.
        limit: How many pairs at most, in program order.
    """
    pairs = difference.where(*ARISING)[:limit]
    found: dict[int, Judgement] = {}
    compared = np.zeros(len(difference.outcomes), bool)
    compared[difference.results.pair] = True
    nan = float("nan")
    for pair in difference.where(Outcome.FORM)[:limit].tolist():
        if not compared[pair]:
            found[pair] = Judgement(Rounding.NO, "dtypes, shapes or placements differ", nan, nan, nan)
    for pair in pairs[difference.undeclared[pairs]].tolist():
        found[pair] = Judgement(Rounding.NO, "memory that the schema does not declare", nan, nan, nan)
    others = difference.where(Outcome.OTHER_CALLS)[:limit].tolist()
    for pair in others:
        found[pair] = Judgement(Rounding.UNKNOWN, "no bound for other calls", nan, nan, nan)
    pairs = pairs[~np.isin(pairs, others)]
    results = difference.results
    which = np.flatnonzero(results.differs & np.isin(results.pair, pairs))
    order = list(Rounding)
    for number, judgement in zip(results.pair[which].tolist(), _judged(difference, which), strict=True):
        # By the order of `Rounding`: one result that is not rounding makes the call so, whatever the others are.
        if number not in found or order.index(judgement.rounding) > order.index(found[number].rounding):
            found[number] = judgement
    return found


def _judged(difference: Difference, which: Numbers) -> list[Judgement]:
    """Judgements of result pairs, in their order."""
    a, b, results = difference.first, difference.second, difference.results
    x, y = results.first[which], results.second[which]
    groups: dict[tuple[Any, ...], list[int]] = {}
    forms = [f.dtype for f in a.recording.forms]
    # Grouped by all that decides the bound: it is computed once for thousands of results, and the samples in one
    # array.
    n_samples = a.recording.results["n_samples"]
    has_float = _has_float_input(a)
    contexts = a.recording.calls["context"][a.call[x]].tolist()
    for k, (row, context, lost) in enumerate(zip(x.tolist(), contexts, results.lost[which].tolist(), strict=True)):
        dtype = forms[a.recording.results["form"][row]]
        key = context, dtype, int(n_samples[a.source[row]]), bool(has_float[a.call[row]]), lost
        groups.setdefault(key, []).append(k)
    found: list[Any] = [None] * len(which)
    inputs = _FloatInputs(a)
    for (context, dtype, _, floats, lost), members in groups.items():
        group = _Group(a, b, x[members], y[members], context, dtype, lost, inputs, has_float_inputs=floats)
        for k, judgement in zip(members, group.judgements(), strict=True):
            found[k] = judgement
    return found


def _has_float_input(values: Values) -> npt.NDArray[np.bool_]:
    """Whether a call reads a floating tensor: (n_calls,)."""
    recording = values.recording
    of_form = np.array([_Dtype(f.dtype).is_floating_point or _Dtype(f.dtype).is_complex for f in recording.forms], bool)
    inputs = recording.inputs
    floats = np.zeros(len(inputs), bool)
    floats[inputs != NONE] = of_form[recording.results["form"][inputs[inputs != NONE]]] if len(of_form) else False
    calls = np.repeat(np.arange(len(recording.calls)), recording.calls["n_inputs"])
    return np.bincount(calls, floats, len(recording.calls)) > 0


class _FloatInputs:
    """Sizes and norms of the floating inputs of calls, looked up once for all results of a call."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._found: dict[int, tuple[list[int], list[float], float]] = {}

    def sizes_and_norms(self, call: int) -> tuple[list[int], list[float], float]:
        """The two greatest numbers of elements, the two greatest 2-norms, and the sum of all norms."""
        if call not in self._found:
            recording, source = self._values.recording, self._values.source
            inputs = recording.inputs_of(call)
            rows = [r for r in inputs[inputs != NONE].tolist() if mantissa_of(recording.form_of(r).dtype)]
            sizes = sorted((recording.form_of(r).n_elements for r in rows), reverse=True)
            norms = sorted((float(recording.results["norm"][source[r]]) for r in rows), reverse=True)
            self._found[call] = sizes[:2], norms[:2], sum(norms)
        return self._found[call]


class _Group:
    """Results of one operator, dtype and number of lost bits."""

    def __init__(
        self,
        a: Values,
        b: Values,
        x: Numbers,
        y: Numbers,
        context: int,
        dtype: str,
        lost: int,
        inputs: _FloatInputs,
        *,
        has_float_inputs: bool,
    ) -> None:
        self._inputs = inputs
        self._sides = (a, x), (b, y)
        self._context = a.recording.contexts[context]
        self._row: OpFacts = facts(self._context.op)
        self._dtype = dtype
        self._lost = lost
        # `ulp_bound` asks only whether an input is floating, not of which size.
        dtypes = [_Dtype(dtype), *([_Dtype("float32")] if has_float_inputs else [])]
        self._scalars = _scalars(self._context.arguments)
        self._ulps = ulp_bound(self._context.op, dtypes, self._scalars)
        self.max_ulp = 2.0**lost - 1 if lost > 0 else float("nan")

    def judgements(self) -> Iterator[Judgement]:
        """Of each result, in order."""
        (a, x), (b, y) = self._sides
        samples = _measure(a, b, x, y)
        counts = {
            title: [v.recording.results[name][v.source[rows]].tolist() for v, rows in self._sides]
            for name, title in {**_CLASSES, **_FURTHER_CLASSES}.items()
        }
        n_terms, scale = self._terms()
        limits = self._units(n_terms).tolist()
        for k in range(len(x)):
            classes = tuple((title, p[k], q[k]) for title, (p, q) in counts.items() if p[k] != q[k])
            if any(title in _CLASSES.values() for title, _, _ in classes) and not self._row.distribution:
                rounding, why = Rounding.NO, "NaN or infinities differ"
            else:
                rounding, why = self._without_size(k) or self._by_size(k, samples, limits[k], float(scale[k]))
            exact = samples.is_exact[k]
            most = samples.ulp[k] if exact else self.max_ulp
            yield Judgement(rounding, why, samples.ulp[k], most, samples.relative[k], classes, exact)

    def _without_size(self, k: int) -> tuple[Rounding, str] | None:
        """What is decided whatever the distance."""
        row = self._row
        if row.distribution:
            return Rounding.UNKNOWN, "random numbers: the generators of two devices differ"
        if row.open_elements is not None:
            return Rounding.UNKNOWN, f"the definition leaves open: {row.open_elements}"
        if self._ulps == 0:
            return self._exact(k)
        return None if mantissa_of(self._dtype) else (Rounding.UNKNOWN, "integers made of floats")

    def _by_size(self, k: int, samples: _Samples, allowed: float, scale: float) -> tuple[Rounding, str]:
        """By the distance.

        Args:
            k: Number of the result.
            samples: Distances of all results.
            allowed: Units of rounding that a right implementation may be off.
            scale: Greatest 2-norm of the terms of a sum; 0 for others.
        """
        ulp, relative, absolute = samples.ulp[k], samples.relative[k], samples.absolute[k]
        # So many ULP are at most twice as many units of rounding.
        if self.max_ulp <= (self._ulps if self._ulps is not None else max(1.0, allowed / 2)):
            return Rounding.YES, "all elements, by digests"
        if math.isnan(ulp):
            return Rounding.UNKNOWN, "no samples"
        values, rows = self._sides[0]
        n_elements = values.recording.form_of(int(rows[k])).n_elements
        roundoff = 2.0 ** -(mantissa_of(self._dtype) + 1)
        if self._ulps is not None:
            within = ulp <= self._ulps
            # A device may flush subnormal numbers to zero.
            beyond = absolute > _NORMAL[_REAL.get(self._dtype, self._dtype)] and self._row.absolute_error is None
        else:
            # The 2-norm of all terms over the elements: the size of one element whose terms are like the others.
            typical = scale / max(1, n_elements) ** 0.5
            within = relative <= allowed * roundoff or absolute <= allowed * roundoff * typical
            most = max(allowed, FAST_CONVOLUTION_RMS * FAST_CONVOLUTION_PEAK) if self._row.fast_convolution else allowed
            # Twice: each side may be off by the limit, on its own.
            beyond = scale > 0 and absolute > 2 * most * roundoff * (scale + samples.size[k])
        if within:
            n_samples = int(values.recording.results["n_samples"][values.source[rows[k]]])
            if not samples.differ[k]:
                return Rounding.UNKNOWN, f"equal in {n_samples} samples of {n_elements:,}"
            return Rounding.YES, _by(n_elements if samples.is_exact[k] else n_samples, n_elements)
        if beyond:
            return Rounding.NO, "a sample is beyond the bound"
        return Rounding.UNKNOWN, "between the bounds" if scale > 0 else "no bound without the inputs"

    def _exact(self, k: int) -> tuple[Rounding, str]:
        """An operator that rounds nothing, or of integers."""
        a, x = self._sides[0]
        result = a.recording.results[a.source[x[k]]]
        # An operator may be exact and leave open which zero it returns, such as `max(0.0, -0.0)`.
        if not self._row.zero_sign and result["n_zero"] + result["n_neg_zero"]:
            return Rounding.UNKNOWN, "exact, but for the sign of zeros"
        # IEEE 754 leaves open which NaN arithmetic returns; only what copies bits has to keep it.
        if not self._row.only_moves and result["n_nan"]:
            return Rounding.UNKNOWN, "exact, but for the payload of NaN"
        return Rounding.NO, "the operator rounds nothing"

    def _units(self, n_terms: Floats) -> Floats:
        kinds, number = np.unique(n_terms, return_inverse=True)
        mantissa = mantissa_of(self._dtype)
        # How many partial sums a kernel adds in memory is not recorded: as many as there are terms.
        each = [rounding_bound(self._row, mantissa, n_terms=n, n_partial_sums=max(1, int(n))) for n in kinds.tolist()]
        return np.array(each)[number]

    def _terms(self) -> tuple[Floats, Floats]:
        """Of each result: number of terms of an element, and the greatest 2-norm that its terms can have.

        The latter is 0 of norms, losses and whatever else is no plain sum: norms of inputs do not bound it.
        """
        values, x = self._sides[0]
        recording = values.recording
        n_terms, scale = np.ones(len(x)), np.zeros(len(x))
        if not self._row.accumulates:
            return n_terms, scale
        factors = [self._scalars.get(name) for name in ("alpha", "beta")]
        factor = max([1.0, *(abs(value) for value in factors if isinstance(value, float | int))])
        for k, row in enumerate(x.tolist()):
            sizes, norms, total = self._inputs.sizes_and_norms(int(values.call[row]))
            n_terms[k] = reduction_length(sizes, recording.form_of(row).n_elements)
            if self._row.n_factors:
                # By Cauchy and Schwarz; what is added to a product is no greater than its own norm.
                product = norms[0] * norms[1] if self._row.n_factors == 2 and len(norms) > 1 else 0.0
                scale[k] = factor * (product + total)
        return n_terms, scale


def _by(n_samples: int, n_elements: int) -> str:
    return f"all {n_elements} elements" if n_samples >= n_elements else f"by {n_samples} samples of {n_elements:,}"


def _scalars(arguments: str) -> dict[str, object]:
    """Arguments that decide an operator's bound, by name."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def _measure(a: Values, b: Values, x: Numbers, y: Numbers) -> _Samples:
    """Distances of the samples of results of one dtype and number of samples, or of all elements where both have them.

    Args:
        a: A recording.
        b: Another.
        x: Rows of `a`, at least one.
        y: Rows of `b`.
    """
    dtype = a.recording.form_of(int(x[0])).dtype
    exact, differ = np.zeros(len(x), bool), np.ones(len(x), bool)
    sides = [(v.recording, v.source[rows]) for v, rows in ((a, x), (b, y))]
    n = {int(c) for r, rows in sides for c in np.unique(r.results["n_samples"][rows])}
    found = None
    # Samples lie at places that follow from the number of elements: with other numbers of samples they are of other
    # places.
    if len(n) == 1:
        bits = [r.samples[r.first_sample[rows][:, None] + np.arange(*n)] for r, rows in sides]
        found = distances(bits[0], bits[1], dtype)
        differ = (bits[0] != bits[1]).any(axis=1)
    if found is None:
        none = [float("nan")] * len(x)
        return _Samples(none, none, none, none, exact.tolist(), differ.tolist())
    n_parts = 2 if dtype.startswith("complex") else 1
    exact[:] = [n == {n_parts * a.recording.form_of(row).n_elements} for row in sides[0][1].tolist()]
    for k in np.flatnonzero(np.isin(sides[0][1], list(a.recording.outputs)) & ~exact).tolist():
        p, q = (r.elements_of(int(rows[k])) for r, rows in sides)
        of_all = distances(p[None], q[None], dtype) if p is not None and q is not None and len(p) == len(q) else None
        if of_all is not None:
            exact[k] = differ[k] = True
            for column, value in zip(found, of_all, strict=True):
                column[k] = value[0]
    return _Samples(*(column.tolist() for column in (*found, exact, differ)))


def distances(
    first: npt.NDArray[np.uint64], second: npt.NDArray[np.uint64], dtype: str
) -> tuple[Floats, Floats, Floats, Floats] | None:
    """Distances of floats from their raw bits, each row of one tensor: (n, n_elements).

    Returns:
        Greatest distance in ULP, greatest relative and absolute difference, and the magnitude where that is: (n,) each.
        NaNs on both sides count as equal. None for integers, and for dtypes that numpy lacks.
    """
    if dtype not in _WIDTH or not first.size:
        return None
    p, q = (decoded(bits, dtype) for bits in (first, second))
    assert p is not None
    assert q is not None
    with np.errstate(all="ignore"):
        gap, size = np.abs(p - q), np.maximum(np.abs(p), np.abs(q))
        # Equal infinities have a difference of NaN, and NaN on both sides is no distance.
        gap = np.where((np.isnan(p) & np.isnan(q)) | (p == q), 0.0, gap)
        # What is still NaN is NaN on one side only.
        gap = np.where(np.isnan(gap), np.inf, gap)
        relative = np.where(gap > 0, gap / size, 0.0)
    ulps = np.where(gap > 0, ulps_apart(first, second, _WIDTH[dtype]).astype(np.float64), 0.0)
    worst = gap.argmax(axis=1)
    rows = np.arange(len(first))
    greatest = relative.max(axis=1, where=np.isfinite(relative), initial=0.0)
    return ulps.max(axis=1), greatest, gap[rows, worst], size[rows, worst]
