"""`Run`: the results of a comparison, read from its data file, now or later and elsewhere."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun import analysis
from shadowrun.analysis import Coverage, DriftStep, Finding, Gate, Note, OperatorSummary, Step, Table
from shadowrun.store.datafile import DataFile
from shadowrun.store.records import read_records
from shadowrun.types import OpRecord, RunInfo, Status

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from os import PathLike

__all__ = ["Run", "load"]

SLOW_RATIO = 10.0


class Run:
    """Results of a run. What `shadowrun.load` returns, and what `compare` returns once it has begun.

    Args:
        data: Data file to read from.

    Attributes:
        fail_on: Kinds of findings that fail the run, in its reports too.

    Example:
        >>> run = shadowrun.load("run.shadowrun")  # doctest: +SKIP
        >>> for finding in run.findings():  # doctest: +SKIP
        ...     print(finding.kind, finding.op, finding.next_step)
    """

    def __init__(self, data: DataFile) -> None:
        self._data = data
        self.fail_on: Collection[str] = analysis.FAIL_ON
        self._table: tuple[tuple[int, int], Table] | None = None

    @property
    def info(self) -> RunInfo:
        """What the run was."""
        self._sync()
        info = self._data.info
        if self._data.failure:
            text = f"recording ended early: {self._data.failure}"
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
            seq: Number of the one call wanted.
        """
        self._sync()
        return read_records(self._data, op=op, status=status, step=step, module=module, seq=seq)

    def summary(self) -> list[OperatorSummary]:
        """One row for each operator, those that need work first."""
        return analysis.summarise(self._read())

    def findings(self) -> list[Finding]:
        """What needs work, the most actionable first."""
        ratio = self._data.info.config.get("slow_ratio", SLOW_RATIO)
        return analysis.find(self._read(), self._data, slow_ratio=float(ratio))

    def notes(self) -> list[Note]:
        """What was not verified, and matches with a cause worth knowing."""
        return analysis.note(self._read(), self._data)

    def own_failures(self) -> list[Note]:
        """Calls that shadowrun itself failed to compare."""
        return analysis.own_failures(self._read(), self._data)

    def first_divergence(self) -> OpRecord | None:
        """The first call that mismatched; None where all matched."""
        return next(self.records(status=Status.MISMATCH), None)

    def coverage(self) -> Coverage:
        """How much of what the program used the target has."""
        return analysis.cover(self._read())

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
        return analysis.judge(self.findings(), self.counts(), self.fail_on if fail_on is None else fail_on)

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
            sys.stdout.write(report.render(self, format))
        else:
            report.save(report.render(self, format), Path(path))

    def _repr_html_(self) -> str:
        """The summary table, for notebooks."""
        from shadowrun import report

        return report.summary_html(self)

    def _sync(self) -> None:
        """Called before anything is read; a comparison that is still recording flushes here."""

    def _read(self) -> Table:
        self._sync()
        # Reading again is worth it only if this connection or another process has written since.
        version = (self._data.connection.total_changes, next(self._data.query("pragma data_version"))[0])
        if self._table is None or self._table[0] != version:
            self._table = (version, Table.read(self._data))
        return self._table[1]


def load(path: str | PathLike[str]) -> Run:
    """Open a data file, also of a run that still records or was killed.

    Raises:
        DataFileError: Missing, unreadable, not a shadowrun data file, corrupt, or of a newer schema.
    """
    return Run(DataFile.open(Path(path)))
