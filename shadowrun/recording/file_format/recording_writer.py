"""Writes the file of a recording, ``.shadowrec``: an SQLite database with its calls as packed columns, in blocks.

A block is written in one transaction: a process that is killed loses the calls since its last block.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.errors import DataFileError
from shadowrun.limits import read_head
from shadowrun.native import core
from shadowrun.recording.model import width_of
from shadowrun.store import connect
from shadowrun.store.codec import jsonable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from shadowrun.recording.model import Context, Form, Process


__all__ = [
    "APPLICATION_ID",
    "MAX_CALLS_PER_BLOCK",
    "SCHEMA",
    "SCHEMA_VERSION",
    "SUFFIX",
    "Block",
    "Writer",
    "check_range",
    "is_recording",
]


SUFFIX: Final = ".shadowrec"
APPLICATION_ID: Final = 0x73687263  # "shrc"
SCHEMA_VERSION: Final = 3
SCHEMA: Final = """
create table process (id integer primary key, info text not null);
create table context (
    id integer primary key, op text not null, module text not null, phase text not null, site text not null,
    device text not null, arguments text not null
);
create table form (
    id integer primary key, dtype text not null, shape text not null, stride text not null, layout text not null,
    placement text not null
);
create table kernel (id integer primary key, name text not null);
create table block (
    id integer primary key, process integer not null references process (id), n_calls integer not null,
    n_results integer not null, calls blob not null, results blob not null, inputs blob not null, rungs blob not null,
    samples blob not null, sample_tops blob not null, row_rungs blob not null
);
create table content (digest text primary key, dtype text not null, shape text not null, bytes blob not null);
create table captured (call integer primary key, arguments text not null);
create table output (result integer primary key, digest text not null);
"""
MAX_CALLS_PER_BLOCK: Final = 1 << 16
_MAX_PENDING_BYTES: Final = 1 << 22
_WHAT: Final = "recording"
_COMPRESSION: Final = 1  # level 6 takes five times as long for a tenth less


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Consecutive calls of one process. `inputs` and `base` count rows from the first row of the process.

    Attributes:
        calls, results: Of `CALL` and `RESULT`.
        inputs: Row numbers, int64.
        rungs, samples, row_rungs: uint64, see `Recording`.
    """

    calls: npt.NDArray[Any]
    results: npt.NDArray[Any]
    inputs: npt.NDArray[np.int64]
    rungs: npt.NDArray[np.uint64]
    samples: npt.NDArray[np.uint64]
    row_rungs: npt.NDArray[np.uint64]


