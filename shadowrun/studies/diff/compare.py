"""What became of each pair of calls: equal, other inputs, another kernel, or another algorithm on equal inputs.

All from digests. The smallest number k of low mantissa bits whose loss makes two results equal is exact, and bounds the
distance: elements that agree in all but their lowest k bits are less than 2^k units in the last place apart. Samples
bound it from below.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from shadowrun.recording.model import NONE, Kind

if TYPE_CHECKING:
    from shadowrun.recording.model import Form, Recording
    from shadowrun.studies.diff.align import Alignment

__all__ = ["COMPARABLE", "Difference", "Outcome", "compare", "distance"]


class Outcome(StrEnum):
    """What became of a pair of calls; those after EQUAL from the most to the least that the pair itself is to blame."""

    EQUAL = "equal"
    INPUT = "input"
    """Inputs differ, so that results had to."""
    KERNEL = "kernel"
    """Inputs are equal, results differ, and another kernel ran, by its name, its operator or its device."""
    ALGORITHM = "algorithm"
    """Inputs are equal, results differ, and no difference of kernels is known."""
    ARGUMENTS = "arguments"
    """Inputs are equal, but arguments that are not tensors differ."""
    FORM = "form"
    """Inputs are equal, results have another dtype or shape."""
    UNKNOWN = "not digested"
    """A result or an input has no digest."""


COMPARABLE: Final = (Outcome.KERNEL, Outcome.ALGORITHM, Outcome.ARGUMENTS, Outcome.FORM)
"""Differences that arise in the call itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """Two recordings, call by call.

    Attributes:
        alignment: Which calls correspond.
        outcomes: `Outcome` of each pair, as numbers of its members' order: (n_pairs,).
        remaining: Remaining precision of each pair in bits, the least of its results; -1 where there is none (integers,
            other forms): (n_pairs,).
        lost: Mantissa bits that have to be cut off until all results are equal; -1 where that does not help.
    """

    alignment: Alignment
    outcomes: npt.NDArray[np.int8]
    remaining: npt.NDArray[np.int16]
    lost: npt.NDArray[np.int16]

    def outcome(self, pair: int) -> Outcome:
        """Outcome of one pair."""
        return tuple(Outcome)[int(self.outcomes[pair])]

    def where(self, *outcomes: Outcome) -> npt.NDArray[np.int64]:
        """Numbers of the pairs with these outcomes."""
        numbers = [tuple(Outcome).index(outcome) for outcome in outcomes]
        return np.flatnonzero(np.isin(self.outcomes, numbers))


_CODE: Final = {outcome: number for number, outcome in enumerate(Outcome)}


def compare(first: Recording, second: Recording, alignment: Alignment) -> Difference:
    """Compare all pairs of two recordings."""
    a, b = _Digests(first), _Digests(second)
    ours, theirs = alignment.pairs.T
    inputs_equal, inputs_known = _inputs_equal(a, b, ours, theirs)
    results = _results(a, b, ours, theirs)
    outcomes = np.full(len(ours), _CODE[Outcome.ALGORITHM], np.int8)
    outcomes[_other_kernel(first, second, ours, theirs)] = _CODE[Outcome.KERNEL]
    outcomes[~_same(first, second, ours, theirs, "arguments")] = _CODE[Outcome.ARGUMENTS]
    outcomes[results.other_form] = _CODE[Outcome.FORM]
    outcomes[~inputs_equal] = _CODE[Outcome.INPUT]
    outcomes[results.equal] = _CODE[Outcome.EQUAL]
    # What was not digested cannot be called equal, but a difference that is seen stays one.
    outcomes[(results.equal & ~results.known) | (~results.equal & inputs_equal & ~inputs_known)] = _CODE[
        Outcome.UNKNOWN
    ]
    return Difference(alignment, outcomes, results.remaining, results.lost)


