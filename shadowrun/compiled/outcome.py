"""What became of each compiled region, and the report on a whole check."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shadowrun.types import Status, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shadowrun.compiled.accuracy import Errors
    from shadowrun.compiled.compile_spec import CompileSpec
    from shadowrun.compiled.fault_location import Localisation
    from shadowrun.compiled.repro import FaultyGraph
    from shadowrun.repro import Repro

__all__ = ["OUTCOME_OF", "CompileReport", "CompileStage", "RegionOutcome", "RegionReport", "error_text"]


class RegionOutcome(enum.StrEnum):
    """What became of something that was compiled; the first that applies. Not known to be right is worse than slow."""

    COMPILE_ERROR = "compile error"
    RUNTIME_ERROR = "runtime error"
    MISMATCH = "mismatch"
    UNVERIFIED = "unverified"
    RECOMPILE_STORM = "recompile storm"
    GRAPH_BREAK = "graph break"
    SLOWER = "slower than eager"
    OK = "ok"


OUTCOME_OF: Final = {
    Status.MATCH: RegionOutcome.OK,
    Status.MISMATCH: RegionOutcome.MISMATCH,
    Status.UNVERIFIED: RegionOutcome.UNVERIFIED,
}
_RAISED = (RegionOutcome.COMPILE_ERROR, RegionOutcome.RUNTIME_ERROR)


@dataclass(frozen=True, slots=True)
class RegionReport:
    """One graph that was compiled, forward or backward.

    Attributes:
        name: ``graph 0 forward``.
        outcome: COMPILE_ERROR, RUNTIME_ERROR, MISMATCH, UNVERIFIED or OK.
        verdict: On the worst of its calls.
        compile_s: Seconds to compile it.
        n_nodes: Operators in it.
        n_calls: Calls compared.
        error: Class and first line of what was raised.
        localised: The nodes at fault, wrong or failing; None where none were looked for.
        shown: Graph and inputs to show a fault on; None where there is none.
    """

    name: str
    outcome: RegionOutcome
    verdict: Verdict
    compile_s: float
    n_nodes: int
    n_calls: int
    error: str = ""
    localised: Localisation | None = None
    shown: FaultyGraph | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class CompileStage:
    """One rung of the ladder: the whole program, compiled that far.

    Attributes:
        name: ``aot_eager``, ``inductor``, ``inductor, max_fusion_size=1``.
        outcome: COMPILE_ERROR, RUNTIME_ERROR, MISMATCH, UNVERIFIED or OK.
        evidence: The figures, or the error.
    """

    name: str
    outcome: RegionOutcome
    evidence: str


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What `compile_check` found.

    Attributes:
        name: The function or model.
        backend: ``inductor``, ``inductor mode=max-autotune``.
        outcome: The worst of all that was seen.
        verdict: On the program as a whole, compiled by the backend as it is.
        regions: Each graph, in the order in which they were made.
        graph_breaks: Reasons of graph breaks, and how often each occurred.
        n_graphs: Graphs that Dynamo made.
        n_recompiled: Graphs made anew for calls with the same inputs.
        error: Class and first line of what the program as a whole raised when compiled.
        compile_s: Seconds of the first call beyond those of an eager call.
        speed_ratio: Time of an eager call over that of a compiled one; 2 is twice as fast. -1: not measured.
        memory_ratio: Peak memory of a compiled call over that of an eager one, by torch's allocator; -1: unknown.
        ladder: Stages, where there was something to place.
        notes: What a reader should know.
        errors: How far the results of the program that differ are from its float64 results; None where none differ, or
            float64 is not possible.
        seconds: What each step of the check took: the whole program, each graph, search, stages.
        compile_spec: How it was compiled, to compile parts again.
        allow_unverified: `ok` is True also where something could not be verified.
    """

    name: str
    backend: str
    outcome: RegionOutcome
    verdict: Verdict
    regions: tuple[RegionReport, ...] = ()
    graph_breaks: Mapping[str, int] = field(default_factory=dict)
    n_graphs: int = 0
    n_recompiled: int = 0
    error: str = ""
    compile_s: float = 0.0
    speed_ratio: float = -1.0
    memory_ratio: float = -1.0
    ladder: tuple[CompileStage, ...] = ()
    notes: tuple[str, ...] = ()
    errors: Errors | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    compile_spec: CompileSpec | None = field(default=None, repr=False, compare=False)
    allow_unverified: bool = False

    @property
    def ok(self) -> bool:
        """Whether the compiled program is known to compute what eager does: graph breaks and slowness are no errors."""
        # A gate that passes on what was never compared would be wrong in silence.
        if self.outcome is RegionOutcome.UNVERIFIED:
            return self.allow_unverified
        return not self.failed

    @property
    def failed(self) -> bool:
        """Whether it deviates from eager, or raises; what could not be verified has not failed."""
        return self.outcome in (*_RAISED, RegionOutcome.MISMATCH)

    def repro(self, folder: str | Path, *, time_limit_s: float = 60.0) -> list[Repro]:
        """Write a stand-alone script for each region and operator that is wrong or fails.

        Each gets a folder with a script that needs only torch and the backend, its inputs and the versions; it exits 1
        while the fault is there. Inputs of a node that is wrong alone are made smaller while the fault stays. Each
        script is run once in a new process.

        Args:
            folder: Gets a folder for each.
            time_limit_s: For making the inputs of one smaller.

        Returns:
            The scripts; none if nothing is wrong, or nothing wrong was found in a graph by itself.

        Raises:
            UsageError: The backend is a function that a script cannot import.
        """
        # Imported here, since `repro` imports this module.
        from shadowrun.compiled.repro import write_repros

        return write_repros(self, Path(folder), time_limit_s=time_limit_s)

    def summary(self) -> str:
        """The report as text."""
        return "\n".join(self._lines())

    def __str__(self) -> str:
        return self.summary()

    def _lines(self) -> Iterator[str]:
        yield f"{self.name} compiled with {self.backend} against eager: {self.outcome}"
        if self.error:
            yield f"  {self.error}"
        elif said := _said(self.verdict):
            yield f"  whole program: {said}"
        for region in self.regions:
            cost = f"{region.n_nodes} operators, compiled in {region.compile_s:.1f} s"
            yield f"  {region.name}: {region.outcome} ({cost})"
            if said := _said(region.verdict) if region.outcome not in _RAISED else "":
                yield f"    {said}"
            if region.error:
                yield f"    {region.error}"
            if region.localised is not None:
                yield from _culprits(region)
        for reason, n in self.graph_breaks.items():
            yield f"  graph break, {n} times: {reason.strip().partition(chr(10))[0]}"
        if self.n_recompiled:
            yield f"  {self.n_recompiled} graphs were compiled again for calls with the same inputs"
        if self.ladder:
            yield "  stages:"
            yield from (f"    {s.name}: {s.outcome}" + (f", {s.evidence}" if s.evidence else "") for s in self.ladder)
        # Both directions in words: 0.5 times faster is read as faster.
        if self.speed_ratio > 0:
            kind = "faster" if self.speed_ratio >= 1 else "slower"
            ratio = self.speed_ratio if self.speed_ratio >= 1 else 1 / self.speed_ratio
            memory = f", peak memory {self.memory_ratio:.2f} times eager's" if self.memory_ratio > 0 else ""
            yield f"  {ratio:.2f} times {kind} than eager{memory}; {self.compile_s:.1f} s to compile"
        if self.seconds:
            steps = ", ".join(f"{step} {seconds:.1f}" for step, seconds in self.seconds.items() if seconds >= 0.05)
            yield f"  seconds of this check: {steps}"
        if self.outcome is RegionOutcome.UNVERIFIED and not self.allow_unverified:
            yield "  not verified counts as not ok: pass allow_unverified=True (--allow-unverified) to let it pass"
        yield from (f"  note: {note}" for note in self.notes)


def _said(verdict: Verdict) -> str:
    if verdict == Verdict(Status.MATCH):
        return "equal bit by bit"
    return ": ".join(part for part in (verdict.explanation, verdict.evidence) if part)


def _culprits(region: RegionReport) -> Iterator[str]:
    localised = region.localised
    assert localised is not None
    word = "fails" if region.error else "wrong"
    for c in localised.culprits:
        where = ", ".join(part for part in (c.module, c.site) if part)
        yield f"    {word}: {c.op} ({c.node}), {c.how}" + (f"; {where}" if where else "")
        if c.evidence != region.error:
            yield f"      {c.evidence}"
    if localised.note:
        yield f"    {localised.note}"
    yield f"    (found with {localised.n_compiled} compilations in {localised.seconds:.1f} s)"


def error_text(error: BaseException) -> str:
    """``RuntimeError: the first line``."""
    # Dynamo wraps what a backend raises.
    cause = getattr(error, "inner_exception", None) or error
    text = str(cause).strip().partition("\n")[0]
    return f"{type(cause).__name__}: {text}"[:300]
