"""`--map FILE`: names of one recording under which the other knows them, and rows that correspond.

::

    [modules]                        # path in the second recording = path in the first
    "layers.*.attn" = "h.*.attention"

    [[rows]]                         # results, row by row: needs `rows=` when recording
    module = "lm_head"               # glob pattern, in the first recording's names; default: all
    op = "aten::*mm*"                # glob pattern; default: all
    second_module = "logits"         # in the second recording, under its new names; default: as `module`
    second_op = "aten::linear"       # default: as `op`
    phase = "forward"                # default: forward
    skip = [0, 4]                    # rows to leave out at the start of the first and of the second
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.errors import UsageError, brief
from shadowrun.limits import read_toml
from shadowrun.numerics.hash_ladder import mantissa_of, remaining_precision
from shadowrun.recording.model import NONE, Kind
from shadowrun.studies.diff.align import renamed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from shadowrun.numerics.hash_ladder import Hashes
    from shadowrun.recording.model import Recording

__all__ = ["NameMap", "RowPair", "RowRule", "RowsFound", "compare_rows", "read_names"]


# Each is held against all calls of both recordings.
_MAX_ROWS: Final = 1000


@dataclass(frozen=True, slots=True)
class RowRule:
    """Which rows of results correspond: those of the calls that fit, one after the other in each module, on each side.

    Attributes:
        module, op: Glob patterns in the first recording.
        second_module, second_op: In the second; empty for the same.
        phase: Of the calls.
        skip: Rows to leave out at the start of each module on each side.
    """

    module: str = "*"
    op: str = "*"
    second_module: str = ""
    second_op: str = ""
    phase: str = "forward"
    skip: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class NameMap:
    """What a map says.

    Attributes:
        modules: Glob patterns of paths in the second recording to paths in the first.
        rows: Rules for rows.
    """

    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rows: tuple[RowRule, ...] = ()


def read_names(path: Path) -> NameMap:
    """Read a map.

    Raises:
        UsageError: It cannot be read, or has an entry that it cannot have.
    """
    try:
        whole = read_toml(path)[1]
    # ValueError: also a number of thousands of digits. RecursionError: a list of lists without end.
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"The map {str(path)!r} cannot be read: {error}.", slug="bad-map") from error
    unknown = sorted(whole.keys() - {"modules", "rows"})
    if unknown:
        raise _wrong(path, f"has no table [{unknown[0]}]: use [modules] and [[rows]]")
    modules, rows = whole.get("modules", {}), whole.get("rows", [])
    if not isinstance(modules, dict) or not all(isinstance(name, str) for name in modules.values()):
        raise _wrong(path, '[modules] takes lines such as "layers.*.attn" = "h.*.attention"')
    for pattern, name in modules.items():
        # Fewer are allowed: a name may drop a part of the path.
        if name.count("*") > pattern.count("*"):
            raise _wrong(path, f"{brief(pattern)} = {brief(name)}: the name has more stars than the pattern")
    if not isinstance(rows, list):
        raise _wrong(path, "write [[rows]], with two brackets: there may be several")
    if len(rows) > _MAX_ROWS:
        raise _wrong(path, f"{len(rows):,} [[rows]], and {_MAX_ROWS:,} are read at most: patterns stand for many calls")
    return NameMap(modules, tuple(_rule(path, row) for row in rows))


def _rule(path: Path, row: Any) -> RowRule:
    names = [field.name for field in dataclasses.fields(RowRule)]
    unknown = sorted(set(row) - set(names)) if isinstance(row, dict) else ["…"]
    if unknown:
        raise _wrong(path, f"[[rows]] has no entry {unknown[0]!r}: use {', '.join(names)}")
    skip = row.get("skip", [0, 0])
    fits = isinstance(skip, list) and len(skip) == 2 and all(type(n) is int and n >= 0 for n in skip)
    if not fits:
        raise _wrong(path, f"skip = {brief(skip)}: use two numbers of rows, such as [0, 4]")
    for name, value in row.items():
        if name != "skip" and not isinstance(value, str):
            raise _wrong(path, f"{name} = {brief(value)}: use a text")
    return RowRule(**{**row, "skip": tuple(skip)})


def _wrong(path: Path, why: str) -> UsageError:
    return UsageError(f"The map {str(path)!r} {why}." if why.startswith("has") else f"The map {str(path)!r}: {why}.",
                      slug="bad-map")  # fmt: skip


# Rows of results against rows: step t of a decoder against position t of the other engine's prefill.
#
# Each module has its own sequence of rows, since a decoder goes through all modules in each step. So has each operator
# and line of a module, if both sides have as many of them.


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
