"""Rows of results against rows: step t of a decoder against position t of the other engine's prefill.

Each module has its own sequence of rows, since a decoder goes through all modules in each step. So has each operator
and line of a module, if both sides have as many of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np

from shadowrun.numerics.hash_ladder import mantissa_of, remaining_precision
from shadowrun.recording.model import NONE, Kind
from shadowrun.studies.diff.align import renamed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shadowrun.numerics.hash_ladder import Hashes
    from shadowrun.recording.model import Recording
    from shadowrun.studies.diff.name_map import NameMap, RowRule

__all__ = ["RowPair", "RowsFound", "compare_rows"]


@dataclass(frozen=True, slots=True)
class RowPair:
    """Two rows that correspond.

    Attributes:
        number: From 0 in each module and call of it, after those that are skipped.
        first, second: Call and row of its result on both sides.
        equal: Whether all bits are equal.
        remaining: Remaining precision in bits; -1 of integers.
        module: Path in the first recording.
    """

    number: int
    first: tuple[int, int]
    second: tuple[int, int]
    equal: bool
    remaining: int
    module: str = ""


@dataclass(frozen=True, slots=True)
class RowsFound:
    """What a rule found.

    Attributes:
        rule: The rule.
        pairs: Rows that correspond.
        n_first, n_second: Rows of each side, after those that are skipped.
        n_other_form: Pairs of rows that differ in dtype or length, and are left out.
        alone: Modules that fit on one side only, by their names in the first recording.
    """

    rule: RowRule
    pairs: tuple[RowPair, ...]
    n_first: int
    n_second: int
    n_other_form: int
    alone: tuple[str, ...] = ()

    @property
    def least(self) -> int:
        """Least remaining precision of rows that differ; -1 if none does, or they are of integers."""
        return min((pair.remaining for pair in self.pairs if not pair.equal), default=NONE)

    @property
    def has_modules(self) -> bool:
        """Whether its rows are of several modules."""
        return len({pair.module for pair in self.pairs}) > 1


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of a result: its call and number, its dtype and length, its ladder."""

    place: tuple[int, int]
    form: tuple[str, int]
    ladder: Hashes


# Rows of one place in the program, in their order: what a decoder computes step by step.
_Sequence = list[_Row]


def compare_rows(first: Recording, second: Recording, names: NameMap) -> tuple[RowsFound, ...]:
    """Hold rows against rows, as each rule says."""
    return tuple(_compare(first, second, names.modules, rule) for rule in names.rows)


def _compare(first: Recording, second: Recording, modules: Mapping[str, str], rule: RowRule) -> RowsFound:
    a = _by_module(first, rule.module, rule.op, rule.phase, {})
    b = _by_module(second, rule.second_module or rule.module, rule.second_op or rule.op, rule.phase, modules)
    if rule.second_module and rule.module.count("*") <= rule.second_module.count("*"):
        # The stars of both patterns stand for the same parts, unless the map has given the same names already.
        names = {rule.second_module: rule.module}
        b = {module if module in a else renamed(module, names): rows for module, rows in b.items()}
    if len(a) == len(b) == 1:  # their names need not say so
        b = {next(iter(a)): next(iter(b.values()))}
    pairs: list[RowPair] = []
    n_first = n_second = n_compared = 0
    for module in dict.fromkeys((*a, *b)):
        for ours, theirs in _same_places(a.get(module, {}), b.get(module, {})):
            x, y = ours[rule.skip[0] :], theirs[rule.skip[1] :]
            n_first, n_second, n_compared = n_first + len(x), n_second + len(y), n_compared + min(len(x), len(y))
            pairs += _pairs(module, x, y)
    alone = tuple(module for module in dict.fromkeys((*a, *b)) if (module in a) != (module in b))
    return RowsFound(rule, tuple(pairs), n_first, n_second, n_compared - len(pairs), alone)


def _pairs(module: str, a: _Sequence, b: _Sequence) -> Iterator[RowPair]:
    # Not of equal lengths: a decoder may be stopped before the end of the text that the prefill has read.
    for number, (x, y) in enumerate(zip(a, b, strict=False)):
        if x.form == y.form:
            # Integers have one rung: equal or not.
            remaining = remaining_precision(x.ladder, y.ladder) if len(x.ladder) > 1 else NONE
            yield RowPair(number, x.place, y.place, bool(x.ladder[0] == y.ladder[0]), remaining, module)


def _same_places(a: Mapping[object, _Sequence], b: Mapping[object, _Sequence]) -> Iterator[tuple[_Sequence, _Sequence]]:
    """Rows of the same place of a module: the n-th operator and line that fits, where both sides have as many."""
    if len(a) == len(b):
        yield from zip(a.values(), b.values(), strict=True)
    else:  # such as a decoder with a line of its own for the prompt
        x, y = (sorted((row for rows in side.values() for row in rows), key=lambda r: r.place) for side in (a, b))
        yield x, y


def _by_module(
    recording: Recording, module: str, op: str, phase: str, modules: Mapping[str, str]
) -> dict[str, dict[object, _Sequence]]:
    """Rows of the calls that fit, by module and by operator and line, in the order of their first calls."""
    fits = np.array(
        [
            fnmatchcase(renamed(c.module, modules), module) and fnmatchcase(c.op, op) and c.phase == phase
            for c in recording.contexts
        ],
        bool,
    )
    found: dict[str, dict[object, _Sequence]] = {}
    for call in np.flatnonzero(fits[recording.calls["context"]]).tolist() if len(fits) else ():
        context = recording.context_of(call)
        for row in _rows(recording, call):
            places = found.setdefault(renamed(context.module, modules), {})
            # By operator and line too: a decoder goes through all modules in each step, and rows of several places in
            # one sequence would be held against rows of others.
            places.setdefault((context.op, context.site), []).append(row)
    return found


def _rows(recording: Recording, call: int) -> Iterator[_Row]:
    for row in recording.results_of(call):
        # A view's rows are those of its base, in an order that the ladders of the base do not have.
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
                yield _Row((call, number), (form.dtype, form.shape[-1]), ladder)
