"""`Run`: the results of a comparison, read from its data file."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun import analysis
from shadowrun.analysis import (
    ApiCoverage,
    Baseline,
    CallGroups,
    Charts,
    Coverage,
    DriftStep,
    Finding,
    FindingChange,
    FindingOrigin,
    Gate,
    KnownIssues,
    LedgerUse,
    Note,
    OperatorSummary,
    Regions,
    SinceBaseline,
    SourceText,
    Step,
)
from shadowrun.errors import UsageError
from shadowrun.platforms.plugin_file import known_issues
from shadowrun.settings import FAIL_ON
from shadowrun.store.connect import SALVAGED
from shadowrun.store.datafile import ENDED_EARLY, DataFile
from shadowrun.store.records import REGION, first_mismatch, read_records
from shadowrun.types import Permissions, Status
from shadowrun.visible_text import MAX_WHOLE, clip

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from os import PathLike

    from shadowrun.report.dataframes import Rows
    from shadowrun.repro import Repro
    from shadowrun.repro.call_replayer import Explanation
    from shadowrun.settings import KnownLine
    from shadowrun.store.combine.combined_runs import SourceRun
    from shadowrun.types import OpRecord, RunInfo

__all__ = ["Run"]

SLOW_RATIO = 10.0


class Run:
    """Results of a run. What `shadowrun.load` returns, and what `compare` returns once it has begun.

    Args:
        data: Data file to read from.
        known: Lines of the ledger of known issues.
        vendor_known: Whether the known issues count that the package of the target's device ships.

    Attributes:
        fail_on: Kinds of findings that fail the run, in its reports too. ``new`` and ``worse`` are those of `baseline`.
        baseline: Findings of an earlier run (`as_baseline`), with which those of this one are compared; None for none.

    Example:
        >>> run = shadowrun.load("run.shadowrun")  # doctest: +SKIP
        >>> for finding in run.findings():  # doctest: +SKIP
        ...     print(finding.kind, finding.op, finding.next_step)
    """

    def __init__(self, data: DataFile, known: Iterable[KnownLine] = (), *, vendor_known: bool = False) -> None:
        self._data = data
        self._vendor_known = vendor_known
        self._known = tuple(known)
        self.fail_on: Collection[str] = FAIL_ON
        self.baseline: Baseline | None = None
        self._calls = analysis.CallReader(data)
        self._found: tuple[CallGroups, list[Finding]] | None = None

    @property
    def info(self) -> RunInfo:
        """Description of the run."""
        self._sync()
        info = self._data.info
        # The file itself cannot say so: writing to it is what failed.
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
        since: int = 0,
    ) -> Iterator[OpRecord]:
        """Recorded calls in call order.

        Args:
            op: Glob pattern, ``"aten::*mm*"``.
            status: One status or several.
            step: Training step.
            module: Glob pattern, ``"*.attn.*"``.
            seq: Number of a single call.
            since: Number of the first call.
        """
        self._sync()  # the newest calls may still be in memory
        return read_records(self._data, op=op, status=status, step=step, module=module, seq=seq, since=since)

    def last_call(self) -> int:
        """Number of the last recorded call; -1 if there is none."""
        self._sync()
        return int(next(self._data.query("select coalesce(max(seq), -1) from call"))[0])

    def excuse(self, kind: str, op: str, modules: Iterable[str]) -> KnownLine | None:
        """The line of the ledger that excuses calls of an operator; None if none does."""
        return self._ledger().excuse(kind, op, modules)

    def summary(self) -> Rows[OperatorSummary]:
        """One row for each operator, those that need work first."""
        from shadowrun.report.dataframes import Rows
        from shadowrun.report.run_sections import operator_table

        return Rows(analysis.summarise(self._read()), operator_table)

    def regions(self) -> Regions:
        """Graphs that `torch.compile` compiled, each compared with eager as a whole (``compiled=True``)."""
        return analysis.summarise_regions(self._read(), self._data)

    def findings(self) -> Rows[Finding]:
        """Findings, the most actionable first, without those that the ledger excuses: these are in `known`.

        Printed, each is one line; ``print(finding)`` has the evidence and the next step.
        """
        from shadowrun.report.dataframes import Rows
        from shadowrun.report.run_sections import findings_table

        return Rows((finding for finding in self._all_findings() if finding.known is None), findings_table)

    def raise_for_findings(self, fail_on: Collection[str] | None = None) -> None:
        """Raise an exception if the run fails its gate; for tests and scripts.

        Args:
            fail_on: Kinds of findings that fail it; by default those of the attribute.

        Raises:
            FindingsError: The run fails; the message has the gate's line, then operator, line and cause of the first
                findings.
        """
        gate = self.gate(fail_on)
        if not gate.passed:
            raise gate.error(self.findings())

    def to_dataframe(self, **selection: Any) -> Any:
        """All recorded calls as a `pandas.DataFrame`, one row for each.

        Args:
            **selection: As for `records`.

        Raises:
            UsageError: pandas is not installed.
        """
        from shadowrun.report.dataframes import record_row, to_dataframe

        return to_dataframe(map(record_row, self.records(**selection)))

    def write_records(self, path: str | PathLike[str], **selection: Any) -> int:
        """Write a row for each recorded call: the call, its verdict, its worst difference, and times.

        Args:
            path: Ends in ``.csv``, or ``.parquet`` (needs pyarrow, the extra ``parquet``).
            **selection: As for `records`.

        Returns:
            The number of rows.

        Raises:
            UsageError: Another ending, pyarrow is not installed, or the file cannot be written.
        """
        from shadowrun.report.dataframes import write_records

        return write_records(self.records(**selection), Path(path))

    def write_trace(self, path: str | PathLike[str]) -> tuple[int, int]:
        """Write the run as a trace for ui.perfetto.dev: lanes for program, target and reference, and counters.

        Durations are measured; calls lie one after the other, since their start times are not recorded.

        Args:
            path: Ends in ``.json`` or ``.json.gz``.

        Returns:
            The number of calls in it, and of those of the run.

        Raises:
            UsageError: Another ending, or the file cannot be written.
        """
        from shadowrun.report.chrome_trace import write_trace

        self._sync()
        return write_trace(self._data, Path(path))

    def origins(self) -> Mapping[int, tuple[FindingOrigin, ...]]:
        """Where the calls of each finding were made, by its number; a finding itself names the first few places."""
        return analysis.find_origins(self._read(), self._all_findings(), self._ledger())

    def source(self) -> SourceText:
        """Lines of the program around the findings, read now.

        Of a run that was loaded from a file, which another person may have written, only Python files below the working
        directory are read.
        """
        everywhere = self._allowed_by_process().modules
        return analysis.read_source(self._read(), self.origins(), self._data.info.started, everywhere=everywhere)

    def charts(self) -> Charts:
        """Series for pictures: errors along the graph, by module and step, and times; this reads all calls."""
        self.read_calls(charts=True)
        assert self._calls.charts is not None
        return self._calls.charts

    def read_calls(self, *, charts: bool) -> None:
        """Read the calls now, if they are not read already; reports that have pictures ask for them before all else.

        Args:
            charts: Read the series for pictures in the same pass.
        """
        self._sync()
        self._calls.read(self.first_divergence if charts else None)

    def notes(self) -> list[Note]:
        """Calls that could not be verified, and matches with a cause worth knowing."""
        return analysis.collect_notes(self._read(), self._data)

    def internal_failures(self) -> list[Note]:
        """Calls that shadowrun itself failed to compare."""
        return analysis.collect_internal_failures(self._read(), self._data)

    def known(self) -> LedgerUse:
        """Findings that the ledger of known issues excuses, and the state of its lines."""
        found = self._all_findings()
        uses = self._ledger().uses(self._read(), found)
        return LedgerUse(tuple(finding for finding in found if finding.known is not None), uses)

    def first_divergence(self) -> OpRecord | None:
        """The first call that mismatched, of all ranks in a combined file; None if none did.

        Calls that the ledger excuses are not considered.
        """
        self._sync()
        excused: set[int] = set()
        if (ledger := self._ledger()).lines:
            contexts = analysis.read_contexts(self._data)
            excused = {n for n, c in contexts.items() if ledger.excuse("mismatch", c.op, (c.module,))}
        return first_mismatch(self._data, excused)

    def coverage(self) -> Coverage:
        """Share of the operators and calls of the program that the target supports."""
        from shadowrun.report.coverage_report import notebook_coverage

        return notebook_coverage(analysis.operator_coverage(self._read(), self._data.info.raised))

    def api_coverage(self) -> ApiCoverage:
        """Functions and modules of torch that the program called, and whether the target supports what they call.

        Raises:
            UsageError: The run was made without ``api=True``.
        """
        if not self.info.config.get("api"):
            raise UsageError(
                "This run has no functions of torch, only operators: record it with api=True (shadowrun run --api).",
                slug="no-api",
            )
        from shadowrun.report.coverage_report import notebook_api_coverage

        return notebook_api_coverage(analysis.api_coverage(self._read(), self._data))

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
        # The groups, which a report has, show whether there is any: else a pass over all calls would find none.
        drifts = any(row.group.drift_rel != -1 for row in self._read().rows)
        return analysis.trace_drift(self._data) if drifts else []

    def gate(self, fail_on: Collection[str] | None = None) -> Gate:
        """Whether the run passes, and the line that says so.

        Args:
            fail_on: Kinds of findings that fail it; by default those of the attribute.
        """
        found, kinds = self._all_findings(), self.fail_on if fail_on is None else fail_on
        info = self._data.info
        # A note is all that marks it: a salvaged copy has the schema of any data file.
        salvaged = any(note.startswith(SALVAGED) for note in info.notes)
        return analysis.evaluate_gate(
            *(found, self.counts(), kinds, self.regions().line, info.raised, info.unselected),
            salvaged=salvaged,
            since=self.since_baseline(),
        )

    def as_baseline(self, name: str = "") -> Baseline:
        """The findings as they are now, for `baseline` of a later run; the data file is not needed any more.

        Args:
            name: What reports call it; the name of the data file by default.
        """
        path = self._data.path
        named = name or (path.name if path is not None else "the baseline")
        return Baseline(named, self._platforms, self._signatures())

    def since_baseline(self) -> SinceBaseline | None:
        """What became of the findings of `baseline`; None without one."""
        before = self.baseline
        if before is None:
            return None
        other = before.platforms if before.platforms != self._platforms else ""
        return SinceBaseline(before.name, other, analysis.changes(before.findings, self._signatures()))

    def changes_since(self, before: Run) -> tuple[FindingChange, ...]:
        """Findings that are new, gone, worse or the same since another run, by operator, module, phase and cause."""
        return analysis.changes(*(run._signatures() for run in (before, self)))

    def to_rows(self) -> list[dict[str, Any]]:
        """The summary as dictionaries, for a data frame."""
        return [dataclasses.asdict(row) for row in self.summary()]

    def write(self, path: str | PathLike[str], format: str | None = None) -> None:  # noqa: A002 - as elsewhere
        """Write a report, replacing an older one.

        Args:
            path: Its extension names the format: txt, md, json, csv, html. ``"-"`` is standard output.
            format: Overrides the extension; also ``"terminal"``.

        Raises:
            UsageError: Unknown format, or a file that cannot be written.
        """
        from shadowrun import report

        format = format or ("terminal" if str(path) == "-" else report.format_of(path))  # noqa: A001
        if str(path) == "-":
            report.write_to_stdout(report.render(self, format))
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
        allow: Iterable[str] | str | Permissions = (),
    ) -> Repro:
        """Write a script that shows one finding: a few lines of plain torch, its inputs, and the versions.

        Its inputs are the captured ones of a failing call (`capture` of `compare`), made smaller and simpler while the
        fault remains. ``python repro.py`` exits with 1 if the fault shows, and with 0 if it does not.

        Args:
            finding: One of `findings`.
            directory: Folder to write ``repro.py``, ``inputs.pt`` and ``versions.json`` to.
            minimise: Make the inputs smaller, if the target is on this machine.
            time_limit_s: Seconds that this may take.
            call: Number of the call whose inputs are used, one of `captured`; by default the finding's first.
            allow: Platforms and modules that the data file names and that may be started and imported, as it names
                them, and functions that are backends, ``module:function``: a data file may come from another person.
                Not needed in the process that made the run.

        Raises:
            UsageError: No script can show it, or no inputs were captured.
            PlatformError: A platform needs more than settings of this process, and `allow` does not name it.
            DataFileError: The captured inputs cannot be read.
        """
        from shadowrun.limits import bounded_memory
        from shadowrun.repro import ReproOptions, why_no_inputs

        if call is not None:
            finding = dataclasses.replace(finding, captured=call)
        if finding.captured < 0:
            raise UsageError(why_no_inputs(finding, self.sources()), slug="no-repro")
        write_script = self._script_writer(finding)
        self._sync()
        record = next(read_records(self._data, seq=finding.captured))
        allowed, folder = self._allowed(allow), Path(directory)
        # The calls of this process's own run fitted in its memory; a file may name shapes of any size.
        with contextlib.nullcontext() if allowed.modules else bounded_memory():
            return write_script(self._data, finding, record, folder, ReproOptions(minimise, time_limit_s, allowed))

    def explain(self, call: int, *, allow: Iterable[str] | str | Permissions = ()) -> Explanation:
        """The rung of the ladder that decided on a call, with its figures.

        If the inputs of the call were captured, it runs and is judged again, and the judge's steps are listed.

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
                f"Call {call} has no record of its own: give the first or the worst call of a finding.",
                slug="unknown-call",
            )
        # The captured inputs of a region belong to a graph, which no operator can be called with.
        kept = call in self.captured() and not record.call.op.startswith(REGION)
        return explain(self._data, record, kept=kept, allowed=self._allowed(allow))

    def _allowed(self, names: Iterable[str] | str | Permissions) -> Permissions:
        """Platforms and modules that may be started and imported: those of this process, and the named ones."""
        own = self._allowed_by_process()
        if not isinstance(names, Permissions):
            words = (names,) if isinstance(names, str) else tuple(names)
            names = Permissions(words, words)  # a name may be of either
        return dataclasses.replace(
            own, names=(*own.names, *names.names), imports=names.imports, is_command=names.is_command
        )

    def _allowed_by_process(self) -> Permissions:
        """Nothing for a run that was read from a file: another person may have written it."""
        return Permissions()

    def captured(self) -> dict[int, Finding]:
        """Calls whose inputs were captured, the first and the worst of each finding: number to finding."""
        found: dict[int, Finding] = {}
        # Findings on slowness come last, and so lose a call that also has another one: what is wrong says more.
        for finding in self._all_findings():
            for seq in finding.kept:
                found.setdefault(seq, finding)
        return found

    @staticmethod
    def _script_writer(finding: Finding) -> Callable[..., Repro]:
        """The function that writes the script of a finding."""
        if finding.op.startswith(REGION):
            from shadowrun.compiled.repro import write_region_script  # imports Dynamo, 2 s

            return write_region_script
        from shadowrun.repro import write_script

        return write_script

    def __repr__(self) -> str:
        return f"<shadowrun.Run {clip(self._platforms)}: {clip(self.gate().line, MAX_WHOLE)}>"

    @property
    def _platforms(self) -> str:
        return f"{self._data.info.target} against {self._data.info.ref}"

    def _repr_html_(self) -> str:
        """The summary table, for notebooks."""
        from shadowrun import report

        return report.summary_html(self)

    def _all_findings(self) -> list[Finding]:
        # The ratio of the run, not of this process: all reports on a file have the same findings.
        ratio = self._data.info.config.get("slow_ratio", SLOW_RATIO)
        table = self._read()
        if self._found is None or self._found[0] is not table:
            self._found = (
                table,
                analysis.collect_findings(table, self._data, slow_ratio=float(ratio), ledger=self._ledger()),
            )
        return self._found[1]

    def _signatures(self) -> dict[analysis.Signature, analysis.FindingInRun]:
        slow = (finding for finding in self._all_findings() if finding.kind == "slow")
        return analysis.signatures(self._read(), slow, self._ledger())

    def _ledger(self) -> KnownIssues:
        target = self._data.info.target
        # The project's own lines first: their reasons are shown.
        return KnownIssues((*self._known, *(known_issues(target) if self._vendor_known else ())), target)

    def _sync(self) -> None:
        """Called before each read; a comparison that still records flushes here."""

    def _read(self) -> CallGroups:
        self._sync()
        return self._calls.read()
