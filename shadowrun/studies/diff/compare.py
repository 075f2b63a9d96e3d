"""What became of each pair of calls: equal, other inputs, another kernel, or another algorithm on equal inputs.

All from digests. The smallest number k of low mantissa bits whose loss makes two results equal is exact, and bounds the
distance: elements that agree in all but their lowest k bits are less than 2^k units in the last place apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.numerics.hash_ladder import mix
from shadowrun.operators.facts import facts
from shadowrun.recording.model import NONE, Kind
from shadowrun.studies.diff.provenance import differing_generators

if TYPE_CHECKING:
    import numpy.typing as npt

    from shadowrun.recording.model import Recording
    from shadowrun.studies.diff.align import Alignment
    from shadowrun.studies.diff.values import Values

__all__ = ["ARISING", "Difference", "Outcome", "ResultPairs", "compare", "is_undeclared"]

Numbers = Any  # npt.NDArray[np.int64], (n,)
Flags = Any  # npt.NDArray[np.bool_], (n,)


class Outcome(StrEnum):
    """What became of a pair of calls."""

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
    """Inputs are equal, results have another dtype, shape or placement; on one kind of device, also other strides."""
    UNKNOWN = "not digested"
    """A result has no digest; or results differ, and an input has none."""
    OTHER_CALLS = "other calls"
    """Inputs differ; calls that one recording lacks (inserted, removed, fused) made them of equal inputs."""


ARISING: Final = (Outcome.KERNEL, Outcome.ALGORITHM, Outcome.ARGUMENTS, Outcome.FORM, Outcome.OTHER_CALLS)
"""Differences that arise in the call itself, or in calls before it that only one recording has."""

# Operators that fill their first argument with random numbers, and do not read it.
_FILLS: Final = frozenset({
    "aten::uniform_", "aten::normal_", "aten::bernoulli_", "aten::random_",
    "aten::exponential_", "aten::geometric_", "aten::cauchy_", "aten::log_normal_",
})  # fmt: skip

_CODE: Final = {outcome: number for number, outcome in enumerate(Outcome)}


@dataclass(frozen=True, slots=True, eq=False)
class ResultPairs:
    """Results, and written arguments, of the pairs of calls that have as many of the same forms.

    Attributes:
        pair: Number of the pair of calls: (n,).
        first, second: Rows in the two recordings.
        known: Whether both have a digest.
        differs: Whether the digests differ.
        remaining: Remaining precision in bits; -1 of equal results, integers, and results without a digest.
        lost: Low mantissa bits that have to be cut off until they are equal; -1 where that does not help: signs,
            exponents or integers differ.
    """

    pair: Numbers
    first: Numbers
    second: Numbers
    known: Flags
    differs: Flags
    remaining: npt.NDArray[np.int16]
    lost: npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """Two recordings, call by call.

    Attributes:
        first, second: The recordings.
        alignment: Which calls correspond.
        outcomes: `Outcome` of each pair, as its place in the order of `Outcome`: (n_pairs,).
        remaining: Remaining precision of each pair in bits, the least of its results; -1 where there is none.
        lost: Mantissa bits that have to be cut off until all results are equal; -1 where that does not help.
        undeclared: Whether one of a pair does to memory what its schema does not declare, and the other does not.
        results: The results that were compared.
    """

    first: Values
    second: Values
    alignment: Alignment
    outcomes: npt.NDArray[np.int8]
    remaining: npt.NDArray[np.int16]
    lost: npt.NDArray[np.int16]
    undeclared: Flags
    results: ResultPairs

    def outcome(self, pair: int) -> Outcome:
        """Outcome of one pair."""
        return tuple(Outcome)[int(self.outcomes[pair])]

    def where(self, *outcomes: Outcome) -> npt.NDArray[np.int64]:
        """Numbers of the pairs with these outcomes."""
        return np.flatnonzero(np.isin(self.outcomes, [_CODE[outcome] for outcome in outcomes]))

    def count(self, outcome: Outcome) -> int:
        """Number of pairs with an outcome."""
        return int((self.outcomes == _CODE[outcome]).sum())


def compare(a: Values, b: Values, alignment: Alignment, *, same_inputs: bool = False) -> Difference:
    """Compare all pairs of two recordings.

    Args:
        a: A recording.
        b: Another.
        alignment: Which calls correspond.
        same_inputs: The calls of `b` got the inputs of `a`, whether they are recorded or not.
    """
    ours, theirs = alignment.pairs.T
    # Where operators differ, their arguments and further results are not comparable one by one.
    counterparts = ~_same([_texts(v.recording, "op") for v in (a, b)], a, b, ours, theirs)
    elsewhere = counterparts | ~_same([_texts(v.recording, "device") for v in (a, b)], a, b, ours, theirs)
    # A replay has taken the inputs out of the first recording: there is nothing to compare.
    if same_inputs:
        inputs_equal = inputs_known = same_strides = np.ones(len(ours), bool)
    else:
        inputs_equal, inputs_known, same_strides = _inputs_equal(a, b, ours, theirs, counterparts)
    undeclared = _undeclared(a, b, ours, theirs, counterparts)
    results, other_form = _results(a, b, ours, theirs, counterparts, elsewhere, undeclared)
    n = len(ours)
    equal, known = ~(other_form | undeclared), np.ones(n, bool)
    equal[results.pair[results.differs]] = False
    known[results.pair[~results.known]] = False
    # From the weakest to the strongest reason: each line below overwrites those above.
    outcomes = np.full(n, _CODE[Outcome.ALGORITHM], np.int8)
    outcomes[elsewhere | _other_kernel(a, b, ours, theirs)] = _CODE[Outcome.KERNEL]
    other_arguments = (a.arguments[ours] != b.arguments[theirs]) & ~counterparts
    outcomes[other_arguments] = _CODE[Outcome.ARGUMENTS]
    outcomes[other_form] = _CODE[Outcome.FORM]
    # What was not digested cannot be called equal, but a difference that is seen stays one.
    outcomes[~inputs_known] = _CODE[Outcome.UNKNOWN]
    outcomes[~inputs_equal | _drawn_from_others(a, b, ours)] = _CODE[Outcome.INPUT]
    outcomes[equal] = _CODE[Outcome.EQUAL]
    outcomes[equal & ~known] = _CODE[Outcome.UNKNOWN]
    # Strides follow from those of the inputs and from the device; what reads the result may add in another order.
    restrided = np.zeros(n, bool)
    restrided[results.pair[a.layout[results.first] != b.layout[results.second]]] = True
    outcomes[restrided & same_strides & inputs_equal & inputs_known & ~elsewhere] = _CODE[Outcome.FORM]
    outcomes[_made_by_other_calls(a, b, alignment, outcomes)] = _CODE[Outcome.OTHER_CALLS]
    # 2^14 stands for "nothing yet" below: more than any mantissa has, and within int16.
    remaining, lost = np.full(n, 1 << 14, np.int16), np.zeros(n, np.int16)
    has = results.differs & (results.remaining != NONE)
    np.minimum.at(remaining, results.pair[has], results.remaining[has])
    remaining[remaining == 1 << 14] = NONE
    np.maximum.at(lost, results.pair[results.differs], results.lost[results.differs])
    # The worst result decides, and one whose signs or exponents differ has no number of lost bits.
    lost[results.pair[results.differs & (results.lost == NONE)]] = NONE
    lost[other_form] = NONE
    return Difference(a, b, alignment, outcomes, remaining, lost, undeclared, results)


def _inputs_equal(
    a: Values, b: Values, ours: Numbers, theirs: Numbers, counterparts: Flags
) -> tuple[Flags, Flags, Flags]:
    """Whether the inputs of each pair are equal as far as they are known, whether all are known, and their strides."""
    n = [v.recording.calls["n_inputs"][calls] for v, calls in ((a, ours), (b, theirs))]
    same_number = n[0] == n[1]
    equal, known, same_strides = np.ones(len(ours), bool), same_number.copy(), same_number.copy()
    fills = np.array([_name(op) in _FILLS for op in _texts(a.recording, "op")], bool)[
        a.recording.calls["context"][ours]
    ]
    left = np.flatnonzero(same_number)
    for k in range(int(n[0][same_number].max(initial=0))):
        # Of those before: one call may have as many inputs as there are calls.
        left = left[n[0][left] > k]
        has = left[~fills[left]] if k == 0 else left
        x, y = (v.recording.inputs[v.recording.first_input[calls[has]] + k] for v, calls in ((a, ours), (b, theirs)))
        there = (x != NONE) & (y != NONE)
        x, y = x[there], y[there]
        same = a.identity[x] == b.identity[y]
        # Part of a tensor, or one in another order, against a copy of it: digests cannot show whether they are equal.
        sure = a.known[x] & b.known[y] & (same | (a.moved[x] == b.moved[y]))
        known[has[~there]] = False
        known[has[there][~sure]] = False
        equal[has[there][sure & ~same]] = False
        same_strides[has[there][a.layout[x] != b.layout[y]]] = False
    # Operators of different devices may take their inputs in another order, and further ones.
    for pair in np.flatnonzero(counterparts & ~(equal & known)).tolist():
        x, y = _tensors(a, int(ours[pair])), _tensors(b, int(theirs[pair]))
        equal[pair] = known[pair] = bool(x) and bool(y) and (x <= y or y <= x)
        # Without digests on one side nothing is known, which is not "inputs differ".
        equal[pair] |= not (x and y)
    return equal, known, same_strides


def _drawn_from_others(a: Values, b: Values, ours: Numbers) -> Flags:
    """Pairs that draw from generators whose states differed before the first draw."""
    generators = differing_generators(a.recording, b.recording)
    draws = [
        c.device in generators and (bool(facts(c.op).distribution) or _name(c.op) in _FILLS)
        for c in a.recording.contexts
    ]
    found: Flags = np.array(draws, bool)[a.recording.calls["context"][ours]]
    return found


def _made_by_other_calls(a: Values, b: Values, alignment: Alignment, outcomes: npt.NDArray[np.int8]) -> Numbers:
    """Pairs of which all inputs that differ were made by calls of one recording only, of equal inputs."""
    sides = (a, alignment.only_first, alignment.pairs[:, 0]), (b, alignment.only_second, alignment.pairs[:, 1])
    equal = outcomes == _CODE[Outcome.EQUAL]
    made = [_of_equal_inputs(v, alone, calls[equal]) for v, alone, calls in sides]
    reads = np.zeros(len(outcomes), bool)
    for (values, _, calls), rows in zip(sides, made, strict=True):
        reads |= _any_input(values, rows)[calls]
    found = []
    for pair in np.flatnonzero(reads & (outcomes == _CODE[Outcome.INPUT])).tolist():
        x, y = (v.recording.inputs_of(int(c)) for v, c in zip((a, b), alignment.pairs[pair], strict=True))
        if len(x) != len(y):
            continue
        differs = (x != NONE) & (y != NONE)
        differs[differs] = a.identity[x[differs]] != b.identity[y[differs]]
        if differs.any() and (made[0][x[differs]] | made[1][y[differs]]).all():
            found.append(pair)
    return np.array(found, np.int64)


def _of_equal_inputs(values: Values, alone: Numbers, equal: Numbers) -> Flags:
    """Rows that calls without a partner made of what both recordings have: (n_results,).

    Args:
        values: Of a recording.
        alone: Calls without a partner.
        equal: Calls that are equal in both recordings.
    """
    recording = values.recording
    is_leaf = recording.results["kind"] == Kind.LEAF
    if not len(alone):
        return np.zeros(len(is_leaf), bool)
    common = np.zeros(len(recording.calls), bool)
    common[equal] = True
    others = _any_input(values, ~(is_leaf | common[values.call]), unknown=True)
    of_equal = np.zeros(len(recording.calls), bool)
    of_equal[alone[~others[alone]]] = True
    for call in alone[others[alone]].tolist():  # in their order: each is after the calls that made its inputs
        inputs = recording.inputs_of(call)
        makers = values.call[inputs]
        of_equal[call] = ((inputs != NONE) & (is_leaf[inputs] | common[makers] | of_equal[makers])).all()
    return of_equal[values.call] & ~is_leaf


def _any_input(values: Values, rows: Flags, *, unknown: bool = False) -> Flags:
    """Whether a call reads one of these rows, or a tensor without a row if `unknown` is true: (n_calls,)."""
    recording = values.recording
    inputs, n_inputs = recording.inputs, recording.calls["n_inputs"]
    reads = np.full(len(inputs), unknown)
    known = inputs != NONE
    reads[known] = rows[inputs[known]]
    calls = np.repeat(np.arange(len(n_inputs)), n_inputs)[reads]
    found: Flags = np.bincount(calls, minlength=len(n_inputs)) > 0
    return found


def _tensors(values: Values, call: int) -> set[int]:
    """Digests of what the inputs of a call consist of."""
    rows = [row for row in values.recording.inputs_of(call).tolist() if row != NONE]
    return {int(values.whole[row]) for row in rows if values.known[row]}


def _undeclared(a: Values, b: Values, ours: Numbers, theirs: Numbers, counterparts: Flags) -> Flags:
    """Whether the calls of a pair differ in what they do to memory and do not declare."""
    effects = []
    for values in (a, b):
        results = values.recording.results
        rows = np.flatnonzero(is_undeclared(results))
        of_call = np.zeros(len(values.recording.calls), np.uint64)
        # Combined by exclusive or: the order of such rows means nothing.
        codes = results["kind"][rows].astype(np.uint64) * np.uint64(256) + results["position"][rows]
        np.bitwise_xor.at(of_call, values.call[rows], mix(codes))
        effects.append(of_call)
    x, y = effects[0][ours], effects[1][theirs]
    # Operators of different devices number their arguments in another way.
    found: Flags = np.where(counterparts, (x == 0) != (y == 0), x != y)
    return found


def is_undeclared(results: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Rows that stand for what a call does to memory and its schema does not declare."""
    shares = (results["kind"] == Kind.RESULT) & (results["base"] != NONE)
    found: npt.NDArray[np.bool_] = shares | (results["kind"] == Kind.OVERWRITTEN)
    return found


