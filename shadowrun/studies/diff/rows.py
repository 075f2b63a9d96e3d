"""Rows of results against rows: step t of a decoder against position t of the other engine's prefill."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from shadowrun.numerics.ladder import mantissa_of, remaining_precision
from shadowrun.recording.model import NONE, Kind
from shadowrun.studies.diff.align import renamed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shadowrun.numerics.ladder import Hashes
    from shadowrun.recording.model import Recording
    from shadowrun.studies.diff.names import NameMap, RowRule

__all__ = ["RowPair", "RowsFound", "compare_rows"]


@dataclass(frozen=True, slots=True)
class RowPair:
    """Two rows that correspond.

    Attributes:
        number: From 0, after those that are skipped.
        first, second: Call and row of its result on both sides.
        equal: Whether all bits are equal.
        remaining: Remaining precision in bits; -1 of integers.
    """

    number: int
    first: tuple[int, int]
    second: tuple[int, int]
    equal: bool
    remaining: int


@dataclass(frozen=True, slots=True)
class RowsFound:
    """What a rule found.

    Attributes:
        rule: The rule.
        pairs: Rows that correspond.
        n_first, n_second: Rows of each side, after those that are skipped.
        n_other_form: Pairs of rows that differ in dtype or length, and are left out.
    """

    rule: RowRule
    pairs: tuple[RowPair, ...]
    n_first: int
    n_second: int
    n_other_form: int


def compare_rows(first: Recording, second: Recording, names: NameMap) -> tuple[RowsFound, ...]:
    """Hold rows against rows, as each rule says."""
    return tuple(_compare(first, second, names.modules, rule) for rule in names.rows)


def _compare(first: Recording, second: Recording, modules: Mapping[str, str], rule: RowRule) -> RowsFound:
    a = list(_rows(first, rule.module, rule.op, rule.phase, {}))[rule.skip[0] :]
    b = list(_rows(second, rule.second_module or rule.module, rule.second_op or rule.op, rule.phase, modules))[
        rule.skip[1] :
    ]
    pairs = []
    for number, ((place, form, x), (other, other_form, y)) in enumerate(zip(a, b, strict=False)):
        if form == other_form:
            # Integers have one rung: equal or not.
            remaining = remaining_precision(x, y) if len(x) > 1 else NONE
            pairs.append(RowPair(number, place, other, bool(x[0] == y[0]), remaining))
    return RowsFound(rule, tuple(pairs), len(a), len(b), min(len(a), len(b)) - len(pairs))


def _rows(
    recording: Recording, module: str, op: str, phase: str, modules: Mapping[str, str]
) -> Iterator[tuple[tuple[int, int], tuple[str, int], Hashes]]:
    """Call and number, dtype and length, and ladder of each row."""
    fits = np.array(
        [
            fnmatchcase(renamed(c.module, modules), module) and fnmatchcase(c.op, op) and c.phase == phase
            for c in recording.contexts
        ],
        bool,
    )
    for call in np.flatnonzero(fits[recording.calls["context"]]).tolist() if len(fits) else ():
        for row in recording.results_of(call):
            if recording.results["kind"][row] in (Kind.LEAF, Kind.VIEW) or recording.results["position"][row]:
                continue
            form = recording.form_of(row)
            # A result of one row is that row.
            n = int(recording.results["n_rows"][row])
            ladders = recording.row_rungs[recording.first_row_rung[row] : recording.first_row_rung[row + 1]]
            one = not n and form.shape and form.n_elements == form.shape[-1]
            every = [recording.ladder(row)] if one else np.split(ladders, n) if n else []
            for number, ladder in enumerate(every):
                if len(ladder) == mantissa_of(form.dtype) + 1:
                    yield (call, number), (form.dtype, form.shape[-1]), ladder