class Writer:
    """Writes one process's recording. Not safe to use from several threads at once.

    Args:
        path: A recording that exists is replaced.
        process: As known at the start; `finish` replaces it.

    Raises:
        DataFileError: The file cannot be written, or is not a recording.
    """

    def __init__(self, path: Path, process: Process) -> None:
        self.path = path
        self._pending: list[tuple[str, tuple[Any, ...]]] = []
        self._n_pending_bytes = 0
        self._widths: list[int] = []
        _clear(path)
        try:
            # It may hold inputs and results of the program: for this user only.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as error:
            raise connect.unwritable(path, error, _WHAT) from error
        self._connect("rw")
        try:
            numbers = f"pragma application_id = {APPLICATION_ID}; pragma user_version = {SCHEMA_VERSION};"
            self._connection.executescript("begin;" + numbers + SCHEMA + "commit;")
            self._write(("insert into process values (0, ?)", (_encode(process),)))
        except sqlite3.Error as error:
            raise connect.unwritable(path, error, _WHAT) from error

    def _connect(self, mode: str) -> None:
        address = f"{self.path.absolute().as_uri()}?mode={mode}"
        try:
            # Transactions begin where the code says so, and not where Python's module sees an insert. Any thread of the
            # program may write; the recorder's lock keeps them apart.
            self._connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
            # As data files: one file to copy, and whole after `kill -9`.
            self._connection.execute("pragma journal_mode = delete")
            self._connection.execute("pragma synchronous = off")
        except sqlite3.Error as error:
            raise connect.unwritable(self.path, error, _WHAT) from error

    def context(self, number: int, context: Context) -> None:
        """Add a context; it is written in one transaction with the next block."""
        self._pending.append(("insert into context values (?, ?, ?, ?, ?, ?, ?)", (number, *map(str, context))))

    def form(self, number: int, form: Form) -> None:
        """Add a form, as a context; forms come in the order of their numbers."""
        self._widths.append(width_of(form.dtype))
        row = (number, form.dtype, json.dumps(form.shape), json.dumps(form.stride), form.layout, form.placement)
        self._pending.append(("insert into form values (?, ?, ?, ?, ?, ?)", row))

    def kernel(self, number: int, name: str) -> None:
        """Add a kernel, as a context."""
        self._pending.append(("insert into kernel values (?, ?)", (number, name)))

    def block(self, block: Block) -> None:
        """Write calls."""
        blobs = (zlib.compress(a.tobytes(), _COMPRESSION) for a in (block.calls, block.results, block.inputs))
        # Hashes and mantissas are random bits: compression would take time and save nothing.
        samples, tops = _split(block.samples, block.results, self._widths)
        digests = block.rungs.tobytes(), samples, zlib.compress(tops, _COMPRESSION), block.row_rungs.tobytes()
        row = (len(block.calls), len(block.results), *blobs, *digests)
        self._write(("insert into block values (null, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row))

    def content(self, digest: str, dtype: str, shape: Sequence[int], data: bytes) -> None:
        """Keep the bytes of a tensor, once for each digest; they are written with the next block, or soon if large."""
        row = (digest, dtype, json.dumps(shape), data)
        self._pending.append(("insert or ignore into content values (?, ?, ?, ?)", row))
        self._n_pending_bytes += len(data)
        if self._n_pending_bytes > _MAX_PENDING_BYTES:
            self._write()

    def captured(self, call: int, arguments: str) -> None:
        """Keep the arguments of a call, as JSON that refers to contents by digest; it is written with the next block.

        A process that is killed may leave it without its call.
        """
        self._pending.append(("insert or replace into captured values (?, ?)", (call, arguments)))

    def output(self, result: int, digest: str) -> None:
        """Keep all elements of a result, whose content was given; it is written as `captured`."""
        self._pending.append(("insert or replace into output values (?, ?)", (result, digest)))

    def describe(self, process: Process) -> None:
        """Replace the description of the process."""
        self._write(("update process set info = ? where id = 0", (_encode(process),)))

    def finish(self, process: Process) -> None:
        """Write the final description of the process, and close."""
        self.describe(process)
        self._connection.close()

    def resume(self) -> None:
        """Go on with the recording after `finish`.

        Raises:
            DataFileError: The file is not there any more, or cannot be written.
        """
        self._connect("rw")

    def move(self, path: Path) -> None:
        """Rename the file; between `finish` and `resume`."""
        _clear(path)
        self.path = self.path.rename(path)

    def _write(self, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """In one transaction, after what waits for the next block."""
        # The lock to write at once: where another process has it, it fails before anything has changed.
        self._connection.execute("begin immediate")
        try:
            for sql, row in (*self._pending, *statements):
                self._connection.execute(sql, row)
        except BaseException:
            self._connection.execute("rollback")
            raise
        self._connection.execute("commit")
        self._pending.clear()
        self._n_pending_bytes = 0


def is_recording(path: Path) -> bool:
    """Whether a file has the header of a recording."""
    start = read_head(path, 72)
    # Bytes 68 to 71 of a database are its application id: https://www.sqlite.org/fileformat.html#application_id
    return start.startswith(b"SQLite format 3\0") and start[68:] == APPLICATION_ID.to_bytes(4, "big")


def _split(samples: npt.NDArray[np.uint64], results: npt.NDArray[Any], widths: Sequence[int]) -> tuple[bytes, bytes]:
    """Samples at the width of their dtypes, most of which are float32: their lower bytes, and the top byte of each."""
    # Top bytes have the sign and most of the exponent, and take a third when they are compressed. The rest is random.
    check_range(results["form"], 0, len(widths), "a form")
    if core is not None:
        each = np.array(widths, np.uint8)[results["form"]]
        return core.split_samples(samples, np.ascontiguousarray(results["n_samples"]), each)  # type: ignore[no-any-return]
    of_results = np.array(widths, np.int64)[results["form"]]
    ends = np.cumsum(results["n_samples"], dtype=np.int64)
    # Few: nearly all results of a block are of one dtype.
    last = np.append(np.flatnonzero(np.diff(of_results)), len(results) - 1) if len(results) else np.empty(0, np.int64)
    columns = samples.astype("<u8").view("u1").reshape(-1, 8)
    lower, tops, start = [], [], 0
    for end, width in zip(ends[last].tolist(), of_results[last].tolist(), strict=True):
        lower.append(columns[start:end, : max(width - 1, 0)].tobytes())
        tops.append(columns[start:end, max(width - 1, 0) : width].tobytes())
        start = end
    return b"".join(lower), b"".join(tops)


def _encode(process: Process) -> str:
    return json.dumps(jsonable(dataclasses.asdict(process)), allow_nan=False)


def _clear(path: Path) -> None:
    """Remove a former recording; refuse to replace anything else."""
    connect.check_folder(path, _WHAT)
    if path.is_symlink() or (path.exists() and not path.is_file()) or not _is_ours(path):
        raise DataFileError(
            f"Cannot write the recording {str(path)!r}: it exists and is no recording. Choose another name.",
            slug="data-file-unwritable",
        )
    try:
        connect.remove(path)
    except OSError as error:
        raise connect.unwritable(path, error, _WHAT) from error


def _is_ours(path: Path) -> bool:
    """Whether nothing can be lost with a file: it is a recording, empty, or not there."""
    return not path.exists() or not path.stat().st_size or is_recording(path)


def check_range(column: npt.NDArray[Any], least: int, end: Any, what: str) -> None:
    """Raise ValueError unless all of a column lies in [least, end)."""
    if len(column) and not ((column >= least) & (column < end)).all():
        raise ValueError(f"{what} that there is not")
