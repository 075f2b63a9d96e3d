"""The coverage file: an SQLite file with all results of a sweep.

It is consistent after a kill, and the next start of the same sweep resumes it. Reading validates the whole file first,
since a coverage file may come from an untrusted source.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import DataFileError
from shadowrun.store.codec import decode_facts, storable
from shadowrun.store.file_kind import FileKind
from shadowrun.store.lock import FileLock
from shadowrun.store.validation import COUNT, SIGNED, TEXT, one_of
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.types import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shadowrun.store.validation import Columns, GuardedConnection

__all__ = ["ALL", "APPLICATION_ID", "SCHEMA", "SCHEMA_VERSION", "CoverageFile", "SweepInfo", "is_coverage_file"]


SCHEMA_VERSION = 1
"""In ``PRAGMA user_version``; raised when an older shadowrun could misread a new file."""

APPLICATION_ID = 0x53484443
"""``SHDC``, in ``PRAGMA application_id``."""

SCHEMA = """\
-- Schema of a coverage file of shadowrun (SQLite).
--
-- History
--   1  first version

create table meta (             -- one row: info (a SweepInfo as JSON)
    key text primary key,
    value text not null
);

create table operator (         -- operators swept, as in torch's database, or aten::add.Tensor of a recorded call
    id integer primary key,
    name text not null unique
);

create table task (             -- parts that were run to their end
    operator_id integer not null references operator (id),
    dtype text not null,        -- float32; any for invalid inputs
    part text not null,         -- forward, backward, inplace, out, strided, ...
    samples integer not null,   -- limit of samples that it was run under; -1 for all
    n_duplicates integer not null,  -- cases left out, since they repeat another
    primary key (operator_id, dtype, part)
);

create table result (           -- one row for each case that was run
    id integer primary key,
    operator_id integer not null references operator (id),
    dtype text not null,
    part text not null,
    sample integer not null,    -- number of the sample, from 0; -1: a part that was abandoned
    kind text not null,         -- pass, mismatch, unsupported operator, ...: that of its worst finding
    inputs text not null,       -- f32[2, 3], dim=1; empty for a pass
    unique (operator_id, dtype, part, sample)
);

create table finding (          -- what cases showed; shared by many
    id integer primary key,
    kind text not null,
    op text not null,           -- aten::_softmax: operator inside that is to blame; empty where unknown
    kernel text not null,       -- missing kernel; empty where none was
    cause text not null,        -- a Cause; empty where there is none
    explanation text not null,
    message text not null       -- of the first case
);