def _results(
    a: Values, b: Values, ours: Numbers, theirs: Numbers, counterparts: Flags, elsewhere: Flags, undeclared: Flags
) -> tuple[ResultPairs, npt.NDArray[np.bool_]]:
    """Compare the results and written arguments of each pair; also whether their forms differ."""
    rows = [_judged_rows(v, calls, counterparts, elsewhere, undeclared) for v, calls in ((a, ours), (b, theirs))]
    n = [np.bincount(pair, minlength=len(ours)) for pair, _ in rows]
    other_form = n[0] != n[1]
    (pair, x), (_, y) = ((pair[~other_form[pair]], row[~other_form[pair]]) for pair, row in rows)
    # Placement 0 is a plain tensor: of a distributed run against a run on one device, the placements are no
    # difference.
    replaced = (a.placement[x] != b.placement[y]) & (a.placement[x] != 0) & (b.placement[y] != 0)
    other_form[pair[(a.form[x] != b.form[y]) | replaced]] = True
    kept = ~other_form[pair]
    pair, x, y = pair[kept], x[kept], y[kept]
    # A view has the digest of its whole base; `identity` adds which part of it the view is.
    views = (a.recording.results["kind"][x] == Kind.VIEW) | (b.recording.results["kind"][y] == Kind.VIEW)
    same = np.where(views, a.identity[x] == b.identity[y], a.whole[x] == b.whole[y])
    known = a.known[x] & b.known[y] & (same | ~views | (a.moved[x] == b.moved[y]))
    differs = known & ~same
    remaining, lost = np.full(len(x), NONE, np.int16), np.full(len(x), NONE, np.int16)
    _precision(a, b, x, y, np.flatnonzero(differs), remaining, lost)
    return ResultPairs(pair, x, y, known, differs, remaining, lost), other_form


