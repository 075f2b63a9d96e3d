"""What a report says, chosen and bounded once for all formats."""

from __future__ import annotations

import dataclasses
import os.path
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from shadowrun.analysis.findings import without_numbers
from shadowrun.analysis.words import plural
from shadowrun.report.tame import tame
from shadowrun.report.words import clip, overhead
from shadowrun.store.datafile import ENDED_EARLY
from shadowrun.store.records import REGION
from shadowrun.store.sources import are_ranks, name_runs
from shadowrun.types import Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.analysis import (
        Coverage,
        DriftStep,
        Finding,
        Gate,
        Known,
        Note,
        OperatorSummary,
        Regions,
        RegionSummary,
        Skipped,
        Step,
    )
    from shadowrun.store.sources import SourceRun
    from shadowrun.types import OpRecord, RunInfo

__all__ = ["Content", "Section", "Source", "Top"]

MAX_FINDINGS = 50
"""Of each kind, so that a report stays under 2 MB whatever the run."""
MAX_OPERATORS = 300
MAX_ROWS = 50
MAX_DIGEST = 8
MAX_STEPS = 12
MAX_ARGV = 200

_INCOMPLETE = "The run is still going on or was killed, or its disk was full: this is what it had recorded."

_SECTIONS = {
    "unsupported": ("Unsupported operators", "The target has no kernel for these calls."),
    "error": ("Errors", "The target raised where the reference did not."),
    "mismatch": ("Mismatches", "The target ran, and no correct implementation could have returned this."),
    "fallback": ("Fallbacks", "The target answered, but computed on the CPU."),
    "slow": ("Slow operators", "Times of single calls, launch included: a hint where to profile, not a benchmark."),
}

T = TypeVar("T")


class Source(Protocol):
    """Where content comes from: what a report needs of `shadowrun.run.Run`."""

    @property
    def info(self) -> RunInfo:
        """As in `Run`."""

    def summary(self) -> list[OperatorSummary]:
        """As in `Run`."""

    def regions(self) -> Regions:
        """As in `Run`."""

    def findings(self) -> list[Finding]:
        """As in `Run`."""

    def known(self) -> Known:
        """As in `Run`."""

    def notes(self) -> list[Note]:
        """As in `Run`."""

    def own_failures(self) -> list[Note]:
        """As in `Run`."""

    def first_divergence(self) -> OpRecord | None:
        """As in `Run`."""

    def coverage(self) -> Coverage:
        """As in `Run`."""

    def counts(self) -> dict[Status, int]:
        """As in `Run`."""

    def steps(self) -> tuple[Step, ...]:
        """As in `Run`."""

    def drift(self) -> list[DriftStep]:
        """As in `Run`."""

    def sources(self) -> tuple[SourceRun, ...]:
        """As in `Run`."""

    def gate(self) -> Gate:
        """As in `Run`."""


@dataclass(frozen=True, slots=True)
class Top(Generic[T]):
    """The first rows of a table, and how many were left out."""

    rows: tuple[T, ...]
    n_more: int

    @classmethod
    def of(cls, rows: Iterable[T], limit: int) -> Top[T]:
        """Cut a table."""
        rows = tuple(rows)
        return cls(tuple(map(tame, rows[:limit])), max(0, len(rows) - limit))


@dataclass(frozen=True, slots=True)
class Section:
    """Findings of one kind."""

    kind: str
    heading: str
    lead: str
    findings: Top[Finding]

    @property
    def n(self) -> int:
        """How many there are."""
        return len(self.findings.rows) + self.findings.n_more


@dataclass(frozen=True, slots=True)
class Content:
    """A report without its form; fields in the order in which they are shown."""

    info: RunInfo
    gate: Gate
    coverage: Coverage  # its figures and missing kernels only
    counts: tuple[tuple[str, int], ...]
    remarks: tuple[str, ...]
    digest: Top[Finding]
    facts: tuple[tuple[str, str], ...]
    first_divergence: OpRecord | None
    first_finding: Finding | None
    first_origin: str
    drift: Top[DriftStep]
    sections: tuple[Section, ...]
    known: Top[Finding]
    operators: Top[OperatorSummary]
    regions: Top[RegionSummary]
    regions_line: str
    regions_skipped: Top[Skipped]
    notes: Top[Note]
    skipped: Top[Skipped]
    own_failures: Top[Note]

    @classmethod
    def of(cls, run: Source) -> Content:
        """Collect what a report on `run` says."""
        info, sources = tame(run.info), run.sources()
        findings, coverage, first, known = run.findings(), run.coverage(), run.first_divergence(), run.known()
        regions = run.regions()
        by_kind = {kind: [f for f in findings if f.kind == kind] for kind in _SECTIONS}
        gate = tame(run.gate(), whole=True)
        return cls(
            info=info,
            gate=gate,
            coverage=tame(
                dataclasses.replace(
                    coverage, missing_kernels=coverage.missing_kernels[:MAX_OPERATORS], operators=(), skipped=()
                )
            ),
            counts=tuple(_counts(run)),
            remarks=_remarks(info, known, gate),
            digest=Top.of(findings, MAX_DIGEST),
            facts=tuple(_facts(info, run.steps(), sources)),
            first_divergence=tame(first),
            first_finding=tame(_finding_of(first, findings)),
            first_origin=clip(_origin(first, sources)),
            drift=_thin(run.drift()),
            sections=tuple(
                Section(kind, heading, lead, Top.of(by_kind[kind], MAX_FINDINGS))
                for kind, (heading, lead) in _SECTIONS.items()
                if by_kind[kind]
            ),
            known=Top.of(known.findings, MAX_ROWS),
            operators=Top.of(run.summary(), MAX_OPERATORS),
            regions=Top.of(regions.rows, MAX_ROWS),
            regions_line=clip(regions.line),
            regions_skipped=Top.of(_by_reason(regions.skipped), MAX_ROWS),
            notes=Top.of(run.notes(), MAX_ROWS),
            skipped=Top.of(_by_reason(s for s in coverage.skipped if not s.op.startswith(REGION)), MAX_ROWS),
            own_failures=Top.of(run.own_failures(), MAX_ROWS),
        )


