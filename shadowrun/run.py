"""`Run`: the results of a comparison, read from its data file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun import analysis
from shadowrun.analysis import (
    CallGroups,
    Coverage,
    DriftStep,
    Finding,
    Gate,
    KnownIssues,
    LedgerUse,
    Note,
    OperatorSummary,
    Regions,
    Step,
)
from shadowrun.errors import ShadowrunWarning, UsageError
from shadowrun.settings import read_settings
from shadowrun.store.captured_inputs import NOT_KEPT
from shadowrun.store.combine import choose, combine_files
from shadowrun.store.connect import SALVAGED
from shadowrun.store.datafile import ENDED_EARLY, DataFile
from shadowrun.store.records import REGION, first_mismatch, read_records
from shadowrun.types import Allowed, Cause, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator
    from os import PathLike

    from shadowrun.repro import Repro
    from shadowrun.repro.call_replayer import Explanation
    from shadowrun.settings import KnownLine
    from shadowrun.store.sources import SourceRun
    from shadowrun.types import OpRecord, RunInfo

__all__ = ["Run", "combine", "load"]

SLOW_RATIO = 10.0


class Run:
    """Results of a run. What `shadowrun.load` returns, and what `compare` returns once it has begun.

    Args:
        data: Data file to read from.
        known: The ledger of known divergences.

    Attributes:
        fail_on: Kinds of findings that fail the run, in its reports too.

    Example:
        >>> run = shadowrun.load("run.shadowrun")  # doctest: +SKIP
        >>> for finding in run.findings():  # doctest: +SKIP
        ...     print(finding.kind, finding.op, finding.next_step)
    """

    def __init__(self, data: DataFile, known: Iterable[KnownLine] = ()) -> None:
        self._data = data
        self._known = tuple(known)
        self.fail_on: Collection[str] = analysis.FAIL_ON
        self._table: tuple[tuple[int, int], CallGroups] | None = None
        self._found: tuple[CallGroups, list[Finding]] | None = None

    @property
    def info(self) -> RunInfo:
        """Description of the run."""
        self._sync()
        info = self._data.info
        if self._data.failure:
            text = f"{ENDED_EARLY}{self._data.failure}"
            info = dataclasses.replace(info, notes=(*info.notes, text))
        return info

    def records(
        self,
        *,
        op: str | None = None,
        status: Status | str | Collection[Status | str] | None = None,
        step: int | None = None,
        module: str | None = None,
        seq: int | None = None,
    ) -> Iterator[OpRecord]:
        """Recorded calls in call order.

        Args:
            op: Glob pattern, ``"aten::*mm*"``.
            status: One status or several.
            step: Training step.
            module: Glob pattern, ``"*.attn.*"``.
            seq: Number of a single call.
        """
        self._sync()
        return read_records(self._data, op=op, status=status, step=step, module=module, seq=seq)

    def summary(self) -> list[OperatorSummary]:
        """One row for each operator, those that need work first."""
        return analysis.summarise(self._read())

    def regions(self) -> Regions:
        """What `torch.compile` made of the program, compared with eager as a whole (``compiled=True``)."""
        return analysis.summarise_regions(self._read(), self._data)

    def findings(self) -> list[Finding]:
        """What needs work, the most actionable first; not what the ledger excuses, which is in `known`."""
        return [finding for finding in self._all_findings() if finding.known is None]

    def notes(self) -> list[Note]:
        """What was not verified, and matches with a cause worth knowing."""
        return analysis.collect_notes(self._read(), self._data)

    def internal_failures(self) -> list[Note]:
        """Calls that shadowrun itself failed to compare."""
        return analysis.collect_internal_failures(self._read(), self._data)

    def known(self) -> LedgerUse:
        """What the ledger of known divergences excuses, and which of its lines are out of date."""
        found = self._all_findings()
        uses = self._ledger().uses(self._read(), found)
        return LedgerUse(tuple(finding for finding in found if finding.known is not None), uses)

    def first_divergence(self) -> OpRecord | None:
        """The first call that mismatched, of all ranks in a combined file; None where all matched.

        What the ledger excuses is passed over.
        """
        self._sync()
        excused: set[int] = set()
        if self._known:
            ledger, rows = self._ledger(), (row for row in self._read().rows if row.outcome.status is Status.MISMATCH)
            excused = {
                row.group.context_id for row in rows if ledger.excuse("mismatch", row.context.op, (row.context.module,))
            }
        return first_mismatch(self._data, excused)

    def coverage(self) -> Coverage:
        """How much of what the program used the target has."""
        return analysis.operator_coverage(self._read(), self._data.info.raised)

    def sources(self) -> tuple[SourceRun, ...]:
        """The runs that were combined into this data file, such as those of all ranks; none in the file of one run."""
        return self._data.sources

    def counts(self) -> dict[Status, int]:
        """Calls of each status."""
        return analysis.count_statuses(self._read())

    def steps(self) -> tuple[Step, ...]:
        """Training steps with their times."""
        return self._read().steps

    def drift(self) -> list[DriftStep]:
        """The worst accumulated error of each step; empty unless the run had ``drift=True``."""
        self._sync()
        return analysis.trace_drift(self._data)

    def gate(self, fail_on: Collection[str] | None = None) -> Gate:
        """Whether the run passes, with the line that says so; `fail_on` names kinds of findings, for once."""
        found, kinds = self._all_findings(), self.fail_on if fail_on is None else fail_on
        new = [finding for finding in found if finding.known is None]
        known = [finding for finding in found if finding.known is not None]
        info = self._data.info
        salvaged = any(note.startswith(SALVAGED) for note in info.notes)
        return analysis.evaluate_gate(
            new, self.counts(), kinds, known, self.regions().line, info.raised, info.unselected, salvaged=salvaged
        )

    def to_rows(self) -> list[dict[str, Any]]:
        """The summary as dictionaries, for a data frame."""
        return [dataclasses.asdict(row) for row in self.summary()]

    def write(self, path: str | PathLike[str], format: str | None = None) -> None:  # noqa: A002 - as elsewhere
        """Write a report, replacing an older one.

        Args:
            path: Its extension chooses the format: json, md, html, txt. ``"-"`` is standard output.
            format: Overrides the extension; also ``"terminal"``.

        Raises:
            UsageError: Unknown format, or a file that cannot be written.
        """
        from shadowrun import report

        format = format or ("terminal" if str(path) == "-" else report.format_of(path))  # noqa: A001
        if str(path) == "-":
            report.show(report.render(self, format))
        else:
            report.save(report.render(self, format), Path(path))

    def repro(
        self,
        finding: Finding,
        directory: str | PathLike[str],
        *,
        minimise: bool = True,
        time_limit_s: float = 30.0,
        call: int | None = None,
        allow: Iterable[str] | str = (),
    ) -> Repro:
        """Write a script that shows one finding: a few lines of plain torch, its inputs, and the versions.

        Its inputs are those of a call that were kept when it failed (`capture` of `compare`), made smaller and simpler
        while the fault stays. ``python repro.py`` exits 1 while the fault is there, and 0 when it is gone.

        Args:
            finding: One of `findings`.
            directory: Folder to write ``repro.py``, ``inputs.pt`` and ``versions.json`` to.
            minimise: Make the inputs smaller, if the target is on this machine.
            time_limit_s: How long that may take.
            call: Number of the call whose inputs are wanted, one of `captured`; by default the finding's first.
            allow: Platforms and modules that the data file names and that may be started and imported, as it names
                them: a data file may come from another person. Not needed in the process that made the run.

        Raises:
            UsageError: No script can show it, or no inputs were kept.
            PlatformError: A platform takes more than settings of this process, and `allow` does not name it.
            DataFileError: The inputs that were kept cannot be read.
        """
        if call is not None:
            finding = dataclasses.replace(finding, captured=call)
        if finding.captured < 0:
            raise UsageError(_no_inputs(finding, self.sources()), slug="no-repro")
        from shadowrun.repro import ReproOptions
        from shadowrun.repro.memory import bounded_memory

        write_script = self._script_writer(finding)
        self._sync()
        record = next(read_records(self._data, seq=finding.captured))
        own = self._own()
        names = (allow,) if isinstance(allow, str) else tuple(allow)
        allowed = dataclasses.replace(own, names=(*own.names, *names))
        folder = Path(directory)
        with contextlib.nullcontext() if own.modules else bounded_memory():
            return write_script(self._data, finding, record, folder, ReproOptions(minimise, time_limit_s, allowed))

    def explain(self, call: int, *, allow: Iterable[str] | str = ()) -> Explanation:
        """How a call came to its verdict: which rung of the ladder decided, with its figures.

        Where the inputs of the call were kept, it is run and judged again, and the judge's steps are listed.

        Args:
            call: Number of the call; a finding's is `Finding.captured`, or the first of `Finding.kept`.
            allow: As for `repro`.

        Raises:
            UsageError: No such call was recorded.
        """
        from shadowrun.repro.call_replayer import explain

        self._sync()
        record = next(read_records(self._data, seq=call), None)
        if record is None:
            raise UsageError(
                f"Call {call} was not recorded by itself: a report names the first and the worst call of each finding.",
                slug="unknown-call",
            )
        own = self._own()
        names = (allow,) if isinstance(allow, str) else tuple(allow)
        kept = call in self.captured() and not record.call.op.startswith(REGION)
        allowed = dataclasses.replace(own, names=(*own.names, *names))
        return explain(self._data, record, kept=kept, allowed=allowed)

    def _own(self) -> Allowed:
        """What this process allows by itself: nothing for a run that was read from a file."""
        return Allowed()

    def captured(self) -> dict[int, Finding]:
        """Calls whose inputs were kept, the first and the worst of each finding: number of the call to its finding."""
        found: dict[int, Finding] = {}
        for finding in self._all_findings():  # a slow operator's come last: what was wrong in a call says more
            for seq in finding.kept:
                found.setdefault(seq, finding)
        return found

    @staticmethod
    def _script_writer(finding: Finding) -> Callable[..., Repro]:
        """What writes the script of a finding."""
        if finding.op.startswith(REGION):
            from shadowrun.compiled.repro import write_region_script  # imports Dynamo, 2 s

            return write_region_script
        from shadowrun.repro import write_script

        return write_script

    def _repr_html_(self) -> str:
        """The summary table, for notebooks."""
        from shadowrun import report

        return report.summary_html(self)

    def _all_findings(self) -> list[Finding]:
        ratio = self._data.info.config.get("slow_ratio", SLOW_RATIO)
        table = self._read()
        if self._found is None or self._found[0] is not table:
            self._found = (
                table,
                analysis.collect_findings(table, self._data, slow_ratio=float(ratio), ledger=self._ledger()),
            )
        return self._found[1]

    def _ledger(self) -> KnownIssues:
        return KnownIssues(self._known, self._data.info.target)

    def _sync(self) -> None:
        """Called before each read; a comparison that still records flushes here."""

    def _read(self) -> CallGroups:
        self._sync()
        version = self._data.version
        if self._table is None or self._table[0] != version:
            self._table = (version, CallGroups.read(self._data))
        return self._table[1]


def _no_inputs(finding: Finding, sources: tuple[SourceRun, ...]) -> str:
    text = f"No inputs of {finding.op} ({finding.kind}) were kept"
    if sources:
        files = ", ".join(repr(sources[number].file) for number in finding.runs[:3])
        return f"{text} in a combined file: give the data file of one of its runs, {files}."
    if finding.kind == "mismatch" and finding.cause is Cause.RANDOMNESS:
        return f"{text}: it is random, and one call cannot show a wrong distribution."
    why = f"{text}: the run was in memory, had capture=False, or the inputs took more than a quarter of capture=. "
    if finding.op.startswith(REGION):
        said = finding.evidence.partition(NOT_KEPT)[2]
        why = f"{text}: {said}. " if said else why
        return why + (
            "Record it again with more, or run `shadowrun compile --repro DIR` on the program, or call "
            "report.repro(DIR) of shadowrun.compile_check(model, *inputs)."
        )
    return why + "Record it again with more."


def load(path: str | PathLike[str], *, known: str | PathLike[str] | bool | None = None, salvage: bool = False) -> Run:
    """Open a data file, also of a run that still records or was killed.

    Args:
        path: The file.
        known: Ledger of known divergences: a file, False for none; None looks upward from the working directory.
        salvage: Read the readable part of a damaged file; `Run.info.notes` says what is missing.

    Raises:
        DataFileError: The file is missing, unreadable, not a shadowrun data file, corrupt, or of a newer schema.
        UsageError: The ledger cannot be read.
    """
    return Run(DataFile.open(Path(path), salvage=salvage), read_settings(known).known)


def combine(
    paths: Iterable[str | PathLike[str]] | str | PathLike[str],
    out: str | PathLike[str],
    *,
    append: bool = False,
    force: bool = False,
    ignore_errors: bool = False,
) -> Run:
    """Combine the data files of several runs, such as the ranks of a distributed one, into one file.

    Args:
        paths: Data files, folders of them, or glob patterns such as ``"run.*.shadowrun"``.
        out: Data file to write.
        append: Keep what `out` holds already.
        force: Replace `out` if it exists.
        ignore_errors: Leave out files that cannot be read; `ShadowrunWarning` names them.

    Returns:
        The combined run; `Run.sources` lists its parts.

    Raises:
        DataFileError: A file cannot be read or written, or the runs are of different platforms.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else paths
    combined = combine_files(
        choose(given, Path(out)), Path(out), append=append, force=force, ignore_errors=ignore_errors
    )
    for problem in combined.skipped:
        warnings.warn(f"left out: {problem}", ShadowrunWarning, stacklevel=2)
    return load(out)