def _judged_rows(
    values: Values, calls: Numbers, only_first: Flags, elsewhere: Flags, undeclared: Flags
) -> tuple[Numbers, Numbers]:
    """Results and written arguments of calls whose values mean something: leaves belong to the inputs.

    Args:
        values: Of a recording.
        calls: Numbers of calls.
        only_first: Calls of which only the first result counts: those after it are each operator's own.
        elsewhere: Calls whose partner ran on another kind of device, which may save other values for its backward.
        undeclared: Calls whose partner did not write to the same memory.

    Returns:
        Position in `calls` of each, and its row.
    """
    recording = values.recording
    starts, n = recording.first_result[calls], recording.calls["n_results"][calls].astype(np.int64)
    position = np.repeat(np.arange(len(calls)), n)
    rows = np.arange(int(n.sum())) - np.repeat(np.cumsum(n) - n, n) + np.repeat(starts, n)
    results = recording.results[rows]
    kept = (results["kind"] != Kind.LEAF) & ~(only_first[position] & (results["position"] > 0))
    kept &= ~(undeclared[position] & (results["kind"] == Kind.OVERWRITTEN))
    # Contexts by what their operators leave open, of which there are few: a program may have thousands of contexts.
    kinds: dict[tuple[Any, ...], int] = {}
    kind_of = np.zeros(len(recording.contexts), np.int64)
    for number, context in enumerate(recording.contexts):
        row = facts(context.op)
        positions = (*row.uninitialised_returns, *row.not_unique)
        kind_of[number] = kinds.setdefault((row.uninitialised, positions, tuple(row.saved)), len(kinds))
    kind = kind_of[recording.calls["context"][calls[position]]]
    returned = (results["kind"] != Kind.WRITTEN) & (results["kind"] != Kind.OVERWRITTEN)
    for (is_uninitialised, positions, saved), number in kinds.items():
        # Memory that was only allocated: its values are accidental on both sides.
        if is_uninitialised:
            kept &= kind != number
        elif positions or saved:
            of = (kind == number) & returned
            kept &= ~(of & np.isin(results["position"], positions))
            kept &= ~(of & elsewhere[position] & np.isin(results["position"], saved))
    return position[kept], rows[kept]