create table result_finding (   -- the worst of a case has position 0
    result_id integer not null references result (id),
    position integer not null,
    finding_id integer not null references finding (id),
    primary key (result_id, position)
) without rowid;
"""


ALL = -1
"""No limit of samples."""
_COMMIT_S = 0.5  # a commit per case would cost more than the case; a kill loses at most this much work
# No joins with texts: of a long one, each row would read all of it anew.
_RESULTS = "select id, operator_id, dtype, part, sample, inputs from result"
_FINDINGS = "select result_id, finding_id from result_finding order by result_id, position"


COLUMNS: Columns = {
    "meta": {"key": one_of("info"), "value": TEXT},
    "operator": {"name": TEXT},
    "task": {"dtype": TEXT, "part": one_of(*Part), "samples": SIGNED, "n_duplicates": COUNT},
    "result": {"dtype": TEXT, "part": one_of(*Part), "sample": SIGNED, "kind": one_of(*Kind), "inputs": TEXT},
    "finding": {
        **dict.fromkeys(("op", "kernel", "explanation", "message"), TEXT),
        "kind": one_of(*Kind),
        "cause": one_of("", *Cause),
    },
    "result_finding": {"position": COUNT},
}
"""Valid values of each column."""


KIND: Final = FileKind(
    noun="coverage file",
    slug="coverage-file",
    maker="`shadowrun sweep --file FILE` writes one",
    again="Sweep again into another file.",
    application_id=APPLICATION_ID,
    version=SCHEMA_VERSION,
    schema=SCHEMA,
    columns=COLUMNS,
)


@dataclass(frozen=True, slots=True)
class SweepInfo:
    """Platforms, options and versions of a sweep.

    Attributes:
        target, ref: Platform specs; a simulated target is followed by its flaws, ``sim (matmul-in-bf16)``.
        seed: Seed of the sample inputs.
        source: ``opinfo``, or the name of the data file whose calls were swept.
        target_fingerprint, ref_fingerprint, versions: As in a data file.
        argv: Command line.
        started: ISO 8601 time of the first start, UTC.
        wall_s, cpu_s: Seconds, and seconds of processor time in all processes, summed over the starts.
        complete: Whether all cases of the last start were run.
    """

    target: str
    ref: str
    seed: int = 0
    source: str = "opinfo"
    target_fingerprint: dict[str, Any] = field(default_factory=dict)
    ref_fingerprint: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    started: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    complete: bool = False


class CoverageFile:
    """An open coverage file; see `begin` and `open`."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path
        self._operators = {name: number for number, name in self._rows("select id, name from operator")}
        # Many cases share a finding: a look-up here saves a query for each.
        self._findings = {
            tuple(key): number
            for number, *key in self._rows("select id, kind, op, kernel, cause, explanation from finding")
        }
        self._committed_at = time.monotonic()
        self._claim: FileLock | None = None

    @classmethod
    def begin(cls, path: Path, info: SweepInfo) -> CoverageFile:
        """Open a file to write to: a new one, or an unfinished one of the same sweep, which is resumed.

        Raises:
            DataFileError: It cannot be written, is no coverage file, holds another sweep, or another process writes it.
        """
        # Two sweeps that write one file would mix cases of different options.
        claim = FileLock(path)
        if claim.contested:
            claim.release()
            raise KIND.unusable(path, "is being written by another sweep. Wait for it, or choose another --file")
        try:
            file = cls._begun(path, info)
        except BaseException:
            claim.release()
            raise
        file._claim = claim
        return file

    @classmethod
    def _begun(cls, path: Path, info: SweepInfo) -> CoverageFile:
        connection, new = KIND.connect_to_write(path)
        file = cls(connection, path)
        if new:
            file._write_info(info)
        else:
            file._check_same(info)
        # One transaction holds many cases; `_commit_if_due` ends it.
        connection.execute("begin")
        return file

    @classmethod
    def open(cls, path: Path) -> CoverageFile:
        """Open a file to read, also while it is written, after validating all of it.

        Raises:
            DataFileError: Missing, no coverage file, damaged, or of a newer shadowrun.
        """
        return cls(_checked(path), path)

    # -- writing -----------------------------------------------------------------------------------

    def add(self, case: Case, outcome: CaseOutcome) -> None:
        """Record the outcome of a case; a case that is in the file already stays.

        Raises:
            DataFileError: Writing fails, for example on a full disk.
        """
        with self._written():
            self._add(case, outcome)

    def _add(self, case: Case, outcome: CaseOutcome) -> None:
        cursor = self._connection.execute(
            "insert or ignore into result (operator_id, dtype, part, sample, kind, inputs) values (?, ?, ?, ?, ?, ?)",
            (
                *(self._operator(case.operator), storable(case.dtype), case.part, case.sample),
                *(outcome.kind, storable(outcome.inputs)),
            ),
        )
        if not cursor.rowcount:
            return
        self._connection.executemany(
            "insert into result_finding values (?, ?, ?)",
            [(cursor.lastrowid, k, self._finding(f)) for k, f in enumerate(outcome.findings)],
        )
        self._commit_if_due()

    def finish(self, operator: str, dtype: str, part: Part, samples: int, n_duplicates: int) -> None:
        """Record that a part was run to its end, under a limit of samples."""
        with self._written():
            self._connection.execute(
                # A part that is run again under a higher limit of samples has a row already.
                "insert or replace into task values (?, ?, ?, ?, ?)",
                (self._operator(operator), dtype, part, samples, n_duplicates),
            )
            self._commit_if_due()

    def forget_given_up(self) -> None:
        """Delete the results of abandoned parts, so that this start runs them again."""
        # An abandoned part has a case of sample -1, and no row in `task`.
        abandoned = (
            "select id from result where sample < 0 and not exists (select 1 from task where task.operator_id = "
            "result.operator_id and task.dtype = result.dtype and task.part = result.part)"
        )
        with self._written():
            self._connection.execute(f"delete from result_finding where result_id in ({abandoned})")  # noqa: S608 - a constant
            self._connection.execute(f"delete from result where id in ({abandoned})")  # noqa: S608

    def add_time(self, wall_s: float, cpu_s: float, *, complete: bool) -> None:
        """Add the duration of this start to the total, and record whether all cases were run."""
        info = self.info
        new = dataclasses.replace(info, wall_s=info.wall_s + wall_s, cpu_s=info.cpu_s + cpu_s, complete=complete)
        with self._written():
            self._write_info(new)
            self._commit()

    def close(self) -> None:
        """Commit and close."""
        with contextlib.suppress(sqlite3.Error):
            if self._connection.in_transaction:
                self._connection.execute("commit")
        self._connection.close()
        if self._claim is not None:
            self._claim.release()

    # -- reading -----------------------------------------------------------------------------------

    @property
    def info(self) -> SweepInfo:
        """Platforms, options and versions of the sweep."""
        rows = list(self._rows("select value from meta where key = 'info'"))
        try:
            return decode_facts(SweepInfo, rows[0][0] if rows else "")
        except ValueError as error:
            raise KIND.damaged(self.path, error) from error

    def results(self) -> Iterator[tuple[Case, CaseOutcome]]:
        """All cases that were run, by operator, dtype, part and sample."""
        sql = "select id, kind, op, kernel, cause, explanation, message from finding"
        known = {number: CaseFinding(Kind(kind), *rest) for number, kind, *rest in self._rows(sql)}
        findings: dict[int, list[CaseFinding]] = {}
        for number, finding in self._rows(_FINDINGS):
            findings.setdefault(number, []).append(known[finding])
        names = dict(self._rows("select id, name from operator"))
        # By number: to sort a million rows by names of a megabyte each, as a hostile file may have, would compare
        # megabytes.
        rank = {operator: place for place, operator in enumerate(sorted(names, key=names.__getitem__))}
        rows = sorted(self._rows(_RESULTS), key=lambda row: (rank[row[1]], *row[2:5]))
        for number, operator, dtype, part, sample, inputs in rows:
            case = Case(names[operator], dtype, Part(part), sample)
            yield case, CaseOutcome(tuple(findings.get(number, ())), inputs)

    def finished(self) -> dict[tuple[str, str, Part], int]:
        """Parts that were run to their end, with the limit of samples that they were run under."""
        sql = "select name, dtype, part, samples from task join operator on operator.id = operator_id"
        return {(name, dtype, Part(part)): samples for name, dtype, part, samples in self._rows(sql)}

    def done(self) -> dict[tuple[str, str], set[tuple[Part, int]]]:
        """Part and sample of the cases in the file, by operator and dtype."""
        cases: dict[tuple[str, str], set[tuple[Part, int]]] = {}
        names = dict(self._rows("select id, name from operator"))
        for _, operator, dtype, part, sample, _inputs in self._rows(_RESULTS):
            cases.setdefault((names[operator], dtype), set()).add((Part(part), sample))
        return cases

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise KIND.unusable(self.path, f"cannot be written any more: {error}") from error

    # -- internal ------------------------------------------------------------------------------------

    def _check_same(self, info: SweepInfo) -> None:
        earlier = self.info
        for name in ("target", "ref", "seed", "source"):
            was, now = getattr(earlier, name), getattr(info, name)
            if was != now:
                raise DataFileError(
                    f"{str(self.path)!r} is of a sweep with {name} {was!r}, and cannot be resumed for "
                    f"{name} {now!r}. Choose another --file, or remove it.",
                    slug="coverage-file-other",
                )
        # Another torch has another database: the same sample number would mean another case.
        was, now = earlier.versions.get("torch"), info.versions.get("torch")
        if was != now:
            raise DataFileError(
                f"{str(self.path)!r} is of torch {was}, and this is torch {now}, with other cases. "
                "Choose another --file, or remove it.",
                slug="coverage-file-other",
            )

    def _write_info(self, info: SweepInfo) -> None:
        text = json.dumps(dataclasses.asdict(info), sort_keys=True, default=str)
        self._connection.execute("insert or replace into meta values ('info', ?)", (text,))

    def _operator(self, name: str) -> int:
        # A name may contain half of a surrogate pair, which SQLite cannot store.
        name = storable(name)
        number = self._operators.get(name)
        if number is None:
            cursor = self._connection.execute("insert into operator (name) values (?)", (name,))
            number = self._operators[name] = int(cursor.lastrowid or 0)
        return number

    def _finding(self, finding: CaseFinding) -> int:
        *rest, message = (storable(value) for value in dataclasses.astuple(finding))
        # The message is no part of the key: it often contains shapes or addresses, and would make each finding unique.
        key = tuple(rest)
        number = self._findings.get(key)
        if number is None:
            sql = "insert into finding (kind, op, kernel, cause, explanation, message) values (?, ?, ?, ?, ?, ?)"
            number = self._findings[key] = int(self._connection.execute(sql, (*key, message)).lastrowid or 0)
        return number

    def _commit_if_due(self) -> None:
        if time.monotonic() - self._committed_at > _COMMIT_S:
            self._commit()

    def _commit(self) -> None:
        self._connection.execute("commit")
        self._connection.execute("begin")
        self._committed_at = time.monotonic()

    def _rows(self, sql: str) -> Iterator[tuple[Any, ...]]:
        try:
            # All rows at once: damage raises here, not in the caller's loop, and an open cursor would lock out the
            # writer.
            return iter(self._connection.execute(sql).fetchall())
        except (sqlite3.DatabaseError, UnicodeError) as error:
            raise KIND.damaged(self.path, error) from error


def is_coverage_file(path: Path) -> bool:
    """Whether a file is a coverage file, by its first bytes."""
    return KIND.is_one(path)


def _checked(path: Path) -> GuardedConnection:
    """A read-only connection to a validated coverage file."""
    connection = KIND.connect_to_read(path)
    try:
        # Decoded here too: a file that fails later would fail in the middle of a report.
        rows = connection.execute("select value from meta").fetchall()
        decode_facts(SweepInfo, rows[0][0] if rows else "")
    except (sqlite3.Error, ValueError) as error:
        connection.close()
        raise KIND.damaged(path, error) from error
    return connection
