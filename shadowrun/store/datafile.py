"""`DataFile`: records streamed to SQLite, readable while they are written and after ``kill -9``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sqlite3
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from shadowrun.errors import DataFileError
from shadowrun.store import connect
from shadowrun.store.call_pages import last_of
from shadowrun.store.captured_inputs import clear, folder_of, temporary_folder
from shadowrun.store.codec import decode_info, encode_info
from shadowrun.store.combine.combined_runs import SourceRun, block_of, read_sources
from shadowrun.store.fold_old_calls import RecordLimit
from shadowrun.store.write_buffer import INTERNED, MAX_FIRST_NUMBER, PendingRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from shadowrun.store.call_pages import CallPages
    from shadowrun.store.groups import Calls
    from shadowrun.store.packed_rows import PackedRows
    from shadowrun.store.write_buffer import Row, Rows
    from shadowrun.types import Phase, RunInfo, TensorDiff, Verdict

__all__ = ["ENDED_EARLY", "FLUSH_ROWS", "DataFile"]

# A killed process loses no more than this.
FLUSH_ROWS = 1000
FLUSH_S = 0.5
# 13 MB of rows (64 bytes each).
MAX_WAITING_ROWS = 200 * FLUSH_ROWS
"""Rows kept while another process locks the file; above this, recording ends."""
CLOSE_TIMEOUT_S = 5.0
LOCKED_RETRY_S = 0.5
MAX_VERDICTS_IN_ARRAY = 4_000_000
"""32 MB of outcomes, one for each verdict."""
_OUTCOMES = "select id, outcome_id from verdict where id > ? order by id limit 20000"
ENDED_EARLY = "recording ended early: "
"""Prefix of the note that gives the reason."""


class DataFile:
    """A data file, open for recording (`create`) or for reading (`open`).

    All rows wait in lists until `flush`, which writes them in one transaction. A failed write (disk full) sets
    `failure`; it never raises in the caller, which is the user's program.

    Attributes:
        path: None for a run in memory.
        rows: Calls that wait. The hot path adds to it directly, and calls `flush` once it holds `FLUSH_ROWS`.
        failure: Why recording ended early; empty without a failure.
        n_records: Calls recorded in this process, including those lost after a failure.
        next_seq: First free call number (not 0 in a file that is appended to).
        next_step: First free step number.
    """

    def __init__(self, path: Path | None, connection: sqlite3.Connection, *, writable: bool) -> None:
        self.path = path
        self._hold(connection)
        self._pending = PendingRows()
        self.rows: Rows = self._pending.rows
        self.failure = ""
        self.n_records = 0
        self.next_seq = 0
        self.next_step = 0
        self._writable = writable
        self._bound: RecordLimit | None = None
        self._packed: PackedRows | None = None
        # Reentrant: `query` holds it while `_settle` takes it again.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._flushed_at = time.monotonic()
        self._retry_at = 0.0
        self._waiting = self._pending.tables
        self._info: RunInfo | None = None
        self._earlier_s = (0.0, 0.0, 0.0)
        self._folder: Path | None = None
        self._n_changes = 0
        self._call_pages: CallPages | None = getattr(connection, "call_pages", None)

    @classmethod
    def create(
        cls,
        path: Path | None,
        info: RunInfo,
        *,
        append: bool = False,
        max_records: int = 50_000,
        fold: bool | None = None,
    ) -> DataFile:
        """Start recording.

        Args:
            path: File to write, None to stay in memory. An existing data file is replaced.
            info: Description of the run; see `update_info`.
            append: Continue an existing data file; numbers continue at `next_seq` and `next_step`.
            max_records: Calls kept one by one when folding; only sums are kept of older matches.
            fold: Whether to fold; None folds in memory only.

        Raises:
            DataFileError: The path cannot be written, is not a shadowrun data file, or, when appending,
                holds a run of other platforms.
        """
        if append and path is not None and path.exists():
            cls.check(path, info, append=True)
            connect.upgrade(path)
            data = cls(path, connect.connect_existing(path, write=True), writable=True)
            data._continue()
        else:
            data = cls(path, connect.connect_new(path), writable=True)
            if path is not None:
                clear(path)  # only now: `connect_new` refuses a path whose folder of tensors is not ours
        if fold or (fold is None and path is None):
            # Only a run in memory is packed: calls that should survive a kill have to be in the file.
            data._bound = RecordLimit(max_records, packed=path is None)
            if path is None:
                from shadowrun.store.packed_rows import PackedRows  # imports numpy, which no reader needs

                data._packed = PackedRows()
        data.update_info(info)
        data.flush()
        return data

    @classmethod
    def check(cls, path: Path, info: RunInfo, *, append: bool = False) -> None:
        """Refuse what `create` would refuse, as far as is known without a write.

        Raises:
            DataFileError: As `create`.
        """
        if append and path.exists():
            if path.is_symlink():  # a folder from elsewhere may have one: what it leads to would get our calls
                raise DataFileError(
                    f"{str(path)!r} is a link, which is not followed: name the file that it leads to.",
                    slug="data-file-append",
                )
            data = cls.open(path)
            try:
                data._check_platforms(info)
            finally:
                data.connection.close()
        else:
            connect.check_writable(path)

    @classmethod
    def open(cls, path: Path, *, salvage: bool = False) -> DataFile:
        """Open for reading, also while another process records or after it was killed.

        Args:
            path: The file.
            salvage: Read the readable part of a damaged file; a note of its `info` says what is missing.

        Raises:
            DataFileError: The file is missing, unreadable, not a shadowrun data file, corrupt, or of a newer schema.
        """
        open_connection = connect.salvage if salvage else connect.connect_existing
        return cls(path, open_connection(path), writable=False)

    def native_parts(self) -> dict[str, Any]:
        """What C adds to, or looks numbers up in; see `PendingRows`."""
        return self._pending.native_parts()

    @property
    def connection(self) -> sqlite3.Connection:
        """For the queries of analyses: sees all flushed rows, packed ones too."""
        self._settle()
        return self._connection

    def _hold(self, connection: sqlite3.Connection) -> None:
        """Use a connection, and close it when this object is collected."""
        self._connection = connection
        # The finalizer keeps the connection alive. In a reference cycle, the garbage collector could finalize the
        # connection first, and Python 3.13 warns about an unclosed one. At exit, `__del__` is enough.
        weakref.finalize(self, _close, connection, os.getpid()).atexit = False

    def __del__(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None:
            _close(connection, self._pid)

    def context_id(
        self,
        op: str,
        inputs: str,
        dtypes: tuple[str, ...],
        shapes: str,
        module: str,
        phase: Phase,
        site: str,
        device: str,
    ) -> int:
        """Row number of a new context; the caller remembers it for all calls that share the context."""
        return self._pending.context(op, inputs, dtypes, shapes, module, phase, site, device)

    def verdict_id(self, verdict: Verdict, missing_kernel: str = "") -> int:
        """Row number of a verdict.

        The number of a verdict without evidence is valid for the whole run. Other verdicts are deleted by folding once
        no call refers to them: use their numbers at once.
        """
        return self._pending.verdict(verdict, missing_kernel)

    def add(self, row: Row) -> None:
        """Record a call; see `pending.Rows` for the columns."""
        self.rows.append(row)
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Flush if `FLUSH_ROWS` calls wait, or the last flush was `FLUSH_S` ago."""
        if len(self.rows) >= FLUSH_ROWS or time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def add_diffs(self, seq: int, diffs: Iterable[TensorDiff]) -> None:
        """Record the differences of the tensors of call `seq`."""
        self._pending.diffs(seq, diffs)

    def add_capture(self, seq: int, file: str, n_bytes: int) -> None:
        """Record that the inputs of call `seq` are in a file of the folder `tensors`."""
        self._waiting["capture"].append((seq, file, n_bytes))

    def drop_capture(self, file: str) -> None:
        """Record that a file of the folder `tensors` was deleted."""
        self._waiting["capture gone"].append((file,))

    def add_moment(self, seq: int, times: tuple[int | None, ...]) -> None:
        """Record when the parts of call `seq` ran: the columns of ``moment``."""
        self._waiting["moment"].append((seq, *times))

    def add_api(self, context: int, name: str) -> None:
        """Record what the program called to make the calls of a context: ``F.linear``, ``nn.GRU``."""
        self._pending.api(context, name)

    def add_region(self, op: str, backend: str, n_operators: int, site: str) -> None:
        """Record a compiled region: its backend, its size, its first line."""
        self._pending.region(op, backend, n_operators, site)

    @property
    def tensors(self) -> Path:
        """Folder of captured inputs; for a run in memory, a temporary folder."""
        if self.path is not None:
            return folder_of(self.path)
        if self._folder is None:
            self._folder = temporary_folder(self)
        return self._folder

    def add_skipped(self, counts: Mapping[tuple[str, str, str], int]) -> None:
        """Add numbers of skipped calls, by (op, device, reason)."""
        self._pending.skipped(counts)

    def add_step(self, step: int, started_s: float, wall_s: float) -> None:
        """Record when a training step began and how long it took."""
        self._waiting["step"].append((step, started_s, wall_s))

    @property
    def info(self) -> RunInfo:
        """Description of the run, from the last `update_info` or from the file."""
        if self._info is not None:
            return self._info
        row = next(self.query("select value from meta where key = 'info'"), None)
        if row is None:
            raise connect.corrupt(self.path, ValueError("it has no run information"))
        try:
            return decode_info(row[0])
        except ValueError as error:
            raise connect.corrupt(self.path, error) from error

    @functools.cached_property
    def sources(self) -> tuple[SourceRun, ...]:
        """The runs that were combined into this file; none in the file of one run."""
        return read_sources(self)

    @property
    def block(self) -> int:
        """Call numbers of each run: ``seq // block`` is the number of the run of a call."""
        return block_of(self.sources)

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever calls were written, by this process or another: caches of readers are valid until then.

        Writes of `update_info` do not count: a live comparison does one before each part of a report.
        """
        # `data_version` counts the writes of other connections only.
        return self._n_changes, next(self.query("pragma data_version"))[0]

    def update_info(self, info: RunInfo) -> None:
        """Replace the description of the run; in a file that is appended to, earlier times are added."""
        with self._lock:
            # Callers give the times of their own run; the file gives the sum over all runs in it.
            wall, own, async_compare = self._earlier_s
            self._info = dataclasses.replace(
                info,
                wall_s=info.wall_s + wall,
                own_s=info.own_s + own,
                async_compare_s=info.async_compare_s + async_compare,
            )
            self._waiting["meta"].append(("info", encode_info(self._info)))

    def flush(self) -> None:
        """Write all rows that wait. Never raises: see `failure`."""
        if not self._writable:
            return
        if self._pid != os.getpid():  # a forked child must not write the file of its parent
            self._drop()
            return
        with self._lock:
            self._flushed_at = time.monotonic()
            if self.failure:
                self._drop()
                return
            if self._flushed_at < self._retry_at:
                return
            self._n_changes += bool(self.rows) or any(rows for name, rows in self._waiting.items() if name != "meta")
            try:
                n_rows = self._pending.write(self._connection, self._packed)
            except Exception as error:  # no failure of the recording may end the user's program
                self._give_up(error)
                return
            self.n_records += n_rows
            if self._bound is not None and self._bound.exceeded_by(n_rows):
                self._fold(self._bound)

    def close(self) -> None:
        """Flush, and mark the run as complete. The records can still be read."""
        if not self._writable or self._pid != os.getpid():
            return
        if self._info is not None:
            self._info = dataclasses.replace(self._info, complete=True)
            self._waiting["meta"].append(("info", encode_info(self._info)))
        # A reader may hold the lock. This is the last write, so it is retried for longer than during the run.
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self.flush()
        while self._waiting["meta"] and not self.failure and time.monotonic() < deadline:
            self._retry_at = 0.0
            self.flush()

    @contextlib.contextmanager
    def without_transaction(self) -> Iterator[None]:
        """Hold the lock, so that no transaction is open: a forked child that inherits one would roll it back."""
        with self._lock:
            yield

    def move(self, path: Path) -> None:
        """Rename the data file while recording; a data file of the new name is replaced.

        Raises:
            DataFileError: The new name cannot be written. Recording continues under the old name.
        """
        if self.path is None:
            return
        connect.check_writable(path)
        with self._lock:
            self.flush()
            self._connection.close()  # an open connection would give its journal the old name
            try:
                connect.move(self.path, path)
                self._move_tensors(path)
                self.path = path
            finally:
                self._hold(connect.connect_existing(self.path, write=True))

    def query(self, sql: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        """Rows of a query, fetched at once so that no lock is held while they are used.

        Raises:
            DataFileError: The file is damaged.
        """
        with self._lock:
            self._settle()
            try:
                return iter(self._connection.execute(sql, values).fetchall())
            except (sqlite3.DatabaseError, UnicodeError) as error:
                raise connect.corrupt(self.path, error) from error

    def call_arrays(self) -> Iterator[Calls] | None:
        """All calls as arrays, some at a time; the columns are those of `shadowrun.store.groups.scan`.

        Returns:
            None where a query has to be made; see `shadowrun.store.call_pages`.
        """
        if self._call_pages is None:
            return None
        import numpy as np  # not for small files

        ((least, greatest),) = self.query("select coalesce(min(id), 0), coalesce(max(id), 0) from verdict")
        if least < 0 or greatest > MAX_VERDICTS_IN_ARRAY:
            return None
        outcomes = np.full(greatest + 1, -1.0)
        while rows := list(self.query(_OUTCOMES, (least - 1,))):
            least = rows[-1][0] + 1
            numbers = np.array(rows)
            outcomes[numbers[:, 0]] = numbers[:, 1]
        return self._call_arrays(self._call_pages, outcomes)

    def _call_arrays(self, pages: CallPages, outcomes: Calls) -> Iterator[Calls]:
        import numpy as np

        last = -1.0
        try:
            while True:
                with self._lock:
                    rows = pages.rows(self._connection, last)
                if not rows:
                    return
                last = last_of(rows)
                calls = np.frombuffer(rows).reshape(-1, 8).copy()
                calls[:, 3] = outcomes[calls[:, 3].astype(np.int64)]
                yield calls
        except (sqlite3.Error, OSError, IndexError) as error:
            raise connect.corrupt(self.path, error) from error

    def _move_tensors(self, path: Path) -> None:
        clear(path)
        with contextlib.suppress(OSError):  # captured inputs are then lost, but recording continues
            self.tensors.rename(folder_of(path))

    def _give_up(self, error: Exception) -> None:
        locked = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
        if locked and len(self.rows) < MAX_WAITING_ROWS:
            # A reader holds the lock: keep the rows, and do not let the program wait for the lock at every flush.
            self._retry_at = time.monotonic() + LOCKED_RETRY_S
            return
        self.failure = f"{error} (after {self.n_records} calls)"
        self._drop()
        self._leave_reason()

    def _leave_reason(self) -> None:
        """Write the reason of a failure into the run's notes."""
        if self._info is None or self.path is None:
            return
        # On a full disk, an update in place takes no space, and a journal in memory takes none either.
        info = dataclasses.replace(self._info, notes=(*self._info.notes, f"{ENDED_EARLY}{self.failure}"))
        with contextlib.suppress(sqlite3.Error, OSError):
            self._connection.execute("pragma journal_mode = memory")
            self._connection.execute("update meta set value = ? where key = 'info'", (encode_info(info),))

    def _drop(self) -> None:
        self.n_records += self._pending.drop()

    def _fold(self, bound: RecordLimit) -> None:
        try:
            bound.fold(self._connection, self._pending.newest_verdict - FLUSH_ROWS, self._packed)
        except sqlite3.Error as error:
            self._give_up(error)
            return
        self._pending.forget_verdicts()

    def _settle(self) -> None:
        """Move packed calls of a run in memory into the database, where queries see them."""
        with self._lock:
            if self._packed is None or self._bound is None or not len(self._packed):
                return
            try:
                self._bound.settle(self._connection, self._packed)
            except sqlite3.Error as error:
                self._give_up(error)

    def _continue(self) -> None:
        """Continue the numbering of a file that is appended to."""
        earlier = self.info
        self._earlier_s = (earlier.wall_s, earlier.own_s, earlier.async_compare_s)
        known = {"op": "select name, id from op", "site": "select text, id from site"}
        self._pending.continue_from(
            {table: dict(self.query(sql)) for table, sql in known.items()},
            {table: self._greatest("id", table) for table in INTERNED},
        )
        self.next_seq = self._greatest("seq", "call") + 1
        # The row of a step is written at its end: a killed run has calls of one step more.
        self.next_step = max(self._greatest("step", "call"), self._greatest("step", "step")) + 1

    def _check_platforms(self, info: RunInfo) -> None:
        earlier = self.info
        if self.sources:
            raise DataFileError(
                f"{str(self.path)!r} is combined from {len(self.sources)} runs, and no run can be recorded into it. "
                "Record into another file, and combine the two.",
                slug="data-file-append",
            )
        if (earlier.target, earlier.ref) != (info.target, info.ref):
            raise DataFileError(
                f"{str(self.path)!r} compares {earlier.target} with {earlier.ref}; a run of {info.target} "
                f"with {info.ref} cannot be appended. Choose another file.",
                slug="data-file-append",
            )

    def _greatest(self, column: str, table: str) -> int:
        row = next(self.query(f"select coalesce(max({column}), -1) from {table}"))  # noqa: S608 - names from above
        if row[0] > MAX_FIRST_NUMBER:  # numbers of further rows would not be exact in float64
            raise connect.corrupt(self.path, ValueError(f"the greatest {column} of {table} is {row[0]}"))
        return int(row[0])


def _close(connection: sqlite3.Connection, pid: int) -> None:
    if pid == os.getpid():  # SQLite connections must not be used, not even closed, in a forked child
        connection.close()