def _by_reason(skipped: Iterable[Skipped]) -> list[Skipped]:
    """One row where several devices, those of ranks for example, skipped the same."""
    rows: dict[tuple[str, str], Skipped] = {}
    for row in skipped:
        seen = rows.get((row.op, row.reason))
        rows[row.op, row.reason] = row if seen is None else dataclasses.replace(seen, n=seen.n + row.n)
    return sorted(rows.values(), key=lambda row: -row.n)


def _counts(run: Source) -> Iterable[tuple[str, int]]:
    """Calls by status; shadowrun's own failures are not shown as the target's errors."""
    counts = run.counts()
    own = sum(failure.n_calls for failure in run.own_failures())
    counts[Status.ERROR] -= own
    return [(name, n) for name, n in [*((str(status), n) for status, n in counts.items()), ("own failures", own)] if n]


def _finding_of(first: OpRecord | None, findings: list[Finding]) -> Finding | None:
    """The finding that a record belongs to."""
    if first is None:
        return None
    key = (first.call.op, first.verdict.cause, without_numbers(first.verdict.explanation))
    same = (f for f in findings if f.kind == "mismatch" and (f.op, f.cause, without_numbers(f.explanation)) == key)
    return next(same, None)


def _origin(first: OpRecord | None, sources: tuple[SourceRun, ...]) -> str:
    """Which run of a combined file a call is from, and its number there."""
    if first is None or not sources:
        return ""
    source = next(source for source in reversed(sources) if source.first_seq <= first.call.seq)
    name = name_runs(sources, [source.number]).removesuffix(" only")
    return f"{name} first, as its call {first.call.seq - source.first_seq:,}"


def _remarks(info: RunInfo, known: Known, gate: Gate) -> tuple[str, ...]:
    ended = info.complete or any(note.startswith(ENDED_EARLY) for note in info.notes)
    incomplete = () if ended else (_INCOMPLETE,)
    ledger = [use.remark for use in known.lines if use.remark]
    more = (f"The ledger has {len(ledger) - MAX_DIGEST} more lines that are out of date.",)
    lines = (*ledger[:MAX_DIGEST], *(more if len(ledger) > MAX_DIGEST else ()))
    budget = (f"Not all was compared, to keep within the overhead budget: {overhead(info)}.",) if info.budget else ()
    unselected = (f"Not found: {info.unselected}.",) if info.unselected and info.unselected not in gate.line else ()
    return tuple(clip(note) for note in (*incomplete, *unselected, *budget, *info.notes, *lines))


def _facts(info: RunInfo, steps: tuple[Step, ...], sources: tuple[SourceRun, ...]) -> Iterable[tuple[str, str]]:
    argv = " ".join([os.path.basename(info.argv[0]), *info.argv[1:]]) if info.argv else ""  # noqa: PTH119 - no path
    rows = [
        ("target", _pairs(info.target, info.target_fingerprint)),
        ("reference", _pairs(info.ref, info.ref_fingerprint)),
        ("overhead", overhead(info)),
        ("program", clip(argv, MAX_ARGV)),
        ("steps", f"{len(steps):,}, {sum(step.wall_s for step in steps):.3g} s" if steps else ""),
        ("rank", f"{info.rank} of {info.world_size}" if info.world_size > 1 and not sources else ""),
        ("combined", _combined(sources)),
        ("versions", ", ".join(f"{name} {version}" for name, version in info.versions.items())),
        ("options", ", ".join(f"{k}={v}" for k, v in info.config.items() if v is not None)),
        ("started", info.started),
    ]
    return [(label, clip(text)) for label, text in rows if text]


def _combined(sources: tuple[SourceRun, ...]) -> str:
    if not sources:
        return ""
    names = name_runs(sources, range(len(sources))).removesuffix(" only")
    of = f" of {sources[0].info.world_size}" if are_ranks(sources) else ""
    return f"{plural(len(sources), 'file')}: {names}{of}"


def _pairs(spec: str, fingerprint: dict[str, object]) -> str:
    described = ", ".join(f"{key} {value}" for key, value in fingerprint.items() if value not in (None, ""))
    return f"{spec} ({described})" if described else spec


def _thin(steps: list[DriftStep]) -> Top[DriftStep]:
    """At most `MAX_STEPS`, evenly spread, with the first and the last."""
    if len(steps) <= MAX_STEPS:
        return Top.of(steps, MAX_STEPS)
    picked = {round(i * (len(steps) - 1) / (MAX_STEPS - 1)) for i in range(MAX_STEPS)}
    return Top(tuple(tame(steps[i]) for i in sorted(picked)), len(steps) - len(picked))
