"""What a report says, chosen and bounded once for all formats."""

from __future__ import annotations

import os.path
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from shadowrun.report.words import clip, overhead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shadowrun.analysis import Coverage, DriftStep, Finding, Gate, Note, OperatorSummary, Skipped, Step
    from shadowrun.types import OpRecord, RunInfo, Status

__all__ = ["Content", "Section", "Source", "Top"]

MAX_FINDINGS = 50
"""Of each kind, so that a report stays under 2 MB whatever the run."""
MAX_OPERATORS = 300
MAX_ROWS = 50
MAX_STEPS = 12
MAX_ARGV = 200

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
    def info(self) -> RunInfo: ...
    def summary(self) -> list[OperatorSummary]: ...
    def findings(self) -> list[Finding]: ...
    def notes(self) -> list[Note]: ...
    def own_failures(self) -> list[Note]: ...
    def first_divergence(self) -> OpRecord | None: ...
    def coverage(self) -> Coverage: ...
    def counts(self) -> dict[Status, int]: ...
    def steps(self) -> tuple[Step, ...]: ...
    def drift(self) -> list[DriftStep]: ...
    def gate(self) -> Gate: ...


@dataclass(frozen=True, slots=True)
class Top(Generic[T]):
    """The first rows of a table, and how many were left out."""

    rows: tuple[T, ...]
    n_more: int

    @classmethod
    def of(cls, rows: Iterable[T], limit: int) -> Top[T]:
        """Cut a table."""
        rows = tuple(rows)
        return cls(rows[:limit], max(0, len(rows) - limit))


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
    coverage: Coverage
    counts: tuple[tuple[Status, int], ...]
    remarks: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    first_divergence: OpRecord | None
    drift: Top[DriftStep]
    sections: tuple[Section, ...]
    operators: Top[OperatorSummary]
    notes: Top[Note]
    skipped: Top[Skipped]
    own_failures: Top[Note]

    @classmethod
    def of(cls, run: Source) -> Content:
        """Collect what a report on `run` says."""
        info = run.info
        findings, coverage = run.findings(), run.coverage()
        by_kind = {kind: [f for f in findings if f.kind == kind] for kind in _SECTIONS}
        return cls(
            info=info,
            gate=run.gate(),
            coverage=coverage,
            counts=tuple((status, n) for status, n in run.counts().items() if n),
            remarks=_remarks(info),
            facts=tuple(_facts(info, run.steps())),
            first_divergence=run.first_divergence(),
            drift=_thin(run.drift()),
            sections=tuple(
                Section(kind, heading, lead, Top.of(by_kind[kind], MAX_FINDINGS))
                for kind, (heading, lead) in _SECTIONS.items()
                if by_kind[kind]
            ),
            operators=Top.of(run.summary(), MAX_OPERATORS),
            notes=Top.of(run.notes(), MAX_ROWS),
            skipped=Top.of(coverage.skipped, MAX_ROWS),
            own_failures=Top.of(run.own_failures(), MAX_ROWS),
        )


def _remarks(info: RunInfo) -> tuple[str, ...]:
    incomplete = () if info.complete else ("The run is still going on or was killed: this is what it had recorded.",)
    return tuple(clip(note) for note in (*incomplete, *info.notes))


def _facts(info: RunInfo, steps: tuple[Step, ...]) -> Iterable[tuple[str, str]]:
    argv = " ".join([os.path.basename(info.argv[0]), *info.argv[1:]]) if info.argv else ""  # noqa: PTH119 - no path
    rows = [
        ("target", _pairs(info.target, info.target_fingerprint)),
        ("reference", _pairs(info.ref, info.ref_fingerprint)),
        ("overhead", overhead(info)),
        ("program", clip(argv, MAX_ARGV)),
        ("steps", f"{len(steps):,}, {sum(step.wall_s for step in steps):.3g} s" if steps else ""),
        ("rank", f"{info.rank} of {info.world_size}" if info.world_size > 1 else ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in info.versions.items())),
        ("options", ", ".join(f"{k}={v}" for k, v in info.config.items() if v is not None)),
        ("started", info.started),
    ]
    return [(label, clip(text)) for label, text in rows if text]


def _pairs(spec: str, fingerprint: dict[str, object]) -> str:
    described = ", ".join(f"{key} {value}" for key, value in fingerprint.items() if value not in (None, ""))
    return f"{spec} ({described})" if described else spec


def _thin(steps: list[DriftStep]) -> Top[DriftStep]:
    """At most `MAX_STEPS`, evenly spread, with the first and the last."""
    if len(steps) <= MAX_STEPS:
        return Top(tuple(steps), 0)
    picked = {round(i * (len(steps) - 1) / (MAX_STEPS - 1)) for i in range(MAX_STEPS)}
    return Top(tuple(steps[i] for i in sorted(picked)), len(steps) - len(picked))
