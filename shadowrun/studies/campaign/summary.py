"""The figures of a campaign, each with its definition, from counts alone.

The published study (arXiv 2511.11601) defines its quantities in a text that is not public. These are our definitions;
the report prints them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shadowrun.studies.campaign.causes.known_causes import known_causes
from shadowrun.studies.campaign.causes.root_causes import Seen, is_compiled, root_causes, signature, without_flaws
from shadowrun.studies.campaign.oracles import FIRED, ORACLES, from_mask
from shadowrun.studies.campaign.run_variants import TARGET, VariantFinding
from shadowrun.studies.sweep.cases import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shadowrun.settings import KnownLine
    from shadowrun.studies.campaign.causes.cause_report import CauseFile
    from shadowrun.studies.campaign.causes.root_causes import RootCause
    from shadowrun.studies.campaign.store import CampaignStore
    from shadowrun.studies.campaign.tables import ResultRow

__all__ = [
    "DEFINITIONS",
    "OracleCount",
    "Platform",
    "Session",
    "Summary",
    "causes_of",
    "count_oracles",
    "summarise",
    "upper_bound",
]

DEFINITIONS: Final = {
    "program": "a graph of operator calls, distinct by its hash: operators, attributes, shapes, dtypes and layouts",
    "variant": "a program after the mutations of its recipe; variants of one hash count once",
    "valid": "the reference runs the variant",
    "support": "operators of the corpus that the platform runs; an operator is missing if any variant found no kernel",
    "fewer": "(operators that the reference runs - operators that the platform runs) / operators that it runs",
    "discrepancy rate": "variants with a discrepancy / variants whose results were compared, by each oracle",
    "compile failure": "valid variants that torch.compile or the compiled code refuses / variants compiled",
    "compile difference": "variants whose compiled results no rounding explains / variants compiled",
    "root cause": "findings with the same operator, class of dtype, verdict, cause and type of exception; other forms "
    "of the operator (in place, out=) and other dtypes are one with it where the judge explains them alike",
    "framework flaw": "a root cause that every platform shows, or that the reference shows against itself",
    "platform issue": "any other root cause",
}
_OP_ORDER: Final = {"ok": 0, "fallback": 1, "error": 2, "unsupported": 3}
# -ln 0.05 = 2.996: of n trials without an event, the rate is below 3 / n at 95 % (rule of three).
_CONFIDENCE: Final = 3.0


def upper_bound(n_events: int, n: int) -> float | None:
    """Bound on a rate at 95 % where nothing was seen; None where something was, or nothing was tried."""
    return _CONFIDENCE / n if n and not n_events else None


@dataclass(frozen=True, slots=True)
class OracleCount:
    """What one oracle said of the variants that were compared.

    Attributes:
        name: One of `ORACLES`.
        n_differ: Variants whose results differ by it.
        n_missed: Variants in which an operator returned other bits, and the oracle saw no difference.
        n_alone: Variants in which it saw a difference, and no operator returned other bits.
    """

    name: str
    n_differ: int
    n_missed: int
    n_alone: int


@dataclass(frozen=True, slots=True)
class Platform:
    """The results on one target.

    Attributes:
        name: The target.
        statuses: Number of variants by status.
        ops: Number of operators by ``ok``, ``unsupported``, ``fallback``, ``error``.
        n_ops_of_reference: Operators that the reference runs.
        missing: Operators without a kernel.
        oracles: What each oracle said.
        n_compared: Variants whose results were compared.
        n_fired: Of these, those in which an operator returned other bits.
        causes: Findings by cause.
        n_failed: Variants that raised on it.
        cpu_ms: Processor time.
    """

    name: str
    statuses: Mapping[str, int]
    ops: Mapping[str, int] = field(default_factory=dict)
    n_ops_of_reference: int = 0
    missing: tuple[str, ...] = ()
    oracles: tuple[OracleCount, ...] = ()
    n_compared: int = 0
    n_fired: int = 0
    causes: Mapping[str, int] = field(default_factory=dict)
    n_failed: int = 0
    cpu_ms: float = 0.0

    @property
    def is_compiled(self) -> bool:
        """Whether it is compiled code."""
        return is_compiled(self.name)

    @property
    def n_run(self) -> int:
        """Valid variants."""
        return sum(n for status, n in self.statuses.items() if status != "invalid")

    @property
    def fewer(self) -> float:
        """Share of the reference's operators that it lacks."""
        n = self.n_ops_of_reference
        return self.ops.get("unsupported", 0) / n if n else 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """A start of a campaign.

    Attributes:
        started: ISO 8601, UTC.
        jobs: Worker processes.
        n_variants: Variants that it settled.
        wall_s: Seconds by the clock.
        cpu_s: Seconds of processor time.
    """

    started: str
    jobs: int
    n_variants: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A campaign in figures.

    Attributes:
        title: Targets against reference.
        stages: Counts in and out of each stage, with what was left out and why.
        platforms: One for each target.
        root_causes: All root causes.
        validity: By mutator, the number of variants with it, and of valid ones.
        n_variants: Distinct variants that were run.
        n_duplicates: Variants that were equal to an earlier one.
        invalid: Reasons of invalid variants, with their number, the most frequent first.
        wall_s: Time by the clock; 0 if unknown.
        jobs: Worker processes.
        is_simulated: Whether a target is simulated: an oracle that says nothing of a flaw has then missed one.
        flaws: Those that were planted.
        new: Root causes that an earlier campaign did not have; None without one.
        gone: Root causes that only the earlier campaign has.
        known: Root causes that the ledger covers, with the reason.
        scripts: What `campaign repro` wrote, by root cause.
        sessions: Starts of the campaign.
        versions: Of torch and others.
        recipes: JSON of the smallest variant of each root cause, by its number.
    """

    title: str
    stages: tuple[tuple[str, int, int, Mapping[str, int]], ...]
    platforms: tuple[Platform, ...]
    root_causes: tuple[RootCause, ...]
    validity: Mapping[str, tuple[int, int]]
    n_variants: int
    n_duplicates: int
    invalid: tuple[tuple[str, int], ...] = ()
    wall_s: float = 0.0
    jobs: int = 1
    is_simulated: bool = False
    flaws: tuple[str, ...] = ()
    new: frozenset[str] | None = None
    gone: tuple[str, ...] = ()
    known: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, CauseFile] = field(default_factory=dict)
    sessions: tuple[Session, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    recipes: Mapping[int, str] = field(default_factory=dict)

    @property
    def cpu_s(self) -> float:
        """Processor time of all variants, in seconds."""
        return sum(p.cpu_ms for p in self.platforms) / 1e3

    @property
    def findings(self) -> Sequence[RootCause]:
        """Root causes that count against a platform or the framework: all but what a platform lacks."""
        return [c for c in self.root_causes if not c.is_missing]


def count_oracles(masks: Iterable[tuple[int, int]]) -> tuple[tuple[OracleCount, ...], int, int]:
    """What each oracle said, from the masks of all results.

    Args:
        masks: Mask of a result, and the number of results that have it; -1 for results that were not compared.

    Returns:
        The oracles, the number of results that were compared, and of those in which an operator's bits differed.
    """
    differ: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    n_compared = n_fired = 0
    for mask, n in masks:
        if mask < 0:
            continue
        names = from_mask(mask)
        fired = FIRED in names
        n_compared += n
        n_fired += n if fired else 0
        for name in ORACLES:
            if name in names:
                differ[name] += n
                alone[name] += 0 if fired else n
            elif fired:
                missed[name] += n
    counts = tuple(OracleCount(name, differ[name], missed[name], alone[name]) for name in ORACLES)
    return counts, n_compared, n_fired


def summarise(
    store: CampaignStore,
    *,
    stages: Iterable[tuple[str, int, int, Mapping[str, int]]] = (),
    simulated: bool = False,
    flaws: Sequence[str] = (),
    before: CampaignStore | None = None,
    ledger: Sequence[KnownLine] = (),
    scripts: Mapping[str, CauseFile] | None = None,
) -> Summary:
    """The figures of a store.

    Args:
        store: The store.
        stages: Of the programs.
        simulated: Whether a target is simulated.
        flaws: Flaws that were planted in it.
        before: Store of an earlier campaign.
        ledger: Known issues.
        scripts: What `campaign repro` wrote.
    """
    variants = _Variants(store)
    counted = [_Counted() for _ in store.info.targets]
    valid: Counter[str] = Counter()
    for result in store.results():
        counted[result.target].add(result)
    for mutators in variants.valid_mutators():
        valid.update(mutators)
    causes = causes_of(store)
    # All that any target met: the reference has run each variant before a target does.
    reference = {op for c in counted for op in c.ops}
    sessions = tuple(Session(*row) for row in store.sessions())
    earlier = _signatures(before) if before is not None else set()
    wanted = {cause.smallest.number for cause in causes}
    return Summary(
        title=f"{', '.join(store.info.targets)} against {store.info.ref}",
        stages=(*stages, *variants.stages(dict(zip(store.info.targets, counted, strict=True)))),
        platforms=tuple(c.platform(n, len(reference)) for n, c in zip(store.info.targets, counted, strict=True)),
        root_causes=tuple(causes),
        validity={name: (n, valid[name]) for name, n in variants.mutators.items()},
        n_variants=variants.n_distinct,
        n_duplicates=variants.n_duplicates,
        invalid=tuple(variants.invalid.most_common()),
        # Shards that ran at once add up: the rate is that of one process, as in published figures.
        wall_s=sum(s.wall_s for s in sessions),
        jobs=max((s.jobs for s in sessions), default=1),
        is_simulated=simulated or bool(flaws),
        flaws=tuple(flaws),
        # By all forms of a cause: the earlier campaign may have met add_ where this one met add.
        new=None if before is None else frozenset(_text(c) for c in causes if not earlier & _texts(c)),
        gone=tuple(sorted(earlier.difference(*map(_texts, causes)))),
        known=known_causes(causes, store.info.targets, ledger),
        scripts=scripts or {},
        sessions=sessions,
        versions=store.info.versions,
        recipes={v.number: v.recipe for v in store.variants() if v.number in wanted and v.recipe},
    )


def causes_of(store: CampaignStore) -> list[RootCause]:
    """The root causes of a store, in the order in which the report numbers them."""
    seen = [
        Seen(result.number, result.target if f.role == TARGET else -1, result.n_calls, VariantFinding(*f))
        for result in store.results()
        for f in result.findings
    ]
    return root_causes(seen, sum(not is_compiled(name) for name in store.info.targets))


def _text(cause: RootCause) -> str:
    return str(cause.signature)


def _texts(cause: RootCause) -> set[str]:
    return {_text(cause), *map(str, cause.others)}


def _signatures(store: CampaignStore) -> set[str]:
    return {str(signature(VariantFinding(*found))) for result in store.results() for found in result.findings}


class _Variants:
    """Counts of the variants of a store.

    Attributes:
        n_distinct: Without duplicates.
        n_duplicates: Equal to an earlier one.
        invalid: Number by reason.
        mutators: Number of distinct variants by mutator.
    """

    def __init__(self, store: CampaignStore) -> None:
        self.n_distinct = self.n_duplicates = 0
        self.invalid: Counter[str] = Counter()
        self.mutators: Counter[str] = Counter()
        self._valid: list[tuple[str, ...]] = []
        for row in store.variants():
            if row.duplicate_of >= 0:
                self.n_duplicates += 1
                continue
            self.n_distinct += 1
            # A mutator that was used twice in a variant counts once: the figure is of variants.
            self.mutators.update(dict.fromkeys(row.mutators, 1))
            if row.invalid is None:
                self._valid.append(row.mutators)
            else:
                # Without the message, which has figures in it.
                self.invalid[row.invalid.partition(": ")[0]] += 1

    def valid_mutators(self) -> Iterable[Iterable[str]]:
        """Names of the mutators of each valid variant, each once."""
        return map(set, self._valid)

    def stages(self, counted: Mapping[str, _Counted]) -> Iterable[tuple[str, int, int, Mapping[str, int]]]:
        """Recipes, valid variants, results that were compared."""
        n_made = self.n_distinct + self.n_duplicates
        yield "recipes", n_made, self.n_distinct, {"duplicate": self.n_duplicates}
        n_valid = len(self._valid)
        yield "variants", self.n_distinct, n_valid, dict(self.invalid.most_common())
        for name, c in counted.items():
            left = {s: n for s, n in c.statuses.items() if s in ("unsupported", "unverified", "failed")}
            yield f"results on {without_flaws(name)}", n_valid, c.statuses["ok"] + c.statuses["finding"], left


class _Counted:
    """Counts of the results on one target."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.ops: dict[str, str] = {}
        self.masks: Counter[int] = Counter()
        self.causes: Counter[str] = Counter()
        self.n_failed = 0
        self.cpu_us = 0

    def add(self, result: ResultRow) -> None:
        """One more."""
        self.statuses[result.status] += 1
        self.masks[result.oracles] += 1
        self.cpu_us += result.cpu_us
        # Once for a variant, however many of its calls raised: the rate is of variants.
        self.n_failed += any(f.kind == Kind.ERROR for f in result.findings)
        self.causes.update(
            f.cause for f in result.findings if f.kind in (Kind.MISMATCH, Kind.FORM) and f.role == TARGET
        )
        for op, status in result.ops.items():
            # The worst of all variants.
            if _OP_ORDER.get(status, 0) >= _OP_ORDER.get(self.ops.get(op, ""), -1):
                self.ops[op] = status

    def platform(self, name: str, n_ops: int) -> Platform:
        """The figures of a target."""
        oracles, n_compared, n_fired = count_oracles(self.masks.items())
        return Platform(
            name,
            dict(self.statuses),
            dict(Counter(self.ops.values())),
            n_ops,
            tuple(sorted(op for op, status in self.ops.items() if status == "unsupported")),
            oracles,
            n_compared,
            n_fired,
            dict(self.causes),
            self.n_failed,
            self.cpu_us / 1e3,
        )
