"""Support of operators, from coverage files.

`SupportTable` is one sweep, `Platforms` joins several sweeps by operator, and `Changes` compares two sweeps.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shadowrun.errors import UsageError
from shadowrun.studies.sweep.cases import FAILURES, NOT_INVARIANT, Case, CaseFinding, Kind, Support
from shadowrun.studies.sweep.coverage_file import CoverageFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from shadowrun.studies.sweep.cases import CaseOutcome, Part
    from shadowrun.studies.sweep.coverage_file import SweepInfo

__all__ = [
    "Change",
    "Changes",
    "Direction",
    "FailingPart",
    "OperatorSupport",
    "Platforms",
    "SupportRow",
    "SupportTable",
    "Sweep",
    "joined",
    "read_sweeps",
    "support_of",
]


@dataclass(frozen=True, slots=True)
class FailingPart:
    """A part of an operator that fails, for one reason.

    Attributes:
        dtype, part: Dtype and part.
        finding: The reason; its message is that of the first case.
        n: Cases that fail for it.
        of: Cases of the part that count.
        first: The first failing case.
        inputs: Inputs of that case.
    """

    dtype: str
    part: Part
    finding: CaseFinding
    n: int
    of: int
    first: Case
    inputs: str


@dataclass(frozen=True, slots=True)
class OperatorSupport:
    """Support of one operator.

    Attributes:
        name: Operator.
        support: Over all dtypes and parts.
        parts: Support by dtype and part.
        counts: Cases by kind.
        failing: Failures with their reasons, the worst first.
    """

    name: str
    support: Support
    parts: Mapping[tuple[str, Part], Support]
    counts: Mapping[Kind, int]
    failing: tuple[FailingPart, ...]


@dataclass(frozen=True, slots=True)
class SupportTable:
    """A sweep as a table.

    Attributes:
        operators: By name.
        counts: Cases by dtype and part, and by kind.
        not_invariant: Operators that round an item differently in a batch than alone: ``aten::bmm``.
    """

    operators: tuple[OperatorSupport, ...]
    counts: Mapping[tuple[str, Part], Mapping[Kind, int]]
    not_invariant: tuple[str, ...] = ()

    @property
    def by_support(self) -> dict[Support, int]:
        """Number of operators of each class."""
        counted = Counter(operator.support for operator in self.operators)
        return {support: counted[support] for support in Support}

    @property
    def totals(self) -> dict[Kind, int]:
        """Cases of each kind."""
        counted: Counter[Kind] = Counter()
        for kinds in self.counts.values():
            counted.update(kinds)
        return {kind: counted[kind] for kind in Kind}

    @classmethod
    def from_results(cls, results: Iterable[tuple[Case, CaseOutcome]]) -> SupportTable:
        """Read all cases of a sweep, in any order."""
        tallies: dict[str, dict[tuple[str, Part], _Tally]] = {}
        not_invariant: set[str] = set()
        for case, outcome in results:
            # Kept apart: the case passes.
            not_invariant.update(f.op for f in outcome.findings if f.explanation == NOT_INVARIANT)
            tallies.setdefault(case.operator, {}).setdefault((case.dtype, case.part), _Tally()).add(case, outcome)
        counts: dict[tuple[str, Part], Counter[Kind]] = {}
        for parts in tallies.values():
            for key, tally in parts.items():
                counts.setdefault(key, Counter()).update(tally.counts)
        operators = tuple(_operator(name, tallies[name]) for name in sorted(tallies))
        return cls(operators, {key: counts[key] for key in sorted(counts)}, tuple(sorted(not_invariant)))


@dataclass(slots=True)
class _Tally:
    """Cases of one operator, dtype and part."""

    counts: Counter[Kind] = field(default_factory=Counter)
    failing: dict[tuple[str, ...], tuple[CaseFinding, int, Case, str]] = field(default_factory=dict)

    def add(self, case: Case, outcome: CaseOutcome) -> None:
        self.counts[outcome.kind] += 1
        reasons = {
            (f.kind, f.op, f.kernel, f.cause, f.explanation): f
            # Reversed: of findings with one key the first, which is the worst, overwrites the others.
            for f in reversed(outcome.findings)
            if f.kind in FAILURES
        }
        for key, f in reasons.items():
            finding, n, first, inputs = self.failing.get(key, (f, 0, case, outcome.inputs))
            # Cases come in any order; the first case must be the same for each reading of the file.
            if case < first:
                finding, first, inputs = f, case, outcome.inputs
            self.failing[key] = finding, n + 1, first, inputs


def support_of(counts: Mapping[Kind, int]) -> Support:
    """Class of support, from the number of cases of each kind."""
    failed = sum(counts.get(kind, 0) for kind in FAILURES)
    passed = counts.get(Kind.PASS, 0)
    if not failed:
        return Support.FULL if passed else Support.UNTESTED
    return Support.PARTIAL if passed else Support.NONE


def _operator(name: str, parts: dict[tuple[str, Part], _Tally]) -> OperatorSupport:
    total: Counter[Kind] = Counter()
    failing = []
    for (dtype, part), tally in sorted(parts.items()):
        total.update(tally.counts)
        # Of the cases that count: "1 of 4" must not include those that the reference refuses.
        of = sum(n for kind, n in tally.counts.items() if kind is Kind.PASS or kind in FAILURES)
        failing += [
            FailingPart(dtype, part, finding, n, of, first, inputs)
            for finding, n, first, inputs in tally.failing.values()
        ]
    # In one order for each reading: reports of two releases are compared line by line.
    failing.sort(key=lambda f: (FAILURES.index(f.finding.kind), f.dtype, f.part, f.finding.op, f.finding.explanation))
    by_part = {key: support_of(tally.counts) for key, tally in sorted(parts.items())}
    return OperatorSupport(name, support_of(total), by_part, dict(total), tuple(failing))


# Without `UNTESTED`: what one sweep could not test is not compared.
_RANK = {Support.NONE: 0, Support.PARTIAL: 1, Support.FULL: 2}


class Direction(enum.StrEnum):
    """Direction of a change."""

    REGRESSED = "regressed"
    """The class is worse, or a new reason for failing appeared."""
    GAINED = "gained"
    CHANGED = "fails differently"
    """The class is the same, and the reasons differ."""


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one part of an operator in one dtype.

    Attributes:
        name, dtype, part: Operator, dtype and part.
        direction: Direction of the change.
        before, after: Class in each sweep.
        kinds_before, kinds_after: Kinds of failures in each.
        why: The first reason for failing in the later sweep; if no case fails there, in the earlier one.
    """

    name: str
    dtype: str
    part: Part
    direction: Direction
    before: Support
    after: Support
    kinds_before: tuple[Kind, ...]
    kinds_after: tuple[Kind, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Changes:
    """The differences of two sweeps, over the parts that both tested.

    Attributes:
        before, after: Names of the sweeps.
        changes: Regressions first.
        n_compared: Parts that both tested.
        only_before, only_after: Operators that only one of them tested.
    """

    before: str
    after: str
    changes: tuple[Change, ...]
    n_compared: int
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @classmethod
    def between(cls, before: Sweep, after: Sweep) -> Changes:
        """Compare two sweeps, the earlier one first."""
        old, new = _parts(before.table), _parts(after.table)
        both = sorted(set(old) & set(new))
        changes = [c for key in both if (c := _change(key, old[key], new[key]))]
        changes.sort(key=lambda c: (list(Direction).index(c.direction), c.name, c.dtype, c.part))
        names = {key[0] for key in old}, {key[0] for key in new}
        return cls(
            before.label,
            after.label,
            tuple(changes),
            len(both),
            tuple(sorted(names[0] - names[1])),
            tuple(sorted(names[1] - names[0])),
        )

    def in_direction(self, direction: Direction) -> tuple[Change, ...]:
        """The changes in one direction."""
        return tuple(c for c in self.changes if c.direction is direction)


_Key = tuple[str, str, "Part"]


def _parts(table: SupportTable) -> dict[_Key, tuple[Support, OperatorSupport]]:
    return {
        (operator.name, dtype, part): (support, operator)
        for operator in table.operators
        for (dtype, part), support in operator.parts.items()
        if support is not Support.UNTESTED  # a part that one sweep could not test is no change
    }


def _change(key: _Key, old: tuple[Support, OperatorSupport], new: tuple[Support, OperatorSupport]) -> Change | None:
    name, dtype, part = key
    before, after = ([f for f in o.failing if (f.dtype, f.part) == (dtype, part)] for _, o in (old, new))
    kinds_before, kinds_after = (tuple(dict.fromkeys(f.finding.kind for f in failing)) for failing in (before, after))
    reasons = [
        {(f.finding.kind, f.finding.op, f.finding.kernel, f.finding.cause) for f in fs} for fs in (before, after)
    ]
    # A new reason is a regression even if an old reason kept the class at "partial" in both sweeps.
    if _RANK[new[0]] < _RANK[old[0]] or reasons[1] > reasons[0]:
        direction = Direction.REGRESSED
    elif _RANK[new[0]] > _RANK[old[0]] or reasons[1] < reasons[0]:
        direction = Direction.GAINED
    elif reasons[0] != reasons[1]:
        direction = Direction.CHANGED
    else:
        return None
    shown = (after or before)[0].finding
    why = ": ".join(filter(None, (shown.op, shown.cause, shown.explanation or shown.message)))
    return Change(name, dtype, part, direction, old[0], new[0], kinds_before, kinds_after, why)


_WORST_FIRST = (Support.NONE, Support.PARTIAL, Support.UNTESTED, Support.FULL)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One coverage file.

    Attributes:
        label: Its target, followed by the file's name if several files have the same target.
        info: Platforms, options and versions.
        table: Its results.
    """

    label: str
    info: SweepInfo
    table: SupportTable

    @property
    def percent_full(self) -> float:
        """Percentage of the tested operators that are full; 0 if no operator was tested."""
        counts = self.table.by_support
        # An operator that no case tested says nothing of the platform, and would lower its percentage.
        tested = sum(counts.values()) - counts[Support.UNTESTED]
        return 100.0 * counts[Support.FULL] / tested if tested else 0.0


@dataclass(frozen=True, slots=True)
class SupportRow:
    """One operator on all platforms.

    Attributes:
        name: Operator.
        cells: Its support on each platform; None if the sweep did not include it.
    """

    name: str
    cells: tuple[OperatorSupport | None, ...]

    @property
    def supports(self) -> tuple[Support | None, ...]:
        """Class on each platform."""
        return tuple(cell.support if cell else None for cell in self.cells)

    @property
    def differs(self) -> bool:
        """Whether the platforms that tested it have different classes."""
        return len({s for s in self.supports if s not in (None, Support.UNTESTED)}) > 1


@dataclass(frozen=True, slots=True)
class Platforms:
    """Several sweeps, joined by operator.

    Attributes:
        sweeps: In the order given.
        rows: Operators; first those that most platforms lack.
    """

    sweeps: tuple[Sweep, ...]
    rows: tuple[SupportRow, ...]

    @classmethod
    def from_sweeps(cls, sweeps: Sequence[Sweep]) -> Platforms:
        """Join sweeps by operator."""
        by_name = [{o.name: o for o in sweep.table.operators} for sweep in sweeps]
        names = sorted(set().union(*by_name))
        rows = [SupportRow(name, tuple(f.get(name) for f in by_name)) for name in names]
        return cls(tuple(sweeps), tuple(sorted(rows, key=_rank)))

    @property
    def n_differing(self) -> int:
        """Operators with different support on different platforms."""
        return sum(row.differs for row in self.rows)


def joined(paths: Sequence[Path]) -> Sweep:
    """Coverage files of one platform as one sweep: those of the shards of a workflow.

    A case that several files have counts once, as the first has it.

    Raises:
        DataFileError: Missing, or no coverage file.
        UsageError: They are of different platforms or versions of torch.
    """
    infos: list[SweepInfo] = []
    results: dict[Case, CaseOutcome] = {}
    for path in paths:
        file = CoverageFile.open(path)
        try:
            infos.append(file.info)
            for case, outcome in file.results():
                results.setdefault(case, outcome)
        finally:
            file.close()
    facts = {
        "target": [info.target for info in infos],
        "ref": [info.ref for info in infos],
        "torch": [info.versions.get("torch", "?") for info in infos],
    }
    for name, values in facts.items():
        other = next((n for n, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise UsageError(
                f"--join takes the files of one sweep: {name} is {values[0]!r} in {str(paths[0])!r}, and "
                f"{values[other]!r} in {str(paths[other])!r}.",
                slug="bad-option",
            )
    whole = dataclasses.replace(
        infos[0],
        # Shards run at the same time, on machines of their own.
        wall_s=max(info.wall_s for info in infos),
        cpu_s=sum(info.cpu_s for info in infos),
        # A shard that was cut would make an operator full whose failing cases were never run.
        complete=all(info.complete for info in infos),
    )
    return Sweep(whole.target, whole, SupportTable.from_results(results.items()))


def read_sweeps(paths: Sequence[Path]) -> list[Sweep]:
    """Read coverage files.

    Raises:
        DataFileError: Missing, or no coverage file.
    """
    read = []
    for path in paths:
        file = CoverageFile.open(path)
        try:
            read.append((path, file.info, SupportTable.from_results(file.results())))
        finally:
            file.close()
    # Two sweeps of one platform are distinguished by their files.
    named = Counter(info.target for _, info, _ in read)
    return [
        Sweep(f"{info.target} ({path.name})" if named[info.target] > 1 else info.target, info, table)
        for path, info, table in read
    ]


def _rank(row: SupportRow) -> tuple[object, ...]:
    counts = Counter(row.supports)
    return (*(-counts[support] for support in _WORST_FIRST[:2]), row.name)