class _Digests:
    """The columns of a recording that a comparison reads, by row of results."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.source = _sources(recording)
        sizes = recording.results["n_rungs"].astype(np.int64)
        self.known = (sizes > 0)[self.source] if len(sizes) else np.zeros(0, bool)
        whole = np.zeros(len(sizes), np.uint64)
        whole[sizes > 0] = recording.rungs[recording.first_rung[:-1][sizes > 0]]
        self.whole = whole[self.source] if len(sizes) else whole
        # What a form is called on both sides: strides differ between devices and are no difference of values.
        self.form = np.array([hash(_value_form(f)) for f in recording.forms], np.int64)[recording.results["form"]]


def _sources(recording: Recording) -> npt.NDArray[np.int64]:
    """The row whose digest stands for each row."""
    rows = np.arange(len(recording.results), dtype=np.int64)
    base = recording.results["base"]
    followed = np.where((recording.results["kind"] == Kind.VIEW) & (base != NONE), base, rows)
    # Each round follows twice as many views; a base comes before its view, so that this ends.
    while True:
        further = followed[followed] if len(followed) else followed
        if (further == followed).all():
            return followed
        followed = further


def _value_form(form: Form) -> tuple[Any, ...]:
    return form.dtype, form.shape


def _inputs_equal(
    a: _Digests, b: _Digests, ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Whether the inputs of each pair are equal as far as they are known, and whether all are known."""
    n = [np.diff(d.recording.first_input)[calls] for d, calls in ((a, ours), (b, theirs))]
    same_number = n[0] == n[1]
    equal, known = same_number.copy(), same_number.copy()
    for k in range(int(n[0][same_number].max(initial=0))):
        has = np.flatnonzero(same_number & (n[0] > k))
        x, y = (d.recording.inputs[d.recording.first_input[calls[has]] + k] for d, calls in ((a, ours), (b, theirs)))
        there = (x != NONE) & (y != NONE)
        there[there] = a.known[x[there]] & b.known[y[there]]
        known[has] &= there
        equal[has[there]] &= a.whole[x[there]] == b.whole[y[there]]
    return equal, known


@dataclass(frozen=True, slots=True, eq=False)
class _Results:
    equal: npt.NDArray[np.bool_]
    known: npt.NDArray[np.bool_]
    other_form: npt.NDArray[np.bool_]
    remaining: npt.NDArray[np.int16]
    lost: npt.NDArray[np.int16]


def _results(a: _Digests, b: _Digests, ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64]) -> _Results:
    """Compare the results and written arguments of each pair; leaves belong to the inputs."""
    rows = [_made(d.recording, calls) for d, calls in ((a, ours), (b, theirs))]
    counts = [np.bincount(pair, minlength=len(ours)) for pair, _ in rows]
    other_form = counts[0] != counts[1]
    chosen = [(pair[~other_form[pair]], row[~other_form[pair]]) for pair, row in rows]
    (pair, x), (_, y) = chosen
    form = a.form[x] == b.form[y]
    other_form |= np.bincount(pair[~form], minlength=len(ours)) > 0
    known = np.ones(len(ours), bool)
    both = a.known[x] & b.known[y]
    known[pair[~both]] = False
    differs = both & form & (a.whole[x] != b.whole[y])
    equal = ~other_form
    equal[pair[differs]] = False
    remaining, lost = np.full(len(ours), NONE, np.int16), np.zeros(len(ours), np.int16)
    _precision(a, b, pair[differs], x[differs], y[differs], remaining, lost)
    lost[other_form] = NONE
    return _Results(equal, known, other_form, remaining, lost)