def _precision(
    a: Values,
    b: Values,
    x: Numbers,
    y: Numbers,
    which: Numbers,
    remaining: npt.NDArray[np.int16],
    lost: npt.NDArray[np.int16],
) -> None:
    """Fill in the remaining precision and the lost bits of results that differ."""
    x, y = a.source[x[which]], b.source[y[which]]
    sizes = a.recording.results["n_rungs"][x]
    for size in np.unique(sizes[sizes > 1]).tolist():
        of = np.flatnonzero((sizes == size) & (b.recording.results["n_rungs"][y] == size))
        # In parts of 65,536 results: a file may have millions, each with up to 53 rungs.
        for part in np.array_split(of, max(1, len(of) >> 16)):
            ours, theirs = (
                v.recording.rungs[v.recording.first_rung[rows[part]][:, None] + np.arange(size)]
                for v, rows in ((a, x), (b, y))
            )
            agree = ours == theirs
            # Where even the last rung differs, signs or exponents do.
            k = np.where(agree.any(axis=1), agree.argmax(axis=1), size)
            remaining[which[part]] = np.maximum(size - 1 - k, 0)
            lost[which[part]] = np.where(k < size, k, NONE)


def _name(op: str) -> str:
    return op.partition(".")[0]


def _texts(recording: Recording, field: str) -> list[str]:
    return [getattr(context, field) for context in recording.contexts]


def _same(texts: list[Any], a: Values, b: Values, ours: Numbers, theirs: Numbers) -> Flags:
    """Whether texts that belong to the contexts are equal for each pair."""
    # Both sides in one table of numbers, so that columns of numbers are compared, and not a million pairs of texts.
    numbers: dict[str, int] = {}
    columns = [
        np.array([numbers.setdefault(text, len(numbers)) for text in side], np.int64)[
            v.recording.calls["context"][calls]
        ]
        for side, v, calls in zip(texts, (a, b), (ours, theirs), strict=True)
    ]
    return columns[0] == columns[1]


def _other_kernel(a: Values, b: Values, ours: Numbers, theirs: Numbers) -> Flags:
    """Whether kernels are known to differ by name."""
    names: dict[str, int] = {}
    numbers = [
        np.array([*(names.setdefault(k, len(names)) for k in v.recording.kernels), NONE], np.int64)[
            v.recording.calls["kernel"][calls]
        ]
        for v, calls in ((a, ours), (b, theirs))
    ]
    # Kernels are recorded with `kernels=True` only: a missing name is no other kernel.
    return (numbers[0] != numbers[1]) & (numbers[0] != NONE) & (numbers[1] != NONE)