def _made(recording: Recording, calls: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Pair number and row of all results and written arguments of calls."""
    starts, ends = recording.first_result[calls], recording.first_result[calls + 1]
    n = ends - starts
    pair = np.repeat(np.arange(len(calls)), n)
    rows = np.arange(int(n.sum())) - np.repeat(np.cumsum(n) - n, n) + np.repeat(starts, n)
    made = recording.results["kind"][rows] != Kind.LEAF
    return pair[made], rows[made]


def _precision(
    a: _Digests,
    b: _Digests,
    pair: npt.NDArray[np.int64],
    x: npt.NDArray[np.int64],
    y: npt.NDArray[np.int64],
    remaining: npt.NDArray[np.int16],
    lost: npt.NDArray[np.int16],
) -> None:
    """Fill in the remaining precision and the lost bits of pairs whose results differ."""
    x, y = a.source[x], b.source[y]
    sizes = a.recording.results["n_rungs"][x]
    for size in np.unique(sizes).tolist():
        of = np.flatnonzero((sizes == size) & (b.recording.results["n_rungs"][y] == size))
        rungs = [
            d.recording.rungs[d.recording.first_rung[r[of]][:, None] + np.arange(size)] for d, r in ((a, x), (b, y))
        ]
        agree = rungs[0] == rungs[1]
        k = np.where(agree.any(axis=1), agree.argmax(axis=1), size)
        if size > 1:
            bits = np.maximum(size - 1 - k, 0).astype(np.int16)
            worst = np.full(len(remaining), 1 << 14, np.int16)
            np.minimum.at(worst, pair[of], bits)
            seen = worst < 1 << 14
            remaining[seen] = np.where(remaining[seen] == NONE, worst[seen], np.minimum(remaining[seen], worst[seen]))
        # Where even the last rung differs, signs or exponents do.
        beyond = pair[of][k == size]
        np.maximum.at(lost, pair[of], np.minimum(k, size - 1).astype(np.int16))
        lost[beyond] = 1 << 14
    lost[lost == 1 << 14] = NONE


def _same(
    first: Recording, second: Recording, ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64], field: str
) -> npt.NDArray[np.bool_]:
    """Whether a field of the contexts of each pair is equal."""
    numbers: dict[str, int] = {}
    columns = [
        np.array([numbers.setdefault(getattr(c, field), len(numbers)) for c in r.contexts], np.int64)[
            r.calls["context"][calls]
        ]
        for r, calls in ((first, ours), (second, theirs))
    ]
    same: npt.NDArray[np.bool_] = columns[0] == columns[1]
    return same


def _other_kernel(
    first: Recording, second: Recording, ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Whether kernels are known to differ: by operator, device, or name."""
    other = ~(_same(first, second, ours, theirs, "op") & _same(first, second, ours, theirs, "device"))
    names: dict[str, int] = {}
    numbers = [
        np.array([names.setdefault(k, len(names)) for k in r.kernels] + [NONE], np.int64)[r.calls["kernel"][calls]]
        for r, calls in ((first, ours), (second, theirs))
    ]
    found: npt.NDArray[np.bool_] = other | ((numbers[0] != numbers[1]) & (numbers[0] != NONE) & (numbers[1] != NONE))
    return found


def distance(first: Recording, second: Recording, x: int, y: int) -> tuple[float, float]:
    """Greatest distance of the sampled elements of two results, in ULP and relative to the greater magnitude.

    Both are lower bounds for the whole tensors; NaN where there are no samples, or forms differ.
    """
    form = first.form_of(x)
    a, b = first.samples_of(x), second.samples_of(y)
    bits = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16, "complex64": 32, "complex128": 64}.get(
        form.dtype
    )
    if bits is None or len(a) != len(b) or not len(a) or _value_form(form) != _value_form(second.form_of(y)):
        return float("nan"), float("nan")
    ordered = [_ordered(s, bits) for s in (a, b)]
    ulp = float(max(abs(int(p) - int(q)) for p, q in zip(*ordered, strict=True)))
    values = [_values(s, form.dtype.replace("complex64", "float32").replace("complex128", "float64")) for s in (a, b)]
    with np.errstate(all="ignore"):
        gap, size = np.abs(values[0] - values[1]), np.maximum(np.abs(values[0]), np.abs(values[1]))
        relative = np.where(size > 0, gap / size, 0.0)
    finite = relative[np.isfinite(relative)]
    return ulp, float(finite.max(initial=0.0))


def _ordered(bits: npt.NDArray[np.uint64], width: int) -> list[int]:
    """Numbers in the order of the floats, so that neighbours differ by 1."""
    sign = 1 << (width - 1)
    return [int(b) if int(b) < sign else sign - int(b) for b in bits]


def _values(bits: npt.NDArray[np.uint64], dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    width = {"float64": 8, "float32": 4, "float16": 2}[dtype]
    found: npt.NDArray[np.float64] = bits.astype(f"u{width}").view(dtype).astype(np.float64)
    return found
